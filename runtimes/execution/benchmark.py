"""A benchmark: several systems in one process group, measured alternately.

Round i measures every system once, in an order of its own (:mod:`runtimes.execution.turns`), so
that a drift of the machine's speed, and what a system leaves to the next one, fall on all alike;
ratios are formed within a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

from runtimes.execution.bound import Slice, bound_seconds
from runtimes.execution.collection import MOST_ACTIONS, collect
from runtimes.execution.engine import Engine, Segment, SegmentReport
from runtimes.execution.events import EventLog
from runtimes.execution.rehearsal import Rehearsal
from runtimes.execution.team import gather
from runtimes.execution.training import rank_entries
from runtimes.execution.turns import turns
from runtimes.job import Job, Task
from runtimes.planning.reference import reference_seconds
from runtimes.tracing import TRACE_FILE, write_trace

__all__ = ["run_benchmark"]


def run_benchmark(
    engines: Sequence[Engine],
    job: Job,
    run_dir: Path,
    rehearsals: Sequence[Rehearsal],
    note: Callable[[str], None],
) -> None:
    """``engines[i]`` runs ``job.tasks[i]``; rehearsal i measures that task's computation alone."""
    spec = job.bench
    assert spec is not None
    log = EventLog(run_dir)
    done = [0] * len(engines)

    def train(index: int, steps: int) -> tuple[float, list[SegmentReport]]:
        batches = job.batches(job.tasks[index], steps)
        dist.barrier()
        report = engines[index].train(Segment(done[index], batches))
        done[index] += len(batches)
        reports: list[SegmentReport] = gather(report)
        return max(report.wall_s for report in reports), reports

    for index in range(len(engines)):
        note(f"warm-up of {job.tasks[index].label}")
        train(index, spec.warmup_steps)
        if spec.bound:
            rehearsals[index].measure(-1)
    for number in range(spec.rounds):
        for position, index in enumerate(turns(len(engines), job.seed, number)):
            task = job.tasks[index]
            before = _reference(job)
            wall, reports = train(index, spec.steps)
            after = _reference(job)
            batches = job.batches(task, spec.steps)
            bound = _bound(task, rehearsals[index], number, batches) if spec.bound else None
            event = {
                "event": "round",
                "task": task.label,
                "round": number,
                "position": position,
                "steps": len(batches),
                "samples": sum(batches),
                "wall_s": wall,
                "compute_bound_s": bound,
                "reference_s": None if before is None or after is None else (before + after) / 2,
                "ranks": rank_entries(task.plan, reports),
            }
            if dist.get_rank() == 0:
                log.write([event])
    note("trace")
    _trace(engines, job, done, run_dir)


def _reference(job: Job) -> float | None:
    """How long fixed work takes at this moment, over all ranks; on an emulated device nothing is
    computed."""
    if job.emulation is not None and job.emulation.profile is not None:
        return None
    dist.barrier()
    passes = gather(reference_seconds(torch.device(job.device)))
    return fmean(seconds for share in passes for seconds in share)


def _trace(engines: Sequence[Engine], job: Job, done: Sequence[int], run_dir: Path) -> None:
    """Of each contender's last round, which its engine still knows: nothing is timed any more.
    ``done[i]``: batches that contender i has trained."""
    spec = job.bench
    assert spec is not None
    found = [
        collect(
            engine,
            task.label,
            first=trained - len(job.batches(task, spec.steps)),
            words=f"round {spec.rounds - 1}",
            most_actions=MOST_ACTIONS // len(engines),
        )
        for engine, task, trained in zip(engines, job.tasks, done, strict=True)
    ]
    timelines = [timeline for timeline in found if timeline is not None]
    if timelines:
        write_trace(run_dir / TRACE_FILE, timelines)


def _bound(task: Task, rehearsal: Rehearsal, number: int, sizes: tuple[int, ...]) -> float:
    """The schedule's own bound of these batches, from slices measured in this round."""
    everyone: list[Slice] = gather(rehearsal.measure(number))
    return bound_seconds(task, everyone, sizes)
