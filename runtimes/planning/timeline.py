"""What each rank of a simulated program holds over time, by kind, as of the memory model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from runtimes.execution.accounting import Peak
from runtimes.job import Job, Task
from runtimes.planning.census import Holding, holdings
from runtimes.planning.footprint import Footprint
from runtimes.planning.memory import bytes_held, sets_of
from runtimes.schedule.action import Action
from runtimes.simulation.simulator import Simulation
from runtimes.systems import schedule_of

__all__ = ["Moment", "memory_timeline", "timeline_peak"]


class Moment(NamedTuple):
    """From ``seconds`` on, when ``action`` has ended, until the next moment."""

    seconds: float
    held_bytes: dict[str, int]
    action: Action


def memory_timeline(
    job: Job, task: Task, footprint: Footprint, simulation: Simulation
) -> list[list[Moment]]:
    """By rank, of a simulation of the task's program that kept its actions; over torch.distributed,
    where what a rank holds depends on its own actions only."""
    plan, system = task.plan, schedule_of(task.system, task.options)
    if not simulation.timed:
        raise ValueError("the simulation kept no actions: simulate with keep=True")
    declared = system.declared(plan, carried=simulation.program.carried)
    timelines = []
    for rank, timed in enumerate(simulation.timed):
        stage, _ = plan.place(rank)
        bytes_of = partial(
            bytes_held, job, plan.stages[stage], sets_of(system, plan, stage), footprint
        )
        held: dict[Holding, dict[str, int]] = {}
        before = declared.in_flight(stage - 1) if stage else 0
        walked = holdings(simulation.program, rank, before, (item.action for item in timed))
        timeline = []
        for item, holding in zip(timed, walked, strict=True):
            if holding not in held:
                held[holding] = bytes_of(holding)
            timeline.append(Moment(item.end, held[holding], item.action))
        timelines.append(timeline)
    return timelines


def timeline_peak(timeline: Sequence[Moment]) -> Peak:
    """The most that a rank holds, which is what :func:`runtimes.planning.memory.memory_peaks`
    predicts for the same batches, or, with parallel pipelines, bounds."""
    peak = Peak()
    for moment in timeline:
        peak.see(moment.held_bytes, moment.action)
    return peak
