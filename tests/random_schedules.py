"""Compute orders drawn at random: legal inside a stage, free across stages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from runtimes.plan import Plan
from runtimes.schedule import Batches, Compute, Declared, Op, Order
from runtimes.system import System, UnflushedSystem

__all__ = ["RandomOrder", "fitting_plan", "random_plan"]


@dataclass(frozen=True)
class RandomOrder(System):
    """Every stage interleaves its forwards and backwards as its own dice say.

    ``skew`` 0 keeps the units in order at every stage; 1 shuffles them stage by stage.
    """

    seed: int = 0
    skew: float = 0.0

    name = "random"
    summary = "for tests"
    paper = "none"

    def compute_order(
        self, plan: Plan, batches: Batches, *, carried: int, norm: bool, phase: int
    ) -> Order:
        def stage_order(pipeline: int, stage: int, replica: int) -> Iterator[Compute]:
            dice = random.Random(f"{self.seed} {stage}")
            for update in range(len(batches.sizes)):
                forwards = list(batches.units_of_batch(pipeline, update))
                if dice.random() < self.skew:
                    dice.shuffle(forwards)
                backwards: list[int] = []
                while forwards or backwards:
                    if forwards and (not backwards or dice.random() < 0.5):
                        unit = forwards.pop(0)
                        backwards.append(unit)
                        yield Compute(Op.F, unit, update)
                    else:
                        pick = dice.randrange(len(backwards)) if dice.random() < self.skew else 0
                        yield Compute(Op.B, backwards.pop(pick), update)
                yield Compute(Op.REDUCE, update, update)
                yield Compute(Op.STEP, update, update + 1)

        return stage_order

    def declared(self, plan: Plan, *, carried: int = 0) -> Declared:
        return Declared(delay=lambda stage, update: 0, in_flight=lambda stage: plan.micro_batches)


def fitting_plan(system: System, plan: Plan) -> Plan:
    """As much of the plan as the system can run."""
    cuts = [cut for stage in plan.stages for cut in stage.cuts]
    stages, replicas = len(plan.stages), [stage.replicas for stage in plan.stages]
    micro_batches = plan.micro_batches
    if system.name == "dp":
        stages, replicas = 1, [plan.world_size]
    elif isinstance(system, UnflushedSystem):
        micro_batches = 1
    elif system.name == "pipedream_2bw":
        micro_batches, replicas = max(stages, micro_batches), [max(replicas)] * stages
    elif getattr(system, "averaging", None) == "asynchronous":
        replicas = [1] * stages
    recompute = plan.stages[0].recompute
    return Plan.even(
        plan.layers,
        stages,
        replicas,
        micro_batches=micro_batches,
        pipelines=plan.pipelines if system.parallel else 1,
        recompute=recompute,
        cuts=cuts,
    )


def random_plan(
    dice: random.Random,
    layers: int,
    most_stages: int = 4,
    most_ranks: int = 8,
    most_pipelines: int = 1,
) -> Plan:
    stages = dice.randint(1, min(most_stages, layers))
    replicas = [1] * stages
    while sum(replicas) < most_ranks and dice.random() < 0.5:
        replicas[dice.randrange(stages)] += 1
    cuts = [cut for cut in range(1, layers) if dice.random() < 0.4]
    return Plan.even(
        layers,
        stages,
        replicas,
        micro_batches=dice.randint(1, 6),
        pipelines=dice.randint(1, most_pipelines),
        recompute=dice.random() < 0.3,
        cuts=cuts,
    )
