"""PipeDream-2BW (Narayanan et al. 2021): 1F1B without a flush on two buffers of weights.

            F0 F1 .. B0 B0 F2 B1 B1 F3 …     micro-batches flow from batch to batch; all stages use
            .. F0 B0 B0 F1 B1 B1 F2 …        the same version, one batch old.

W(t+1) = W(t) − η ∇f(W(max(0, t − 1))): all units of batch t run on W(max(0, t − 1)) at every stage
(batches 0 and 1 both on W(0)), also across a drain, so a checkpoint holds both versions.  A batch
needs at least as many micro-batches as there are stages, or its version would come too late.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtimes.plan import Plan
from runtimes.schedule import Batches, Declared, Order, double_buffered
from runtimes.system import System

__all__ = ["PipeDream2BW"]


@dataclass(frozen=True)
class PipeDream2BW(System):
    name = "pipedream_2bw"
    summary = "1F1B without a flush, all stages on the weights of one batch before"
    paper = "PipeDream-2BW, ICML'21"
    carries = 1

    def compute_order(
        self, plan: Plan, batches: Batches, *, carried: int, norm: bool, phase: int
    ) -> Order:
        return double_buffered(batches, len(plan.stages), carried=carried, norm=norm)

    def declared(self, plan: Plan, *, carried: int = 0) -> Declared:
        stages = len(plan.stages)
        return Declared(
            delay=lambda stage, update: min(1, update + carried),
            in_flight=lambda stage: stages - stage,
        )

    def live_versions(self, plan: Plan, stage: int) -> int:
        return 2

    def retained(self, plan: Plan, stage: int) -> int:
        return 1

    def check(self, plan: Plan) -> None:
        super().check(plan)
        stages = len(plan.stages)
        if plan.micro_batches < stages:
            raise ValueError(
                f"pipedream_2bw needs at least as many micro-batches as stages, but "
                f"plan.micro_batches is {plan.micro_batches} with {stages} stages: "
                f"use {stages} or more"
            )
        replicas = sorted({stage.replicas for stage in plan.stages})
        if len(replicas) > 1:
            raise ValueError(
                f"pipedream_2bw has equally many replicas at every stage, not {replicas}: "
                "choose one number, or ashpipe"
            )
