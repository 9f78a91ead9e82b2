"""A pipeline that is full: what one batch more takes, and where that time goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtimes.schedule.program import Program
from runtimes.simulation.cluster import Cluster
from runtimes.simulation.costs import Costs
from runtimes.simulation.simulator import Simulation, simulate

__all__ = ["Steady", "steady"]


@dataclass(frozen=True)
class Steady:
    """``batch_seconds``: of one batch more when the pipeline is full; ``shares``: of that, by part,
    mean over ranks."""

    batch_seconds: float
    shares: dict[str, float]


def steady(make: Callable[[int], Program], cluster: Cluster, costs: Costs, batches: int) -> Steady:
    """``make(n)`` is the program of n batches, and ``batches`` of them fill the pipeline.

    ValueError if nothing takes any time.
    """
    short, long = (simulate(make(n), cluster, costs, keep=False) for n in (batches, 2 * batches))
    wall = long.makespan_seconds - short.makespan_seconds
    if wall <= 0:
        raise ValueError("a batch takes no time at all: profile layers that take some")
    ranks = len(long.parts)
    shares = {
        name: (_total(long, name) - _total(short, name)) / ranks / wall for name in long.parts[0]
    }
    return Steady(wall / batches, shares)


def _total(simulation: Simulation, part: str) -> float:
    return sum(parts[part] for parts in simulation.parts)
