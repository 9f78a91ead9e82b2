"""AshPipe (Hosoki et al. 2024): asynchronous 1F1B with data parallelism inside each stage.

            F0 F1 F2 B0 B0 F3 B1 B1 F4 …     whole batches flow without a flush; stage s runs
            .. F0 F1 B0' …                   W_s = S − 1 − s forwards ahead of its backwards.

Every stage has any number of replicas; they share each batch, so its size is the same everywhere,
and add up their gradients.  With k batches since the last drain, batch k runs at stage s, forward
and backward, on version v_s(k) = max(0, k − W_s), of which W_s + 1 are alive, and its gradient is
applied to the latest: w^s_{k+1} = Opt(w^s_k, ∂f_k/∂w^s at (w^0_{v_0(k)}, …, w^{S−1}_{v_{S−1}(k)})).

``order``  "published": an activation's send blocks, replicas reduce one parameter after the
           other, and only after its step does a stage send the gradient on and take the next
           activation in.  "ours": nothing waits that need not, with the same results.
``drain``  "epoch" as published (whose stash, however, is not reset there), or "run": only for
           evaluation, checkpoint and switch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtimes.plan import Plan
from runtimes.system import Drain, UnflushedSystem

__all__ = ["AshPipe"]


@dataclass(frozen=True)
class AshPipe(UnflushedSystem):
    order: Literal["ours", "published"] = "ours"
    drain: Drain = "epoch"

    name = "ashpipe"
    summary = "asynchronous 1F1B on stashed weights, any number of replicas at each stage"
    paper = "AshPipe, HPC Asia'24"

    def warm_up(self, plan: Plan, stage: int) -> int:
        return len(plan.stages) - 1 - stage

    @property
    def blocking_reduce(self) -> bool:
        return self.order == "published"

    @property
    def rendezvous(self) -> bool:
        return self.order == "published"
