"""One rank's end of the process groups of a plan: an :class:`Endpoint` over torch.distributed.

Receives are posted ahead, sends are not awaited before they have arrived.  A rank with one stream
blocks in its waits.  One with several (parallel pipelines) is told what has come
(``runtimes.execution.arrivals``) and sleeps only when none of them can go on.  A wait that runs out
of time is the end of the job, since a gloo pair is closed for good by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from runtimes.emulation.links import Delays, Joined
from runtimes.execution.arrivals import Arrivals
from runtimes.execution.groups import Groups
from runtimes.plan import Plan
from runtimes.schedule import Program
from runtimes.schedule.action import RECEIVES, SENDS, Action, Op
from runtimes.schedule.posting import AHEAD, posting
from runtimes.schedule.program import channel

__all__ = ["ActionTimeoutError", "GroupEndpoint", "Reduction"]

#: What a transport may make wait.
_AWAITED = RECEIVES | {Op.NORM, Op.STEP}


class ActionTimeoutError(RuntimeError):
    """An action waited longer than its time-out."""


@dataclass
class _Link:
    """One channel as this rank sees it: the rank at its other end, the group, the shape of a
    sample; of a channel it receives on, what is posted, and how many of that have ``arrived`` if
    arrivals are reported; of one it sends on, what is under way."""

    other: int
    group: dist.ProcessGroup
    shape: Sequence[int]
    #: With the time of posting, if messages are delayed.
    posted: deque[tuple[dist.Work, Tensor, int]] = field(default_factory=deque)
    sent: deque[tuple[int, dist.Work, Tensor]] = field(default_factory=deque)
    arrived: int = 0


@dataclass(frozen=True)
class Reduction:
    """Of one part's gradients, made one tensor; ``joined``: how long it takes on a cluster."""

    work: dist.Work
    flat: Tensor
    tensors: Sequence[Tensor]
    joined: Joined | None


@dataclass
class _Sums:
    """Of an update: collectives issued, and how many of them are over; what they take on a cluster,
    in the order of issue."""

    issued: int = 0
    arrived: int = 0
    joined: list[Joined] = field(default_factory=list)


class GroupEndpoint:
    """This rank's end of the process groups; ``delays``: of the cluster that it stands for.

    gloo drops a message whose handle and tensor are gone, and does not say whether one has arrived
    without being waited for.  But a unit's gradient comes back only after its activation has
    arrived; and a gradient is of a unit in flight at the stage before, at most ``in_flight``, so
    the one sent that many before has arrived.  Both can be let go of without waiting.
    """

    def __init__(
        self, plan: Plan, rank: int, timeout_s: float, in_flight: int, delays: Delays | None
    ):
        self.plan, self.rank, self.in_flight, self.delays = plan, rank, in_flight, delays
        self.timeout_s, self._timeout = timeout_s, timedelta(seconds=timeout_s)
        self.device: torch.device
        self.dtype: torch.dtype
        self.shapes: Sequence[Sequence[int]]
        self.groups = Groups(plan)
        self._links: dict[tuple[int, Op, int | None], _Link] = {}
        #: By pipeline and update: sums of squares under way, reductions under way, and if they are
        #: reported what is of both.
        self._squares: dict[tuple[int, int], tuple[dist.Work, Tensor, Joined | None]] = {}
        self._reductions: dict[tuple[int, int], list[Reduction]] = {}
        self._sums: dict[tuple[int, int], _Sums] = {}
        #: None: there is one stream, which blocks in its waits.
        self._arrivals: Arrivals | None = None

    def open(self, program: Program) -> None:
        streams = program.of_rank(self.rank)
        if len(streams) > 1:
            self._check_several(len(streams), program)
            self._arrivals = Arrivals()
        self._program = program
        if self.delays is not None:
            self.delays.open()
        self._postings = {
            stream.pipeline: posting(stream, rendezvous=program.rendezvous) for stream in streams
        }
        for receives in self._postings.values():
            self._post(receives.begin())

    def _check_several(self, streams: int, program: Program) -> None:
        if program.rendezvous:
            raise ValueError(
                f"sends that wait for their receives would hold up all {streams} streams of a "
                "rank: use one pipeline"
            )
        if self.device.type != "cpu":
            raise ValueError(
                f"over torch.distributed {streams} streams of a rank run on a CPU only, not on "
                f'{self.device.type}: use one pipeline, or device = "cpu"'
            )

    def _link(self, action: Action) -> _Link:
        """The channel of a send or receive."""
        link = self._links.get((action.pipeline, action.op, action.peer))
        if link is None:
            key = channel(action, self.plan)
            other = key.receiver if action.op in SENDS else key.sender
            stage = self.plan.stages[action.stage]
            boundary = stage.first if action.op == Op.RECV_ACT else stage.last
            group = self.groups.messages[key.pipeline, key.kind]
            link = _Link(other, group, self.shapes[boundary - 1])
            self._links[action.pipeline, action.op, action.peer] = link
        return link

    def _post(self, receives: Iterable[Action]) -> None:
        for action in receives:
            link = self._link(action)
            assert action.interval is not None
            shape = (action.interval[1] - action.interval[0], *link.shape)
            now = 0
            if self.delays is None:
                tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
            else:
                tensor, now = self.delays.buffer(shape, self.dtype, self.device), self.delays.now()
            work = dist.irecv(tensor, src=link.other, group=link.group)
            assert work is not None
            link.posted.append((work, tensor, now))
            if self._arrivals is not None:
                self._arrivals.expect(link, work)

    # -- several streams -------------------------------------------------------------------

    def ready(self, action: Action) -> bool:
        """A single stream has nothing else to do: it blocks in the wait.  Of several, one whose
        message is there, or whose sums are: on a cluster, by the clock of the emulated device."""
        if self._arrivals is None:
            return True
        self._arrivals.note()
        if not self._has_come(action):
            return False
        return self.delays is None or self._due(action) <= self.delays.now()

    def _has_come(self, action: Action) -> bool:
        if action.op in RECEIVES:
            self._post(self._postings[action.pipeline].before(action))
            return self._link(action).arrived > 0
        sums = self._sums.get((action.pipeline, action.unit))
        return sums is None or sums.arrived == sums.issued

    def _due(self, action: Action) -> int:
        """When what has come is there on the cluster."""
        assert self.delays is not None
        if action.op in RECEIVES:
            return self.delays.due(self._link(action).posted[0][1])
        sums = self._sums.get((action.pipeline, action.unit))
        return 0 if sums is None else max(map(self.delays.end, sums.joined), default=0)

    def rest(self, can_go_on: Callable[[], bool], waiting: Sequence[Action]) -> None:
        """Sleep until ``can_go_on``; ``waiting``: the next actions of all streams.  Raises
        ActionTimeoutError, naming them, when the time is over."""
        assert self._arrivals is not None, "nothing is reported to a rank of one stream"
        begin = perf_counter_ns()
        since = 0 if self.delays is None else self.delays.now()
        while not can_go_on():
            left = self.timeout_s - (perf_counter_ns() - begin) / 1e9
            if left <= 0:
                raise self._timed_out(", ".join(map(str, waiting)), self.timeout_s)
            if self.delays is None:
                self._arrivals.rest(left)
            else:
                now = self.delays.now()
                due = min((due for due in self._dues(waiting) if due > now), default=None)
                self.delays.rest(self._arrivals.rest, left, due)
        if self.delays is not None:
            self.delays.rested(min(self._dues(waiting)), since)

    def _dues(self, waiting: Sequence[Action]) -> list[int]:
        return [self._due(a) for a in waiting if a.op in _AWAITED and self._has_come(a)]

    def _watch(self, action: Action, work: dist.Work, joined: Joined | None) -> None:
        """An update's collective has been issued."""
        if self._arrivals is None:
            return
        sums = self._sums.setdefault((action.pipeline, action.unit), _Sums())
        sums.issued += 1
        self._arrivals.watch(sums, work)
        if joined is not None:
            sums.issued += 1
            self._arrivals.watch(sums, joined.work)
            sums.joined.append(joined)

    # -- messages --------------------------------------------------------------------------

    def _timed_out(self, waiting: str, seconds: float) -> ActionTimeoutError:
        return ActionTimeoutError(
            f"{waiting} waited {seconds:.0f} s, the action time-out: a rank hangs, or "
            f"action_timeout_s is too short"
        )

    def _wait(self, work: dist.Work, action: Action, *, on_stream: bool = False) -> None:
        """``on_stream``: on an accelerator only its stream waits."""
        begin = perf_counter_ns()
        try:
            work.wait(self._timeout)
            if self.device.type != "cpu" and not on_stream:
                torch.accelerator.current_stream(self.device).synchronize()
        except RuntimeError as error:
            waited = (perf_counter_ns() - begin) / 1e9
            if waited >= self.timeout_s:
                raise self._timed_out(str(action), waited) from error
            raise

    def send(self, action: Action, tensor: Tensor) -> None:
        link, due = self._link(action), 0
        if self.delays is None:
            message = tensor.contiguous()
        else:
            message, due = self.delays.sealed(action, link.other, tensor)
        self._post(self._postings[action.pipeline].before(action))
        work = dist.isend(message, dst=link.other, group=link.group)
        assert work is not None
        if self._program.rendezvous and action.op == Op.SEND_ACT:
            self._wait(work, action)
            if self.delays is not None:
                self.delays.taken(due, action, link.other, tensor)
        else:
            link.sent.append((action.unit, work, message))
            self._let_go(link, action)
        self._post(self._postings[action.pipeline].after(action))

    def _let_go(self, link: _Link, action: Action) -> None:
        """Of what has arrived, now that ``action`` is sent."""
        if not self._program.training:
            # Nothing flows back, and a sender could run ahead for ever.
            most = AHEAD
        elif action.op == Op.SEND_GRAD:
            most = self.in_flight
        else:
            return
        while len(link.sent) > most:
            self._wait(link.sent.popleft()[1], action, on_stream=True)

    def receive(self, action: Action, shape: Sequence[int]) -> Tensor:
        link = self._link(action)
        self._post(self._postings[action.pipeline].before(action))
        work, tensor, posted = link.posted.popleft()
        since = 0 if self.delays is None else self.delays.now()
        if self._arrivals is None:
            self._wait(work, action)
        else:
            assert link.arrived, f"{action} before its message has come"
            link.arrived -= 1
        if self.delays is not None:
            meeting = self._program.rendezvous and action.op == Op.RECV_ACT
            tensor = self.delays.opened(
                action, link.other, tensor, shape, since, posted if meeting else None
            )
        assert tensor.shape == shape
        if action.op == Op.RECV_GRAD and not self._program.rendezvous:
            there = self._links[action.pipeline, Op.SEND_ACT, action.peer]
            for entry in [entry for entry in there.sent if entry[0] == action.unit]:
                self._wait(entry[1], action, on_stream=True)
                there.sent.remove(entry)
        self._post(self._postings[action.pipeline].after(action))
        return tensor

    def reduce(self, action: Action, tensors: Sequence[Tensor]) -> None:
        ranks = self.plan.stages[action.stage].ranks
        group = self.groups.replicas[action.pipeline, action.stage]
        real = [] if self.delays is None else self.delays.part_bytes(action, tensors)
        if action.part is None:
            if self._arrivals is not None:
                raise ValueError(
                    f"{action} would block, while another replica may block in another pipeline's: "
                    "use one pipeline, or reductions that overlap the backward"
                )
            for number, tensor in enumerate(tensors):
                joined = self._join(group, ranks, real[number : number + 1])
                work = dist.all_reduce(tensor, group=group, async_op=True)
                assert work is not None
                self._reduced(work, joined, action)
            return
        if not tensors:  # A part without weights, on every replica alike.
            return
        flat = _flatten_dense_tensors(tensors)
        # As one piece, whatever number of tensors it is made of.
        joined = self._join(group, ranks, [(sum(size for size, _ in real), 1)])
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        reduction = Reduction(work, flat, tensors, joined)
        self._reductions.setdefault((action.pipeline, action.unit), []).append(reduction)
        self._watch(action, work, joined)

    def _join(
        self, group: dist.ProcessGroup, ranks: Sequence[int], real: Sequence[tuple[int, int]]
    ) -> Joined | None:
        """``real``: bytes and number of pieces of what is reduced."""
        if self.delays is None:
            return None
        ((size, pieces),) = real
        return self.delays.join(group, ranks, size, pieces)

    def _reduced(self, work: dist.Work, joined: Joined | None, action: Action) -> None:
        since = 0 if self.delays is None else self.delays.now()
        self._wait(work, action)
        if joined is not None:
            assert self.delays is not None
            self._wait(joined.work, action)
            self.delays.over(joined, since)

    def finish_reduce(self, action: Action) -> None:
        key = action.pipeline, action.unit
        self._sums.pop(key, None)
        for reduction in self._reductions.pop(key, ()):
            self._reduced(reduction.work, reduction.joined, action)
            pieces = _unflatten_dense_tensors(reduction.flat, reduction.tensors)
            torch._foreach_copy_(list(reduction.tensors), list(pieces))

    def norm(self, action: Action, squares: Tensor) -> None:
        everyone = self.groups.everyone[action.pipeline]
        joined = self._join(everyone, range(self.plan.world_size), [(squares.nbytes, 1)])
        work = dist.all_reduce(squares, group=everyone, async_op=True)
        assert work is not None
        self._squares[action.pipeline, action.unit] = work, squares, joined
        self._watch(action, work, joined)

    def finish_norm(self, action: Action) -> Tensor:
        key = action.pipeline, action.unit
        self._sums.pop(key, None)
        work, squares, joined = self._squares.pop(key)
        self._reduced(work, joined, action)
        return squares

    def average(self, running: Sequence[Tensor]) -> None:
        """Give all replicas of this stage the mean of ``running``, in place; of integers the
        largest.  As ``average_copies``, over processes."""
        stage, replica = self.plan.place(self.rank)
        place = Action(0, stage, replica, Op.REDUCE, 0)
        for integer, op in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
            chosen = [tensor for tensor in running if tensor.is_floating_point() != integer]
            flat = torch.cat([tensor.flatten() for tensor in chosen])
            work = dist.all_reduce(flat, op, group=self.groups.replicas[0, stage], async_op=True)
            assert work is not None
            self._wait(work, place)
            if not integer:
                flat /= self.plan.stages[stage].replicas
            pieces = flat.split([tensor.numel() for tensor in chosen])
            for tensor, piece in zip(chosen, pieces, strict=True):
                tensor.copy_(piece.view_as(tensor))

    def messages(self) -> Iterator[Tensor]:
        for link in self._links.values():
            yield from (tensor for _, tensor, _ in link.posted)
            yield from (tensor for _, _, tensor in link.sent)

    def reductions(self) -> Iterator[Tensor]:
        for reductions in self._reductions.values():
            yield from (reduction.flat for reduction in reductions)

    def close(self) -> None:
        for link in self._links.values():
            while link.sent:
                _, work, _ = link.sent.popleft()
                self._wait(work, Action(0, *self.plan.place(self.rank), Op.SEND_ACT, 0))
        unused = any(link.posted for link in self._links.values())
        assert not unused, "receives were posted that nothing used"
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None
