"""Compute orders and grids of the flush systems, laid out as in the papers."""

import random

import pytest

from runtimes.plan import Plan
from runtimes.schedule import Batches, grid, validate, warm_up
from runtimes.schedule.action import COMPUTE, Op
from runtimes.schedule.rendering import time_slots
from runtimes.system import evaluation_program
from runtimes.systems import SYSTEMS, get_system
from tests.random_schedules import random_plan


def drawn(system: str, stages: int, units: int, **options: object) -> str:
    plan = Plan.even(stages, stages, micro_batches=units)
    program = get_system(system, options).program(plan, (units,))
    rows = grid(program).splitlines()
    return "\n".join(row.split(" | ")[1].rstrip(". ") for row in rows)


def test_dapple_with_four_stages_and_eight_units_is_the_grid_of_the_papers() -> None:
    assert drawn("dapple", 4, 8) == "\n".join(
        [
            "F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 F4 B1 B1 F5 B2 B2 F6 B3 B3 F7 B4 B4 .  B5 B5 .  B6 B6 .  B7 B7",
            ".  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 F6 B4 B4 F7 B5 B5 .  B6 B6 .  B7 B7",
            ".  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4 F6 B5 B5 F7 B6 B6 .  B7 B7",
            ".  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5 F6 B6 B6 F7 B7 B7",
        ]
    )  # fmt: skip


def test_gpipe_turns_round_once() -> None:
    assert drawn("gpipe", 3, 4) == "\n".join(
        [
            "F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3",
            ".  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3",
            ".  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3",
        ]
    )  # fmt: skip


def test_dapples_policy_b_runs_more_forwards_ahead() -> None:
    assert drawn("dapple", 3, 4, policy="B") == "\n".join(
        [
            "F0 F1 F2 F3 .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3",
            ".  F0 F1 F2 .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3",
            ".  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3",
        ]
    )  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("units", [1, 2, 5, 8, 32])
@pytest.mark.parametrize("name", ["gpipe", "dapple"])
def test_the_bubble_is_the_papers_closed_form(name: str, stages: int, units: int) -> None:
    """(S − 1) / (M + S − 1) at equal stages and free communication."""
    plan = Plan.even(stages, stages, micro_batches=units)
    program = get_system(name).program(plan, (units,))
    rows = time_slots(program)
    end = max(last for row in rows for _, _, last in row)
    busy = sum(last - first for row in rows for _, first, last in row)
    assert 1 - busy / (end * stages) == pytest.approx((stages - 1) / (units + stages - 1))


def test_warm_up_counts() -> None:
    assert [warm_up(s, 4, 8) for s in range(4)] == [4, 3, 2, 1]
    assert [warm_up(s, 4, 2) for s in range(4)] == [2, 2, 2, 1]
    assert [warm_up(s, 4, 8, advance=2) for s in range(4)] == [6, 5, 4, 3]
    assert [warm_up(s, 4, 8, advance=8) for s in range(4)] == [8, 8, 8, 8]


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_every_system_passes_the_validator_on_odd_shapes(name: str) -> None:
    dice = random.Random(name)
    for _ in range(60):
        plan = random_plan(dice, layers=6)
        system = SYSTEMS[name]()
        if name == "dp":
            ranks = dice.randint(1, 5)
            plan = Plan.even(6, 1, (ranks,), micro_batches=dice.randint(1, 3), cuts=(2, 4))
        sizes = tuple(dice.choice((1, 2, 7, 18, 32)) for _ in range(3))
        program = system.program(plan, sizes)
        validate(program, system.declared(plan))
        assert program.with_text(program.text()).text() == program.text()


def test_units_in_flight_reach_exactly_the_declared_bound() -> None:
    for name in ("gpipe", "dapple"):
        plan = Plan.even(4, 4, micro_batches=8)
        system = get_system(name)
        program = system.program(plan, (8, 8))
        for stage, stream in enumerate(program.streams):
            depth = peak = 0
            for action in stream:
                if action.op in COMPUTE:
                    depth += 1 if action.op == Op.F else -1
                    peak = max(peak, depth)
            assert peak == system.declared(plan).in_flight(stage)


def test_evaluation_programs_cover_all_samples() -> None:
    plan = Plan.even(6, 3, (2, 1, 3))
    program = evaluation_program(plan, 23, 8)
    assert program.batches == Batches((8, 8, 7))
    validate(program)


def test_a_long_program_costs_only_what_walks_it() -> None:
    plan = Plan.even(4, 4, micro_batches=8)
    program = get_system("dapple").program(plan, (64,) * 1_000_000)
    stream = iter(program.streams[1])
    assert [str(next(stream)) for _ in range(2)] == [
        "p0.s1.r0.RECV_ACT0<r0[0:8]@0",
        "p0.s1.r0.F0@0",
    ]


def test_a_step_waits_for_the_slowest_replica() -> None:
    """Replica 1 holds the one sample of the first unit as well, so it is busy for longer."""
    plan = Plan.even(2, 1, (2,), micro_batches=2, cuts=(1,))
    program = get_system("dp").program(plan, (3, 3))
    rows = grid(program).splitlines()
    assert rows[0].split(" | ")[1].split()[:7] == ["F1", "B1", "B1", ".", ".", ".", "F3"]
    assert rows[1].split(" | ")[1].split()[:7] == ["F0", "B0", "B0", "F1", "B1", "B1", "F2"]
