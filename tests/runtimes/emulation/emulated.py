"""Emulated runs over processes, of layers that wait some milliseconds or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtimes.emulation.device import Device
from runtimes.emulation.layers import EmulatedStack
from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.engine import Engine, Segment, SegmentReport
from runtimes.job import BenchSpec, DataSpec, Emulation, Job, OptimizerSpec, Task
from runtimes.peers.ddp import DdpEngine
from runtimes.peers.pipelining import PipeliningEngine
from runtimes.plan import Plan
from runtimes.planning.profile import Profile
from runtimes.systems import SYSTEMS
from tests.runtimes.emulation.clocks import Clock, device_at

__all__ = ["Feed", "Run", "job_of", "stack_of", "train"]

CLASSES = 10


class Feed:
    """``batches`` batches of one-pixel images."""

    def __init__(self, batch_size: int, batches: int = 64):
        dice = np.random.default_rng(0)
        self.batch_size, self.batches = batch_size, batches
        self.pixels = dice.normal(size=(batch_size * batches, 1, 1, 1)).astype(np.float32)
        self.classes = dice.integers(CLASSES, size=len(self.pixels))

    def batch_sizes(self) -> tuple[int, ...]:
        return (self.batch_size,) * self.batches

    def indices(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        first = step % self.batches * self.batch_size
        return np.arange(first, first + self.batch_size)

    def images(self, indices: np.ndarray[Any, Any], step: int) -> Tensor:
        return torch.from_numpy(self.pixels[indices])

    def labels(self, indices: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(self.classes[indices])


def job_of(
    system: str,
    plan: Plan,
    emulation: Emulation,
    *,
    batch_size: int = 8,
    options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Job:
    settings = {"optimizer": OptimizerSpec(lr=0.05, momentum=0.9), **changes}
    profile = emulation.profile
    assert profile is not None
    return Job(
        (Task("run", system, plan, options or {}),),
        Profile.from_json(profile).model,
        DataSpec("", ""),
        batch_size=batch_size,
        epochs=1,
        bench=BenchSpec(),
        action_timeout_s=20,
        emulation=emulation,
        **settings,
    )


@dataclass
class Run:
    """What a rank saw of some batches: seconds, report, trained weights, and its device."""

    seconds: float
    report: SegmentReport
    weights: dict[str, Tensor]
    waits: int
    late_s: float


def time(clock: Clock | None) -> float:
    return perf_counter() if clock is None else clock.time / 1e9


def stack_of(job: Job, device: Device | None = None) -> EmulatedStack:
    assert job.emulation is not None
    assert job.emulation.profile is not None
    return EmulatedStack(
        Profile.from_json(job.emulation.profile),
        job.optimizer,
        truncation=job.emulation.truncation,
        device=device,
    )


def train(rank: int, world_size: int, job: Job, batches: int, *, clock: Clock | None = None) -> Run:
    """One rank trains a first batch, and then, timed, as many as asked for."""
    linked = job.emulation is not None and job.emulation.cluster is not None
    device = Device(linked=linked) if clock is None else device_at(clock, linked=linked)
    stack, feed, (task,) = stack_of(job, device), Feed(job.batch_size), job.tasks
    if task.system in SYSTEMS:
        engine: Engine = DistributedEngine(job, task, stack, feed, rank)
    elif task.system == "torch-ddp":
        engine = DdpEngine(job, task, stack, feed, rank)
    else:
        engine = PipeliningEngine(job, task, stack, feed, rank)
    engine.train(Segment(0, (job.batch_size,)))
    torch.distributed.barrier()
    seconds = time(clock)
    report = engine.train(Segment(1, (job.batch_size,) * batches))
    seconds = time(clock) - seconds
    weights = {name: value.clone() for name, value in engine.state()["weights"].items()}
    return Run(seconds, report, weights, device.waits, device.late / 1e9)
