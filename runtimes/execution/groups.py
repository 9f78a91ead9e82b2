"""The process groups of a plan, created up front: by every rank, in the same order.

A pipeline has its own, and activations and gradients are apart: a backend that orders messages by
arrival then cannot hold one behind another that its receiver takes later.  So have reductions and
norms, since replicas may come to those of two pipelines in different orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist

from runtimes.plan import Plan

__all__ = ["Groups"]


def _group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A new group; on ranks outside it a placeholder that they never use."""
    return cast(dist.ProcessGroup, dist.new_group(list(ranks)))


class Groups:
    """``messages`` by pipeline and kind (as of a channel), ``replicas`` by pipeline and stage that
    has more than one, ``everyone`` by pipeline."""

    def __init__(self, plan: Plan):
        pipelines, everyone = range(plan.pipelines), range(plan.world_size)
        self.messages = {(p, kind): _group(everyone) for p in pipelines for kind in ("ACT", "GRAD")}
        self.replicas = {
            (p, number): _group(stage.ranks)
            for number, stage in enumerate(plan.stages)
            if stage.replicas > 1
            for p in pipelines
        }
        self.everyone = {p: _group(everyone) for p in pipelines}

    def leave(self) -> None:
        """Every rank leaves at the same place: then no message is under way in any group."""
        dist.barrier()
        for groups in (self.messages, self.replicas, self.everyone):
            for group in groups.values():
                dist.destroy_process_group(group)
