"""One rank a process, over torch.distributed: gloo on CPUs, nccl on GPUs.

What goes between ranks is ``runtimes.execution.endpoint``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist
from torch import Tensor

from runtimes.emulation.device import Device
from runtimes.emulation.layers import EmulatedStack
from runtimes.emulation.links import Delays
from runtimes.execution.clocks import clock_offsets
from runtimes.execution.endpoint import GroupEndpoint
from runtimes.execution.engine import Accuracy, Feed, Segment, SegmentReport
from runtimes.execution.trace import MessageKey, breakdown
from runtimes.execution.worker import Worker
from runtimes.job import Job, Task
from runtimes.model.stack import LayerStack
from runtimes.plan import Plan
from runtimes.schedule import Program
from runtimes.schedule.action import Action
from runtimes.simulation.cluster import Cluster
from runtimes.system import System, evaluation_program
from runtimes.systems import get_system

__all__ = ["DistributedEngine"]


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
        self.end = GroupEndpoint(task.plan, rank, job.action_timeout_s, before_it, delays)
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
        self._walk()
        self.worker.finish()

    def _walk(self) -> None:
        """To the ends of all streams.  A single one never rests: it blocks in its waits."""
        worker = self.worker
        while True:
            while worker.advance():
                pass
            waiting = worker.waiting_at
            if not waiting:
                return
            since = perf_counter_ns()
            self.end.rest(worker.can_go_on, waiting)
            worker.rested(since)

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
        self.end.groups.leave()
