"""A stage's computation alone: what a schedule's bound is made of.

On an emulated device, what its profile says.  Else measured by all ranks at the same time, with
every core busy, in slices between the runs: a core that shares caches and memory with a busy
neighbour is slower than an idle machine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from runtimes.emulation.layers import EmulatedStack
from runtimes.execution.bound import Slice
from runtimes.execution.criterion import cross_entropy_sum
from runtimes.execution.engine import Feed
from runtimes.execution.optimizer import build_optimizer
from runtimes.execution.precision import autocast, dtype_of, synchronize
from runtimes.job import Job, Task
from runtimes.model.stack import LayerStack
from runtimes.plan import split
from runtimes.system import System
from runtimes.systems import schedule_of

__all__ = ["Rehearsal", "rehearsals"]


class Rehearsal(Protocol):
    def measure(self, number: int) -> Slice:
        """Of round ``number``: measured once, however many tasks share this rehearsal."""


def _largest_unit(job: Job, task: Task, rank: int) -> int:
    """Samples of it that the rank computes."""
    index, replica = task.plan.place(rank)
    low, high = split(task.batch_size or job.batch_size, task.plan.micro_batches)[-1]
    if not schedule_of(task.system, task.options).rounds:
        low, high = split(high - low, task.plan.stages[index].replicas)[replica]
    return max(1, high - low)


class _Known:
    """Of an emulated stage, which takes what its profile says."""

    def __init__(self, job: Job, task: Task, stack: EmulatedStack, rank: int):
        index, _ = task.plan.place(rank)
        stage = task.plan.stages[index]
        samples = _largest_unit(job, task, rank)
        system = schedule_of(task.system, task.options)
        layers = stage.first, stage.last
        forward = stack.profile.forward(*layers, samples)
        self._slice = Slice(
            forward,
            forward if stage.recompute else 0.0,
            stack.profile.backward(*layers, samples),
            stack.step_seconds(*layers, system.live_versions(task.plan, index)),
        )

    def measure(self, number: int) -> Slice:
        return self._slice


class _Measured:
    """This rank's stage of a task, on its largest unit, without any messages."""

    def __init__(self, job: Job, task: Task, stack: LayerStack, feed: Feed, rank: int):
        index, _ = task.plan.place(rank)
        stage = task.plan.stages[index]
        self._units, self._recompute = task.plan.micro_batches, stage.recompute
        self._precision, self._smoothing = job.precision, job.label_smoothing
        self._device = device = torch.device(job.device)
        dtype = dtype_of(job.precision)
        self._module = stack.stage(stage.first, stage.last, job.seed)
        self._module.materialise(
            stack.initial_weights(stage.first, stage.last, job.seed, device, dtype)
        )
        self._samples = feed.indices(0)[: _largest_unit(job, task, rank)]
        self._input = feed.images(self._samples, 0)
        self._labels = feed.labels(self._samples)
        if index:
            shape = stack.output_shapes(self._input.shape[1:], dtype)[stage.first - 1]
            self._input = torch.randn(len(self._samples), *shape, dtype=dtype, device=device)
            self._input.requires_grad_()
        self._is_last = index == len(task.plan.stages) - 1
        self._optimizer = build_optimizer(self._module.parameters(), job.optimizer)
        self._latest: tuple[int, Slice] | None = None

    def measure(self, number: int) -> Slice:
        if self._latest is None or self._latest[0] != number:
            dist.barrier()
            self._unit()
            synchronize(self._device)
            units = np.mean([self._unit() for _ in range(self._units)], axis=0)
            forward, again, backward = map(float, units)
            begin = perf_counter()
            self._optimizer.step()
            synchronize(self._device)
            step = perf_counter() - begin
            self._optimizer.zero_grad()
            self._latest = (number, Slice(forward, again, backward, step))
        return self._latest[1]

    def _unit(self) -> tuple[float, float, float]:
        """Seconds of forward, recomputation and backward."""
        begin = perf_counter()
        with torch.no_grad() if self._recompute else nullcontext():
            out = self._forward()
        synchronize(self._device)
        middle = again = perf_counter()
        if self._recompute:
            out = self._forward()
            synchronize(self._device)
            again = perf_counter()
        torch.autograd.backward(out, None if self._is_last else torch.ones_like(out))
        self._input.grad = None
        synchronize(self._device)
        return middle - begin, again - middle, perf_counter() - again

    def _forward(self) -> torch.Tensor:
        self._module.random.set(0, np.asarray(self._samples))
        with autocast(self._precision, self._input.device):
            out: torch.Tensor = self._module(self._input)
        if self._is_last:
            out = cross_entropy_sum(out, self._labels, self._smoothing) / len(self._samples)
        return out


def _several(system: System, task: Task) -> tuple[bool, ...]:
    """Of which stages a step makes a further version of the weights."""
    stages = range(len(task.plan.stages))
    return tuple(system.live_versions(task.plan, stage) > 1 for stage in stages)


def rehearsals(
    job: Job, stack: LayerStack, feeds: Sequence[Feed], rank: int
) -> Sequence[Rehearsal]:
    """One for each task; tasks whose replicas compute the same share it."""
    known: dict[object, Rehearsal] = {}
    keys = [
        (task.plan, task.batch_size, system.rounds, _several(system, task))
        for task in job.tasks
        for system in [schedule_of(task.system, task.options)]
    ]
    for task, key, feed in zip(job.tasks, keys, feeds, strict=True):
        if key not in known:
            known[key] = (
                _Known(job, task, stack, rank)
                if isinstance(stack, EmulatedStack)
                else _Measured(job, task, stack, feed, rank)
            )
    return [known[key] for key in keys]
