"""One rank a process, over torch.distributed: gloo on CPUs, nccl on GPUs.

Receives are posted ahead (``AHEAD`` a channel), sends are never awaited, and activations and
gradients have process groups of their own: a backend that orders messages by arrival cannot then
hold one behind the other.  A wait that runs out of time is the end of the job, since a gloo pair
is closed for good by it.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from time import perf_counter_ns
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from runtimes.execution.engine import Accuracy, Feed, Segment, SegmentReport
from runtimes.execution.trace import MessageKey, breakdown
from runtimes.execution.worker import Worker
from runtimes.job import Job, Task
from runtimes.model.stack import LayerStack
from runtimes.plan import Plan
from runtimes.schedule import Program
from runtimes.schedule.action import RECEIVES, Action, Op
from runtimes.schedule.program import Channel, channel
from runtimes.system import System, evaluation_program
from runtimes.systems import get_system

__all__ = ["ActionTimeoutError", "DistributedEngine", "clock_offsets"]

#: Receives posted ahead on each channel.  Two let a message arrive while another is used; more
#: would only hold more memory, since a sender is never made to wait.
AHEAD = 2


class ActionTimeoutError(RuntimeError):
    """An action waited longer than its time-out."""


def _group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A new group; on ranks outside it a placeholder that they never use."""
    return cast(dist.ProcessGroup, dist.new_group(list(ranks)))


class _End:
    """This rank's end of the process groups."""

    def __init__(self, plan: Plan, rank: int, timeout_s: float):
        self.plan, self.rank = plan, rank
        self.timeout_s = timeout_s
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
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._reductions: dict[int, list[tuple[dist.Work, Tensor, Sequence[Tensor]]]] = {}

    def open(self, program: Program) -> None:
        streams = program.of_rank(self.rank)
        if len(streams) != 1:
            raise ValueError(f"a rank runs one stream over torch.distributed, not {len(streams)}")
        self._upcoming = (action for action in streams[0] if action.op in RECEIVES)
        self._waiting: dict[Channel, deque[Action]] = {}
        self._posted: dict[Channel, deque[tuple[dist.Work, Tensor]]] = {}
        # A sender never has more under way than its units in flight; only an evaluation, in
        # which nothing flows back, could run ahead for ever.
        limit = program.batches.micro_batches if program.training else 1
        neighbours = max(stage.replicas for stage in self.plan.stages)
        self._most_sends = (2 * limit + AHEAD) * 2 * neighbours
        self._post_ahead()

    def _post_ahead(self) -> None:
        """Look as far ahead in the stream as it takes to have a next receive for each channel."""
        stage, _ = self.plan.place(self.rank)
        for action in self._upcoming:
            key = channel(action, self.plan)
            self._waiting.setdefault(key, deque()).append(action)
            self._fill(key, stage)
            if len(self._waiting[key]) > AHEAD:
                break

    def _fill(self, key: Channel, stage: int) -> None:
        posted = self._posted.setdefault(key, deque())
        waiting = self._waiting[key]
        while waiting and len(posted) < AHEAD:
            action = waiting.popleft()
            boundary = self.plan.stages[stage].first - 1
            if action.op == Op.RECV_GRAD:
                boundary = self.plan.stages[stage].last - 1
            assert action.interval is not None
            count = action.interval[1] - action.interval[0]
            shape = (count, *self.shapes[boundary])
            tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
            work = dist.irecv(tensor, src=key.sender, group=self.groups[key.kind])
            assert work is not None
            posted.append((work, tensor))

    def ready(self, action: Action) -> bool:
        """A single stream has nothing else to do: it blocks in the wait."""
        return True

    def _wait(self, work: dist.Work, action: Action) -> None:
        begin = perf_counter_ns()
        try:
            work.wait(timedelta(seconds=self.timeout_s))
            if self.device.type != "cpu":
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
        key = channel(action, self.plan)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dst=key.receiver, group=self.groups[key.kind])
        assert work is not None
        # The handle and the tensor live until the message has gone: gloo drops it otherwise.
        self._sends.append((work, tensor))
        if len(self._sends) > self._most_sends:
            self._wait(self._sends.popleft()[0], action)

    def receive(self, action: Action, shape: Sequence[int]) -> Tensor:
        key = channel(action, self.plan)
        while not self._posted.get(key):
            self._post_ahead()
        work, tensor = self._posted[key].popleft()
        self._wait(work, action)
        assert tuple(tensor.shape) == tuple(shape)
        stage, _ = self.plan.place(self.rank)
        self._fill(key, stage)
        if not self._waiting[key]:
            self._post_ahead()
        return tensor

    def reduce(self, action: Action, tensors: Sequence[Tensor]) -> None:
        group = self.replicas[action.stage]
        if action.part is None:
            for tensor in tensors:
                work = dist.all_reduce(tensor, group=group, async_op=True)
                assert work is not None
                self._wait(work, action)
            return
        if not tensors:  # A part without weights, on every replica alike.
            return
        flat = _flatten_dense_tensors(tensors)
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        self._reductions.setdefault(action.unit, []).append((work, flat, tensors))

    def finish_reduce(self, action: Action) -> None:
        for work, flat, tensors in self._reductions.pop(action.unit, ()):
            self._wait(work, action)
            pieces = _unflatten_dense_tensors(flat, tensors)
            torch._foreach_copy_(list(tensors), list(pieces))

    def close(self) -> None:
        while self._sends:
            work, _ = self._sends.popleft()
            self._wait(work, Action(0, *self.plan.place(self.rank), Op.SEND_ACT, 0))
        assert not any(self._posted.values()), "receives were posted that nothing used"

    def leave(self) -> None:
        """Every rank leaves at the same place: then no message is under way in any group."""
        dist.barrier()
        for group in (*self.groups.values(), *self.replicas.values()):
            dist.destroy_process_group(group)


def clock_offsets(device: torch.device) -> list[int]:
    """Nanoseconds to add to each rank's perf_counter to read this rank's.

    Ranks of one host share its clock; between hosts it is the best of eight round trips.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname())
    if len(set(hosts)) == 1:
        return [0] * size
    to_first = best = 0
    for other in range(1, size):
        for attempt in range(8):
            mark = torch.zeros(1, dtype=torch.int64, device=device)
            if rank == 0:
                dist.recv(mark, src=other)
                mark.fill_(perf_counter_ns())
                dist.send(mark, dst=other)
            elif rank == other:
                begin = perf_counter_ns()
                dist.send(mark, dst=0)
                dist.recv(mark, src=0)
                end = perf_counter_ns()
                trip = end - begin
                if attempt == 0 or trip < best:
                    best, to_first = trip, int(mark) - (begin + end) // 2
    shifts: list[Any] = [None] * size
    dist.all_gather_object(shifts, to_first)
    return [shift - to_first for shift in shifts]


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
        self.end = _End(task.plan, rank, job.action_timeout_s)
        self.worker = Worker(
            job,
            task,
            stack,
            feed,
            rank,
            self.end,
            before=before,
            keep_gradients=keep_gradients,
        )
        self.end.device, self.end.dtype = self.worker.device, self.worker.dtype
        self.end.shapes = self.worker.shapes
        self.peers = {
            (number, replica): other
            for number, stage in enumerate(task.plan.stages)
            for replica, other in enumerate(stage.ranks)
        }
        self.offsets = clock_offsets(self.worker.device)

    def _run(self, program: Program, first_step: int, feed: Feed | None = None) -> None:
        self.worker.start(program, first_step, feed)
        while self.worker.advance():
            pass
        self.worker.finish()

    def train(self, segment: Segment) -> SegmentReport:
        self._run(self.system.program(self.plan, segment.batches), segment.first)
        worker = self.worker
        sent: list[dict[MessageKey, int] | None] = [None] * self.plan.world_size
        dist.all_gather_object(sent, worker.trace.sent(self.peers))
        merged: dict[MessageKey, int] = {}
        for share in sent:
            merged |= share or {}
        parts = breakdown(worker.trace, merged, self.peers, self.offsets)
        return SegmentReport(
            wall_s=parts["wall"],
            losses=worker.loss_shares(),
            breakdown=parts,
            live_versions=worker.versions.most_live,
            peak_in_flight=worker.peak_in_flight,
        )

    def evaluate(self, feed: Feed, samples: int, batch_size: int) -> Accuracy:
        self._run(evaluation_program(self.plan, samples, batch_size), 0, feed)
        return self.worker.accuracy()

    @property
    def last_gradients(self) -> dict[str, Tensor]:
        return self.worker.last_gradients

    def state(self) -> Mapping[str, Any]:
        return self.worker.state()

    def load(self, state: Mapping[str, Any], step: int) -> None:
        self.worker.load(state)

    def close(self) -> None:
        self.end.leave()
