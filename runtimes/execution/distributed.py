"""One rank a process, over torch.distributed: gloo on CPUs, nccl on GPUs.

Receives are posted ahead, sends are not awaited before they have arrived, and activations and
gradients have process groups of their own: a backend that orders messages by arrival cannot then
hold one behind the other.  A wait that runs out of time is the end of the job, since a gloo pair
is closed for good by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache, partial
from time import perf_counter_ns
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from runtimes.emulation.device import Device
from runtimes.emulation.layers import EmulatedStack
from runtimes.emulation.links import Delays, Joined
from runtimes.execution.clocks import clock_offsets
from runtimes.execution.engine import Accuracy, Feed, Segment, SegmentReport
from runtimes.execution.trace import MessageKey, breakdown
from runtimes.execution.worker import Worker
from runtimes.job import Job, Task
from runtimes.model.stack import LayerStack
from runtimes.plan import Plan
from runtimes.schedule import Program
from runtimes.schedule.action import SENDS, Action, Op
from runtimes.schedule.posting import AHEAD, posting
from runtimes.schedule.program import channel
from runtimes.simulation.cluster import Cluster
from runtimes.system import System, evaluation_program
from runtimes.systems import get_system

__all__ = ["ActionTimeoutError", "DistributedEngine"]


class ActionTimeoutError(RuntimeError):
    """An action waited longer than its time-out."""


def _group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A new group; on ranks outside it a placeholder that they never use."""
    return cast(dist.ProcessGroup, dist.new_group(list(ranks)))


@dataclass
class _Link:
    """One channel as this rank sees it: the rank at its other end, the group, the shape of a
    sample; of a channel it receives on, what is posted; of one it sends on, what is under way."""

    other: int
    group: dist.ProcessGroup
    shape: Sequence[int]
    #: With the time of posting, if messages are delayed.
    posted: deque[tuple[dist.Work, Tensor, int]] = field(default_factory=deque)
    sent: deque[tuple[int, dist.Work, Tensor]] = field(default_factory=deque)


@dataclass(frozen=True)
class _Reduction:
    """Of one part's gradients, made one tensor; ``joined``: how long it takes on a cluster."""

    work: dist.Work
    flat: Tensor
    tensors: Sequence[Tensor]
    joined: Joined | None


class _End:
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
        # Every rank creates all groups, in the same order.
        everyone = list(range(plan.world_size))
        self.groups = {kind: _group(everyone) for kind in ("ACT", "GRAD")}
        self.replicas: dict[int, dist.ProcessGroup] = {}
        for number, stage in enumerate(plan.stages):
            if stage.replicas > 1:
                self.replicas[number] = _group(stage.ranks)
        self.everyone = _group(everyone)
        self._links: dict[tuple[Op, int | None], _Link] = {}
        #: Sums of squares under way, by update.
        self._squares: dict[int, tuple[dist.Work, Tensor, Joined | None]] = {}
        self._reductions: dict[int, list[_Reduction]] = {}

    def open(self, program: Program) -> None:
        streams = program.of_rank(self.rank)
        if len(streams) != 1:
            raise ValueError(f"a rank runs one stream over torch.distributed, not {len(streams)}")
        self._program = program
        self._posting = posting(streams[0], rendezvous=program.rendezvous)
        self._post(self._posting.begin())

    def _link(self, action: Action) -> _Link:
        """The channel of a send or receive, which in one stream its kind and peer tell."""
        link = self._links.get((action.op, action.peer))
        if link is None:
            key = channel(action, self.plan)
            other = key.receiver if action.op in SENDS else key.sender
            stage = self.plan.stages[action.stage]
            boundary = stage.first if action.op == Op.RECV_ACT else stage.last
            link = _Link(other, self.groups[key.kind], self.shapes[boundary - 1])
            self._links[action.op, action.peer] = link
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

    def ready(self, action: Action) -> bool:
        """A single stream has nothing else to do: it blocks in the wait."""
        return True

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
                raise ActionTimeoutError(
                    f"{action} waited {waited:.0f} s, the action time-out: a rank hangs, or "
                    f"action_timeout_s is too short"
                ) from error
            raise

    def send(self, action: Action, tensor: Tensor) -> None:
        link, due = self._link(action), 0
        if self.delays is None:
            message = tensor.contiguous()
        else:
            message, due = self.delays.sealed(action, link.other, tensor)
        self._post(self._posting.before(action))
        work = dist.isend(message, dst=link.other, group=link.group)
        assert work is not None
        if self._program.rendezvous and action.op == Op.SEND_ACT:
            self._wait(work, action)
            if self.delays is not None:
                self.delays.taken(due, action, link.other, tensor)
        else:
            link.sent.append((action.unit, work, message))
            self._let_go(link, action)
        self._post(self._posting.after(action))

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
        self._post(self._posting.before(action))
        work, tensor, posted = link.posted.popleft()
        self._wait(work, action)
        if self.delays is not None:
            meeting = self._program.rendezvous and action.op == Op.RECV_ACT
            tensor = self.delays.opened(
                action, link.other, tensor, shape, posted if meeting else None
            )
        assert tensor.shape == shape
        if action.op == Op.RECV_GRAD and not self._program.rendezvous:
            there = self._links[Op.SEND_ACT, action.peer]
            for entry in [entry for entry in there.sent if entry[0] == action.unit]:
                self._wait(entry[1], action, on_stream=True)
                there.sent.remove(entry)
        self._post(self._posting.after(action))
        return tensor

    def reduce(self, action: Action, tensors: Sequence[Tensor]) -> None:
        group, ranks = self.replicas[action.stage], self.plan.stages[action.stage].ranks
        real = [] if self.delays is None else self.delays.part_bytes(action, tensors)
        if action.part is None:
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
        self._reductions.setdefault(action.unit, []).append(_Reduction(work, flat, tensors, joined))

    def _join(
        self, group: dist.ProcessGroup, ranks: Sequence[int], real: Sequence[tuple[int, int]]
    ) -> Joined | None:
        """``real``: bytes and number of pieces of what is reduced."""
        if self.delays is None:
            return None
        ((size, pieces),) = real
        return self.delays.join(group, ranks, size, pieces)

    def _reduced(self, work: dist.Work, joined: Joined | None, action: Action) -> None:
        self._wait(work, action)
        if joined is not None:
            assert self.delays is not None
            self._wait(joined.work, action)
            self.delays.over(joined)

    def finish_reduce(self, action: Action) -> None:
        for reduction in self._reductions.pop(action.unit, ()):
            self._reduced(reduction.work, reduction.joined, action)
            pieces = _unflatten_dense_tensors(reduction.flat, reduction.tensors)
            torch._foreach_copy_(list(reduction.tensors), list(pieces))

    def norm(self, action: Action, squares: Tensor) -> None:
        joined = self._join(self.everyone, range(self.plan.world_size), [(squares.nbytes, 1)])
        work = dist.all_reduce(squares, group=self.everyone, async_op=True)
        assert work is not None
        self._squares[action.unit] = work, squares, joined

    def finish_norm(self, action: Action) -> Tensor:
        work, squares, joined = self._squares.pop(action.unit)
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
            work = dist.all_reduce(flat, op, group=self.replicas[stage], async_op=True)
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

    def leave(self) -> None:
        """Every rank leaves at the same place: then no message is under way in any group."""
        dist.barrier()
        for group in (*self.groups.values(), *self.replicas.values(), self.everyone):
            dist.destroy_process_group(group)


def _delays(job: Job, plan: Plan, stack: LayerStack, rank: int) -> Delays | None:
    if job.emulation is None or job.emulation.cluster is None:
        return None
    cluster, device, profile = Cluster.from_json(job.emulation.cluster), None, None
    if isinstance(stack, EmulatedStack):
        device, profile = stack.device, stack.profile
    return Delays(cluster, plan, rank, device or Device(), profile)


class DistributedEngine:
    """One of our systems on this rank: an :class:`Engine`."""

    def __init__(
        self,
        job: Job,
        task: Task,
        stack: LayerStack,
        feed: Feed,
        rank: int,
        *,
        system: System | None = None,
        before: Callable[[Action], None] | None = None,
        keep_gradients: bool = False,
    ):
        self.plan = task.plan
        self.system = system or get_system(task.system, task.options)
        self.system.check(task.plan)
        self.norm = job.optimizer.global_norm
        stage, _ = task.plan.place(rank)
        before_it = self.system.declared(task.plan).in_flight(stage - 1) if stage else 0
        delays = _delays(job, task.plan, stack, rank)
        self.end = _End(task.plan, rank, job.action_timeout_s, before_it, delays)
        self.worker = Worker(
            job,
            task,
            stack,
            feed,
            rank,
            self.end,
            self.system,
            before=before,
            keep_gradients=keep_gradients,
        )
        self.end.device, self.end.dtype = self.worker.device, self.worker.dtype
        self.end.shapes = self.worker.shapes
        self.offsets = clock_offsets(self.worker.device)
        # Segments of the same batches share a program, and so what was generated of its stream.
        self._program = lru_cache(maxsize=4)(partial(self.system.program, self.plan))

    def _run(
        self, program: Program, first_step: int, feed: Feed | None = None, *, mean: bool = False
    ) -> None:
        self.worker.start(program, first_step, feed, mean=mean)
        while self.worker.advance():
            pass
        self.worker.finish()

    def train(self, segment: Segment) -> SegmentReport:
        worker = self.worker
        program = self._program(
            segment.batches,
            carried=worker.copies.carried,
            norm=self.norm,
            phase=segment.first % self.system.period,
        )
        self._run(program, segment.first)
        for copy in worker.copies:
            if copy.running and worker.stage.replicas > 1:
                self.end.average(list(copy.running.values()))
        sent: list[dict[MessageKey, int] | None] = [None] * self.plan.world_size
        dist.all_gather_object(sent, worker.trace.sent(self.plan))
        merged: dict[MessageKey, int] = {}
        for share in sent:
            merged |= share or {}
        parts = breakdown(worker.trace, merged, self.plan, self.offsets)
        return worker.report(parts["wall"], parts)

    def evaluate(self, feed: Feed, samples: int, batch_size: int) -> Accuracy:
        program = evaluation_program(self.plan, samples, batch_size)
        mean = None
        if self.worker.copies.averaging is not None:
            # First, so that what is bound when it is over is not a set of its own.
            self._run(program, 0, feed, mean=True)
            mean = self.worker.accuracy()
        self._run(program, 0, feed)
        return replace(self.worker.accuracy(), mean=mean)

    @property
    def last_gradients(self) -> dict[str, Tensor]:
        return self.worker.copies[0].updates.last_gradients

    def state(self) -> Mapping[str, Any]:
        return self.worker.copies.state()

    def load(self, state: Mapping[str, Any]) -> None:
        # Every rank may have been given its own share, and all have to know of the same versions.
        stashes: list[bool] = [False] * self.plan.world_size
        dist.all_gather_object(stashes, bool(state.get("stash")))
        self.worker.copies.load({"stash": {}} | dict(state), carried=any(stashes))

    def close(self) -> None:
        self.end.leave()
