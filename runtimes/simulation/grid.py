"""Programs drawn over time as text: what each rank computes in each column.

Parallel pipelines share their rank's row: F3a is the forward of unit 3 of the first pipeline, F3b
of the second.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping

from runtimes.schedule.action import COMPUTE, Action, Op
from runtimes.schedule.program import Program
from runtimes.schedule.rendering import place
from runtimes.simulation.cluster import Cluster
from runtimes.simulation.costs import Costs, UniformCosts
from runtimes.simulation.simulator import Simulation, Timed, simulate

__all__ = ["SLOTS", "column_seconds", "computations", "draw", "grid", "run_free"]

#: Columns that each computation takes in a grid: a backward is about twice a forward.
SLOTS: Mapping[Op, int] = {Op.F: 1, Op.R: 1, Op.B: 2}
#: A drawing to scale has up to 2.5 times as many.
_COLUMNS = 60


def run_free(program: Program, costs: Costs) -> Simulation:
    """On links that cost nothing."""
    return simulate(program, Cluster.ideal(program.plan.world_size), costs)


def grid(program: Program, slots: Mapping[Op, int] = SLOTS) -> str:
    """Rank × time: what each rank computes in each slot, a dot where it idles.  Messages,
    reductions and steps are free."""
    costs = UniformCosts(
        program.plan,
        forward_seconds=slots[Op.F],
        backward_seconds=slots[Op.B],
        recompute_seconds=slots[Op.R],
    )
    return draw(run_free(program, costs), 1.0)


def computations(simulation: Simulation) -> list[list[Timed]]:
    """For each rank its F, B and R."""
    return [
        [timed for timed in of_rank if timed.action.op in COMPUTE] for of_rank in simulation.timed
    ]


def _name(action: Action, pipelines: int) -> str:
    name = f"{action.op.value}{action.unit}"
    if pipelines == 1:
        return name
    letters = string.ascii_lowercase
    few = pipelines <= len(letters)
    return name + (letters[action.pipeline] if few else f".{action.pipeline}")


def draw(simulation: Simulation, seconds: float) -> str:
    """Columns of so many seconds, named by what is computed in their middle."""
    program, rows = simulation.program, computations(simulation)
    names = [
        {
            column: _name(timed.action, program.batches.pipelines)
            for timed in row
            for column in range(
                math.ceil((timed.start + timed.waited) / seconds - 0.5),
                math.ceil(timed.end / seconds - 0.5),
            )
        }
        for row in rows
    ]
    end = max((max(row) + 1 for row in names if row), default=0)
    width = max((len(name) for row in names for name in row.values()), default=1)
    lines = []
    for rank, row in enumerate(names):
        drawn = " ".join(row.get(column, ".").ljust(width) for column in range(end))
        lines.append(f"{place(program, rank)} | {drawn.rstrip()}")
    return "\n".join(lines)


def column_seconds(simulation: Simulation) -> float:
    """1, 2 or 5 times a power of ten, no more than the shortest computation takes, unless that
    makes too many columns."""
    lengths = [
        timed.end - timed.start - timed.waited for row in computations(simulation) for timed in row
    ]
    shortest = min((length for length in lengths if length > 0), default=1.0)
    wanted = max(shortest, simulation.makespan_seconds / _COLUMNS)
    power = 10.0 ** math.floor(math.log10(wanted))
    return max(power * step for step in (1, 2, 5) if power * step <= wanted * (1 + 1e-9))
