"""Runs of which the memory is counted, in one process or several, and the model's word on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runtimes.execution.accounting import KINDS, MemoryObserver, Peak
from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.job import Job, Transport
from runtimes.planning.footprint import Footprint
from runtimes.planning.memory import memory_peaks
from tests.runtimes.transparency import ArrayFeed, Case, job_of, stack_of

__all__ = ["IMAGE", "LIMIT", "counted", "counted_on_ranks", "predicted", "unlike"]

LIMIT = 0.02
IMAGE = (1, 8, 8)


def _job(case: Case, transport: Transport) -> Job:
    return replace(job_of(case), transport=transport)


def _feed(case: Case) -> ArrayFeed:
    return ArrayFeed("float64" if case.precision == "float64" else "float32", case.epoch)


def counted(case: Case) -> list[Peak]:
    """By rank, all in this process."""
    job = _job(case, "in-process")
    engine = InProcess(job, job.tasks[0], stack_of(case.model), _feed(case))
    with MemoryObserver(engine.workers) as observer:
        _train(engine, case)
    return [observer.peaks[worker.rank] for worker in engine.workers]


def counted_on_ranks(rank: int, world_size: int, cases: Sequence[Case]) -> list[Peak]:
    """By case, of this rank's process."""
    peaks = []
    for case in cases:
        job = _job(case, "distributed")
        engine = DistributedEngine(job, job.tasks[0], stack_of(case.model), _feed(case), rank)
        with MemoryObserver([engine.worker]) as observer:
            _train(engine, case)
        engine.close()
        peaks.append(observer.peaks[rank])
    return peaks


def _train(engine: InProcess | DistributedEngine, case: Case) -> None:
    first = 0
    for segment in case.segments:
        engine.train(Segment(first, segment))
        first += len(segment)


def predicted(case: Case, transport: Transport) -> list[Peak]:
    job = _job(case, transport)
    footprint = Footprint(
        stack_of(case.model),
        IMAGE,
        precision=job.precision,
        label_smoothing=job.label_smoothing,
    )
    return memory_peaks(job, job.tasks[0], footprint, max(case.segments, key=len))


def unlike(found: Sequence[Peak], model: Sequence[Peak]) -> list[str]:
    """The peaks, by kind and in total, that are more than ``LIMIT`` off the model."""
    wrong = []
    for rank, (ours, theirs) in enumerate(zip(found, model, strict=True)):
        rows = [(kind, ours.kinds[kind], theirs.kinds[kind]) for kind in KINDS]
        for kind, count, expected in [*rows, ("total", ours.total, theirs.total)]:
            if abs(count - expected) > LIMIT * expected:
                wrong.append(f"rank {rank}: {count} bytes of {kind}, predicted {expected}")
    return wrong
