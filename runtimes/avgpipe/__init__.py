"""AvgPipe (Chen et al. 2023): parallel pipelines tied by elastic averaging, forwards in advance.

            p0  F0 F1 B0 B0 F2 …             N pipelines share the devices: stage s holds its layers
            p1  F0 .. F1 B0 B0 …             of N copies and of a reference; one computes while the
                                             other waits.

A batch is shared by the pipelines, each of which runs a synchronous schedule of its own on its
share, with K_s = min(S − s + a, M) forwards before the first backward: ``advance`` a = 0 is 1F1B,
a ≥ M GPipe's order.  After every ``every``-th update of the run, copy x_i and reference c are
drawn to each other by α, stage by stage, without any network traffic (elastic averaging, Zhang et
al. 2015; that it follows the local step, and the forms, are our reading of the paper):

    centre-first   c ← c + α Σ_i (x_i − c), then x_i ← x_i − α (x_i − c) with the new c
    symmetric      the same with the old c on both sides

``alpha``      None: 1/N, where the reference is the mean of the copies (centre-first).
``averaging``  "synchronous": when all copies of the stage have made their step.  "asynchronous":
               each copy alone when it has, c ← c + α (x_i − c) and x_i ← x_i − α (x_i − c), in the
               order in which the pipelines get there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from runtimes.avgpipe.stability import complaints
from runtimes.options import Limits
from runtimes.plan import Plan
from runtimes.schedule import warm_up
from runtimes.system import Elastic, FlushSystem

__all__ = ["AvgPipe"]


@dataclass(frozen=True)
class AvgPipe(FlushSystem):
    advance: Annotated[int, Limits(at_least=0)] = 0
    form: Literal["centre-first", "symmetric"] = "centre-first"
    averaging: Literal["synchronous", "asynchronous"] = "synchronous"
    alpha: Annotated[float | None, Limits(above=0)] = None
    every: Annotated[int, Limits(at_least=1)] = 1

    name = "avgpipe"
    summary = "parallel pipelines tied by elastic averaging, forwards in advance"
    paper = "AvgPipe, PPoPP'23"
    parallel = True

    def warm_up(self, stage: int, stages: int, units: int) -> int:
        return warm_up(stage, stages, units, advance=self.advance)

    @property
    def period(self) -> int:
        return self.every

    def strength(self, plan: Plan) -> float:
        """α."""
        return 1 / plan.pipelines if self.alpha is None else self.alpha

    def elastic(self, plan: Plan) -> Elastic | None:
        """None where the reference would always be the only copy."""
        alpha, centre_first = self.strength(plan), self.form == "centre-first"
        if plan.pipelines == 1 and alpha == 1 and centre_first and self.every == 1:
            return None
        return Elastic(alpha, centre_first, joint=self.averaging == "synchronous")

    def warnings(self, plan: Plan) -> tuple[str, ...]:
        elastic = self.elastic(plan)
        return () if elastic is None else complaints(elastic, plan.pipelines)
