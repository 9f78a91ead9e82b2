"""Programs drawn over time."""

from __future__ import annotations

import pytest

from runtimes.plan import Plan
from runtimes.simulation.costs import UniformCosts
from runtimes.simulation.grid import column_seconds, draw, grid, run_free
from runtimes.systems import get_system


def rows(text: str) -> list[str]:
    return [line.split(" | ")[1].rstrip(". ") for line in text.splitlines()]


def test_columns_are_named_by_what_is_computed_in_their_middle() -> None:
    plan = Plan.even(2, 2, micro_batches=2)
    program = get_system("gpipe").program(plan, (2,))
    simulation = run_free(program, UniformCosts(plan, (0.003, 0.001), (0.002, 0.0042)))
    assert column_seconds(simulation) == pytest.approx(0.001)
    assert rows(draw(simulation, 0.001)) == [
        "F0 F0 F0 F1 F1 F1 .  .  .  .  .  B0 B0 .  .  B1 B1",
        ".  .  .  F0 .  .  F1 B0 B0 B0 B0 B1 B1 B1 B1",
    ]


@pytest.mark.parametrize(
    ("scale", "expected"), [(1.0, 1.0), (2.9, 2.0), (7.0, 5.0), (0.012, 0.01), (3e-6, 2e-6)]
)
def test_a_column_is_a_round_number_of_seconds(scale: float, expected: float) -> None:
    plan = Plan.even(2, 2, micro_batches=4)
    program = get_system("dapple").program(plan, (4,))
    simulation = run_free(program, UniformCosts(plan, scale, 2 * scale))
    assert column_seconds(simulation) == pytest.approx(expected)


def test_one_short_computation_makes_no_thousands_of_columns() -> None:
    plan = Plan.even(2, 2, micro_batches=4)
    program = get_system("dapple").program(plan, (4,))
    simulation = run_free(program, UniformCosts(plan, (1e-6, 1.0)))
    columns = simulation.makespan_seconds / column_seconds(simulation)
    assert 50 < columns < 200


def test_a_backward_in_parts_is_drawn_as_one() -> None:
    plan = Plan.even(6, 1, (2,), micro_batches=2, cuts=(1, 2, 4))
    program = get_system("dapple").program(plan, (4,))
    assert rows(grid(program)) == ["F0 B0 B0 F1 B1 B1"] * 2
