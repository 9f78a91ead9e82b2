"""PipeDream (Narayanan et al. 2019): asynchronous 1F1B with weight stashing, 1F1B-RR in stages.

            F0 F1 F2 B0 B0 F3 B1 B1 F4 …     whole batches flow without a flush; every backward runs
            .. F0 F1 B0 B0 F2 B1 B1 …        on the weights that its forward read, and is stepped.

Batches go round a stage's R_s replicas: replica j takes batch i · R_s + j in its local step i.  The
stage makes one update a round, from the mean of the round's gradients (a short last round averages
over what it has).  Round i runs on version max(0, i − w_s), with the warm-up
w_s = floor((R_total − 1 − Σ_{t<s} R_t) / R_s).  Its learning rate is that of its first batch.

``vertical_sync``  (off, as published) batch k runs on version max(0, k − (S − 1)) at *every* stage,
                   so its gradient is that of one model; S versions are alive everywhere.
``lr_scaling``     "published": the rate is multiplied by R_s / R_0, since a round is R_s batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtimes.plan import Plan
from runtimes.system import Drain, UnflushedSystem

__all__ = ["PipeDream"]


@dataclass(frozen=True)
class PipeDream(UnflushedSystem):
    vertical_sync: bool = False
    lr_scaling: Literal["none", "published"] = "none"
    drain: Drain = "epoch"

    name = "pipedream"
    summary = "asynchronous 1F1B on stashed weights, batches go round a stage's replicas"
    paper = "PipeDream, SOSP'19"
    rounds = True

    def warm_up(self, plan: Plan, stage: int) -> int:
        earlier = sum(before.replicas for before in plan.stages[:stage])
        return (plan.world_size - 1 - earlier) // plan.stages[stage].replicas

    def version(self, plan: Plan, stage: int, update: int) -> int:
        if self.vertical_sync:
            return max(0, update - (len(plan.stages) - 1))
        return super().version(plan, stage, update)

    def live_versions(self, plan: Plan, stage: int) -> int:
        return len(plan.stages) if self.vertical_sync else super().live_versions(plan, stage)

    def retained(self, plan: Plan, stage: int) -> int:
        return stage if self.vertical_sync else 0

    def rate_factor(self, plan: Plan, stage: int) -> float:
        if self.lr_scaling == "none":
            return 1.0
        return plan.stages[stage].replicas / plan.stages[0].replicas

    def check(self, plan: Plan) -> None:
        super().check(plan)
        counts = [stage.replicas for stage in plan.stages]
        if self.vertical_sync and max(counts) > 1:
            raise ValueError(
                f"vertical_sync numbers versions by batches, but with {counts} replicas stages "
                "update once a round: give every stage 1 replica, or leave it off"
            )
