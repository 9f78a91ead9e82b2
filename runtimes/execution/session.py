"""What a process of a run does from its process group to its exit code: one rank, or all."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from runtimes.emulation.device import Device, sharp_timers
from runtimes.emulation.layers import EmulatedStack
from runtimes.execution.benchmark import run_benchmark
from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.endpoint import ActionTimeoutError
from runtimes.execution.engine import Engine
from runtimes.execution.feed import ArrayFeed
from runtimes.execution.inprocess import InProcess
from runtimes.execution.precision import dtype_of, set_multiplication
from runtimes.execution.rehearsal import rehearsals
from runtimes.execution.status import (
    EXIT_DIVERGED,
    EXIT_OUT_OF_MEMORY,
    EXIT_TIMEOUT,
    StatusFile,
)
from runtimes.execution.team import DistributedTeam, InProcessTeam, Team
from runtimes.execution.training import DivergedError, run_training
from runtimes.job import Augmentation, Job, Precision, Task
from runtimes.manifest import write_json
from runtimes.model.stack import LayerStack, build_stack
from runtimes.peers.ddp import DdpEngine
from runtimes.peers.pipelining import PipeliningEngine
from runtimes.planning.profile import Profile
from runtimes.systems import SYSTEMS

__all__ = ["guarded", "join_ranks", "prepare_process", "run_rank"]


def run_rank(run_dir: Path) -> int:
    """Run the job of this directory as the rank of the environment; the exit code says how."""

    def work(rank: int, status: StatusFile) -> None:
        _run(Job.load(run_dir / "job.json"), run_dir, rank, status)

    return guarded(run_dir, work)


def guarded(run_dir: Path, work: Callable[[int, StatusFile], None]) -> int:
    """Do ``work`` as the rank of the environment, leaving in the directory what it did last and
    why it failed, if it does; the exit code."""
    rank = int(os.environ["RANK"])
    status = StatusFile(run_dir / "ranks" / f"{rank}.status")
    status.note("start")
    try:
        work(rank, status)
    except BaseException as error:
        traceback.print_exc()
        document = {
            "rank": rank,
            "error": f"{type(error).__name__}: {error}",
            "action": status.text,
        }
        write_json(run_dir / f"error-{rank}.json", document)
        # No tidy shutdown: destroying a group with messages under way may wait for ever.
        sys.stderr.flush()
        os._exit(_exit_code(error))
    return 0


def _exit_code(error: BaseException) -> int:
    if isinstance(error, ActionTimeoutError):
        return EXIT_TIMEOUT
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return EXIT_OUT_OF_MEMORY
    return EXIT_DIVERGED if isinstance(error, DivergedError) else 1


def prepare_process(precision: Precision, device: torch.device, *, pin_cores: bool) -> None:
    """One thread, on one core if ``pin_cores``, products of this precision, a device of its own."""
    torch.set_num_threads(1)
    if pin_cores:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    set_multiplication(precision)
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))


def join_ranks(device: torch.device, timeout_s: float) -> None:
    """Meet the other ranks, over the backend of the device."""
    dist.init_process_group(
        dist.get_default_backend_for_device(device.type), timeout=timedelta(seconds=timeout_s)
    )


def _run(job: Job, run_dir: Path, rank: int, status: StatusFile) -> None:
    device = torch.device(job.device)
    prepare_process(job.precision, device, pin_cores=job.pin_cores)
    if job.transport == "in-process":
        _train(job, run_dir, build_stack(job.model), rank, status)
        status.note("end")
        return
    join_ranks(device, job.action_timeout_s)
    stack = _stack(job)
    if job.bench is None:
        _train(job, run_dir, stack, rank, status)
    else:
        feeds = [_training_feed(job, task.batch_size) for task in job.tasks]
        status.note("building the engines")
        engines = [
            _engine(job, task, stack, feed, rank, status)
            for task, feed in zip(job.tasks, feeds, strict=True)
        ]
        slices = rehearsals(job, stack, feeds, rank)
        run_benchmark(engines, job, run_dir, slices, status.note)
    status.note("end")
    dist.barrier()
    dist.destroy_process_group()


def _stack(job: Job) -> LayerStack:
    if job.emulation is not None:
        sharp_timers()
    if job.emulation is None or job.emulation.profile is None:
        return build_stack(job.model)
    return EmulatedStack(
        Profile.from_json(job.emulation.profile),
        job.optimizer,
        truncation=job.emulation.truncation,
        device=Device(linked=job.emulation.cluster is not None),
    )


def _train(job: Job, run_dir: Path, stack: LayerStack, rank: int, status: StatusFile) -> None:
    feed = _training_feed(job)
    validation = _feed(
        job, job.data.validation, job.evaluation_batch_size, Augmentation(), shuffle=False
    )

    def build(task: Task) -> Team:
        status.note(f"building the engine of {task.system}")
        if job.transport == "in-process":
            return InProcessTeam(InProcess(job, task, stack, feed, before=status.note))
        engine = _engine(job, task, stack, feed, rank, status)
        return DistributedTeam(engine, task.plan, stack, rank, job.device)

    run_training(build, job, run_dir, feed, validation, status.note)


def _training_feed(job: Job, batch_size: int | None = None) -> ArrayFeed:
    size = batch_size or job.batch_size
    return _feed(job, job.data.train, size, job.data.augmentation, shuffle=True)


def _feed(
    job: Job, directory: str, batch_size: int, augmentation: Augmentation, *, shuffle: bool
) -> ArrayFeed:
    return ArrayFeed(
        Path(directory),
        batch_size=batch_size,
        seed=job.seed,
        epochs=job.epochs,
        augmentation=augmentation,
        shuffle=shuffle,
        device=torch.device(job.device),
        dtype=dtype_of(job.precision),
    )


def _engine(
    job: Job, task: Task, stack: LayerStack, feed: ArrayFeed, rank: int, status: StatusFile
) -> Engine:
    if task.system in SYSTEMS:
        return DistributedEngine(job, task, stack, feed, rank, before=status.note)
    if task.system == "torch-ddp":
        return DdpEngine(job, task, stack, feed, rank)
    return PipeliningEngine(job, task, stack, feed, rank)
