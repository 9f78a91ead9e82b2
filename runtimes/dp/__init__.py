"""Data parallelism: one stage, every rank a replica with its share of the batch.

Replicas add up their gradients (each already divided by the samples of the *global* batch, so
shares of 85, 85 and 86 weigh right).  ``overlap``: the backward is cut into the plan's parts, and
one part's bucket is reduced while the next part is computed, as in PyTorch's DDP.  Without it,
one blocking all-reduce a parameter follows the backward: the baseline of the published AshPipe.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtimes.plan import Plan
from runtimes.system import FlushSystem

__all__ = ["DataParallel"]


@dataclass(frozen=True)
class DataParallel(FlushSystem):
    overlap: bool = True

    name = "dp"
    summary = "replicas of the whole model, gradients summed by all-reduce"
    paper = "the baseline of both papers"

    def warm_up(self, stage: int, stages: int, units: int) -> int:
        return 1

    @property
    def blocking_reduce(self) -> bool:
        return not self.overlap

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if len(plan.stages) != 1:
            raise ValueError(
                f"dp has one stage, not {len(plan.stages)}: give it one stage with "
                f"{plan.world_size} replicas, or choose a pipeline system"
            )
