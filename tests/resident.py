"""Whether bytes that are counted are bytes that the process has: stages of real ViT-H/14 blocks.

    python -m tests.resident

Each case trains one stage of more than 1 GB in a process of its own, with neighbours that cost
nothing: what arrives is made where it is received.  Growth of resident memory from before the stage
has weights to its peak stands beside the peak that was counted and the one that was predicted.
It is measured twice: as the allocator (glibc's malloc) is, which keeps much of what is freed for
later, and with every tensor given back when it is freed, which shows what is the allocator's share.
Takes up to 3 GB of memory and some minutes, so it is no part of the test suite.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from runtimes.execution.accounting import KINDS, MemoryObserver, Peak
from runtimes.execution.worker import Worker
from runtimes.job import DataSpec, Job, ModelSpec, OptimizerSpec, Task
from runtimes.model.stack import LayerStack, build_stack
from runtimes.plan import Plan
from runtimes.planning.footprint import Footprint
from runtimes.planning.memory import memory_peaks
from runtimes.schedule import Action, Program
from runtimes.systems import get_system

__all__ = ["ALLOCATORS", "CASES", "Case", "measure"]

#: Settings of the allocator, and how far resident memory may then be from the model.
ALLOCATORS: dict[str, tuple[dict[str, str], float]] = {
    "as it is": ({}, 0.2),
    "giving back": ({"MALLOC_MMAP_THRESHOLD_": "131072"}, 0.05),
}
IMAGE = (3, 224, 224)


@dataclass(frozen=True)
class Case:
    """``sizes``: layers of each stage, of which the one at ``stage`` is trained."""

    system: str
    optimizer: OptimizerSpec
    sizes: tuple[int, ...]
    stage: int
    batch: int
    batches: int
    micro_batches: int = 1
    recompute: bool = False

    def __str__(self) -> str:
        recompute = ", recomputing" * self.recompute
        return (
            f"{self.system}, {self.optimizer.name}{recompute}: stage {self.stage} of "
            f"{len(self.sizes)} with {self.sizes[self.stage]} layers, batches of {self.batch}"
        )

    @property
    def job(self) -> Job:
        plan = Plan.contiguous(
            self.sizes, micro_batches=self.micro_batches, recompute=self.recompute
        )
        depth = sum(self.sizes) - 2  # Beside embedding and head.
        return Job(
            (Task("resident", self.system, plan),),
            ModelSpec("vit_huge_patch14_224", {"depth": depth, "num_classes": 100}),
            DataSpec("", ""),
            batch_size=self.batch,
            epochs=1,
            optimizer=self.optimizer,
        )

    @cached_property
    def program(self) -> Program:
        system, plan = get_system(self.system), self.job.tasks[0].plan
        return system.program(plan, (self.batch,) * self.batches)


MOMENTUM = OptimizerSpec("sgd", lr=1e-3, momentum=0.9)
ADAMW = OptimizerSpec("adamw", lr=1e-4)
CASES = (
    Case("ashpipe", MOMENTUM, (4, 4, 4), stage=0, batch=2, batches=6),
    Case("ashpipe", ADAMW, (2, 4, 2, 2), stage=1, batch=1, batches=6),
    Case("pipedream_2bw", MOMENTUM, (2, 4, 2), stage=1, batch=6, batches=3, micro_batches=3),
    Case("gpipe", MOMENTUM, (4, 4), stage=0, batch=8, batches=2, micro_batches=4),
    Case("dapple", ADAMW, (4, 4), 0, batch=8, batches=2, micro_batches=4, recompute=True),
)


class Blank:
    """A feed of blank images."""

    def __init__(self, case: Case):
        self.case = case

    def batch_sizes(self) -> tuple[int, ...]:
        return (self.case.batch,) * self.case.batches

    def indices(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.arange(step * self.case.batch, (step + 1) * self.case.batch)

    def images(self, indices: np.ndarray[Any, Any], step: int) -> Tensor:
        return torch.rand(len(indices), *IMAGE)

    def labels(self, indices: np.ndarray[Any, Any]) -> Tensor:
        return torch.zeros(len(indices), dtype=torch.int64)


class Alone:
    """The end of a rank without neighbours."""

    def open(self, program: Program) -> None: ...

    def ready(self, action: Action) -> bool:
        return True

    def send(self, action: Action, tensor: Tensor) -> None: ...

    def receive(self, action: Action, shape: Sequence[int]) -> Tensor:
        return torch.rand(tuple(shape))

    def reduce(self, action: Action, tensors: Sequence[Tensor]) -> None: ...

    def finish_reduce(self, action: Action) -> None: ...

    def norm(self, action: Action, squares: Tensor) -> None: ...

    def finish_norm(self, action: Action) -> Tensor:
        raise NotImplementedError

    def messages(self) -> Iterator[Tensor]:
        return iter(())

    def reductions(self) -> Iterator[Tensor]:
        return iter(())

    def close(self) -> None: ...


def warmed_up() -> None:
    """Load what torch loads when it first computes: libraries are no part of a stage."""
    x = torch.rand(2, 8, 32, requires_grad=True)
    torch.nn.TransformerEncoderLayer(32, 2)(x).sum().backward()
    torch.nn.Conv2d(3, 4, 2)(torch.rand(1, 3, 4, 4)).sum().backward()


def measure(case: Case) -> dict[str, Any]:
    """Peaks in bytes: "model" and "counted" by kind and in total, "resident" between actions."""
    torch.set_num_threads(1)
    job, process = case.job, psutil.Process()
    task, stack = job.tasks[0], build_stack(job.model)
    rank = task.plan.rank(case.stage, 0)
    footprint = Footprint(stack, IMAGE)
    model = memory_peaks(job, task, footprint, (case.batch,) * case.batches)[rank]
    warmed_up()
    before, most = process.memory_info().rss, 0

    def note(*_: object) -> None:
        nonlocal most
        most = max(most, process.memory_info().rss)

    peak = train(job, task, stack, case, rank, note)
    return {
        "model": {**model.kinds, "total": model.total},
        "counted": {**peak.kinds, "total": peak.total},
        "resident": most - before,
    }


def train(job: Job, task: Task, stack: LayerStack, case: Case, rank: int, note: Any) -> Peak:
    system = get_system(case.system)
    worker = Worker(job, task, stack, Blank(case), rank, Alone(), system)
    with MemoryObserver([worker], each=note) as observer:
        worker.start(case.program, 0)
        while worker.advance():
            pass
        worker.finish()
    return observer.peaks[rank]


def measure_apart(number: int, allocator: dict[str, str]) -> dict[str, Any]:
    """:func:`measure` in a fresh process."""
    command = [sys.executable, "-m", "tests.resident", str(number)]
    environment = {**os.environ, **allocator}
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return dict(json.loads(found.stdout))


def main() -> int:
    if len(sys.argv) > 1:
        print(json.dumps(measure(CASES[int(sys.argv[1])])))
        return 0
    off = 0
    for number, case in enumerate(CASES):
        print(case)
        for name, (settings, limit) in ALLOCATORS.items():
            found = measure_apart(number, settings)
            counted, model, resident = found["counted"], found["model"], found["resident"]
            if not settings:
                for kind in (*KINDS, "total"):
                    pair = (
                        f"{counted[kind] / 1e6:9.1f} MB counted{model[kind] / 1e6:9.1f} predicted"
                    )
                    print(f"  {kind:<12}{pair}")
            ratio = resident / model["total"]
            off += abs(ratio - 1) > limit
            print(
                f"  {'resident':<12}{resident / 1e6:9.1f} MB, {ratio:.3f} of the prediction, with "
                f"the allocator {name}",
                flush=True,
            )
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
