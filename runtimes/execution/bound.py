"""What a schedule would take if nothing but computation and the optimizer's steps took time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtimes.job import Task
from runtimes.simulation.cluster import Cluster
from runtimes.simulation.costs import UniformCosts
from runtimes.simulation.simulator import simulate
from runtimes.systems import schedule_of

__all__ = ["Slice", "bound_seconds"]


@dataclass(frozen=True)
class Slice:
    """Mean seconds of a unit's forward, of its recomputation and its backward, and of an optimizer
    step, on one rank."""

    forward_s: float
    again_s: float
    backward_s: float
    step_s: float


def bound_seconds(task: Task, slices: Sequence[Slice], sizes: tuple[int, ...]) -> float:
    """Of a segment of batches of these sizes: the task's own program, simulated on links that cost
    nothing.  ``slices`` by rank; a stage is as slow as its slowest replica.

    With equal stages that is (M + S − 1) · t + step a batch for a flush schedule, and
    (n + S − 1) · t + n · step for n batches without one; a faster stage shortens only filling and
    draining.
    """
    plan = task.plan
    by_stage = [[slices[rank] for rank in stage.ranks] for stage in plan.stages]
    costs = UniformCosts(
        plan,
        forward_seconds=[max(each.forward_s for each in stage) for stage in by_stage],
        recompute_seconds=[max(each.again_s for each in stage) for stage in by_stage],
        backward_seconds=[max(each.backward_s for each in stage) for stage in by_stage],
        optimizer_seconds=[max(each.step_s for each in stage) for stage in by_stage],
    )
    program = schedule_of(task.system, task.options).program(plan, sizes)
    return simulate(program, Cluster.ideal(plan.world_size), costs, keep=False).makespan_seconds
