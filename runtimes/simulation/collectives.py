"""Reductions and norms, which begin when all that take part have joined."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from runtimes.plan import Plan
from runtimes.schedule.action import Action, Op
from runtimes.simulation.cluster import Cluster
from runtimes.simulation.costs import Costs, checked
from runtimes.simulation.network import Network
from runtimes.simulation.state import Joint, Rank

__all__ = ["Collectives"]

#: A norm's sum of squares is one float32.
_NORM_BYTES = 4


class Collectives:
    def __init__(self, plan: Plan, cluster: Cluster, costs: Costs, network: Network[Any]):
        self._plan, self._cluster, self._costs, self._network = plan, cluster, costs, network
        self._everyone = range(plan.world_size)
        #: By (pipeline, stage, update, part), and by (pipeline, update): what not all have joined.
        self._reductions: dict[tuple[int, int, int, int | None], Joint] = defaultdict(Joint)
        self._norms: dict[tuple[int, int], Joint] = defaultdict(Joint)

    def join(self, rank: Rank, action: Action, now: float) -> Joint:
        """The rank issues a REDUCE or NORM; when the last one does, it is known when that ends."""
        if action.op is Op.REDUCE:
            return self._reduce(rank, action, now)
        return self._norm(rank, action, now)

    def _reduce(self, rank: Rank, action: Action, now: float) -> Joint:
        key = action.pipeline, action.stage, action.unit, action.part
        joint, ranks = self._reductions[key], self._plan.stages[action.stage].ranks
        joint.joined.append(rank)
        rank.reductions.setdefault((action.pipeline, action.unit), []).append(joint)
        if len(joint.joined) == len(ranks):
            del self._reductions[key]
            size, tensors = self._costs.reduced(action.stage, action.part)
            checked("a reduction", size, "bytes")
            # Buckets are sums of one call, what blocks is summed tensor by tensor.
            calls = tensors if action.part is None else min(tensors, 1)
            joint.ends = self._network.reduce(ranks, size, calls, now) if calls else now
        return joint

    def _norm(self, rank: Rank, action: Action, now: float) -> Joint:
        key = action.pipeline, action.unit
        joint = rank.norms[key] = self._norms[key]
        joint.joined.append(rank)
        if len(joint.joined) == len(self._everyone):
            del self._norms[key]
            joint.ends = now + self._cluster.all_reduce_seconds(self._everyone, _NORM_BYTES)
        return joint
