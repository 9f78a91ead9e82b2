"""Compute orders and grids of the systems, laid out as in the papers."""

import random
import re
from itertools import product

import pytest

from runtimes.pipedream import PipeDream
from runtimes.plan import Plan
from runtimes.schedule import Batches, Program, validate, warm_up
from runtimes.schedule.action import COMPUTE, Op
from runtimes.simulation.grid import grid
from runtimes.system import System, evaluation_program
from runtimes.systems import SYSTEMS, get_system, system_options
from tests.random_schedules import fitting_plan, random_plan


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


def test_warm_up_counts() -> None:
    assert [warm_up(s, 4, 8) for s in range(4)] == [4, 3, 2, 1]
    assert [warm_up(s, 4, 2) for s in range(4)] == [2, 2, 2, 1]
    assert [warm_up(s, 4, 8, advance=2) for s in range(4)] == [6, 5, 4, 3]
    assert [warm_up(s, 4, 8, advance=8) for s in range(4)] == [8, 8, 8, 8]


def choices(name: str) -> list[System]:
    """A system under every combination of its choices, and some numbers."""
    options = system_options(name)
    numbers = {"advance": (0, 1, 9), "every": (1, 3), "alpha": (None,)}
    combinations = product(*(o.choices or numbers[o.name] for o in options.values()))
    return [get_system(name, dict(zip(options, values, strict=True))) for values in combinations]


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_every_system_passes_the_validator_on_odd_shapes(name: str) -> None:
    dice = random.Random(name)
    systems = choices(name)
    for number in range(80):
        system = systems[number % len(systems)]
        plan = fitting_plan(system, random_plan(dice, layers=6, most_pipelines=3))
        if isinstance(system, PipeDream) and system.vertical_sync:
            plan = Plan.even(6, len(plan.stages))
        sizes = tuple(dice.choice((1, 2, 7, 18, 32)) for _ in range(dice.randint(1, 9)))
        carried, norm = dice.randint(0, system.carries), system.global_norm and dice.random() < 0.5
        phase = dice.randrange(system.period)
        program = system.program(plan, sizes, carried=carried, norm=norm, phase=phase)
        validate(program, system.declared(plan, carried=carried))
        again = program.with_text(program.text())
        assert again.text() == program.text()
        validate(again, system.declared(plan, carried=carried))


@pytest.mark.parametrize("order", ["ours", "published"])
def test_ashpipe_with_four_stages_reads_the_latest_weights_and_steps_after_every_backward(
    order: str,
) -> None:
    """Stage s runs W_s = 3 − s forwards ahead; batch k on version max(0, k − W_s)."""
    program = get_system("ashpipe", {"order": order}).program(Plan.even(4, 4), (4,) * 6)
    for stage, expected in enumerate(
        [
            "F0@0 F1@0 F2@0 F3@0 B0@0 STEP0@1 F4@1 B1@0 STEP1@2 F5@2 B2@0 STEP2@3 B3@0 STEP3@4 "
            "B4@1 STEP4@5 B5@2 STEP5@6",
            "F0@0 F1@0 F2@0 B0@0 STEP0@1 F3@1 B1@0 STEP1@2 F4@2 B2@0 STEP2@3 F5@3 B3@1 STEP3@4 "
            "B4@2 STEP4@5 B5@3 STEP5@6",
            "F0@0 F1@0 B0@0 STEP0@1 F2@1 B1@0 STEP1@2 F3@2 B2@1 STEP2@3 F4@3 B3@2 STEP3@4 "
            "F5@4 B4@3 STEP4@5 B5@4 STEP5@6",
            "F0@0 B0@0 STEP0@1 F1@1 B1@1 STEP1@2 F2@2 B2@2 STEP2@3 F3@3 B3@3 STEP3@4 "
            "F4@4 B4@4 STEP4@5 F5@5 B5@5 STEP5@6",
        ]
    ):
        assert computed(program, stage) == expected


def test_published_ashpipe_sends_the_gradient_after_its_step() -> None:
    program = get_system("ashpipe", {"order": "published"}).program(Plan.even(2, 2), (4,) * 2)
    assert [str(action).split(".")[3] for action in program.streams[1]] == [
        "RECV_ACT0<r0[0:4]@0", "F0@0", "B0@0", "STEP0@1", "SEND_GRAD0>r0[0:4]@0",
        "RECV_ACT1<r0[0:4]@1", "F1@1", "B1@1", "STEP1@2", "SEND_GRAD1>r0[0:4]@1",
    ]  # fmt: skip


def test_pipedreams_batches_go_round_a_stages_replicas() -> None:
    """Stage 0 has two replicas and so half as many updates; w_0 = floor((3 − 1) / 2) = 1."""
    program = get_system("pipedream").program(Plan.even(2, 2, (2, 1)), (4,) * 5)
    assert [computed(program, rank) for rank in range(3)] == [
        "F0@0 F2@0 B0@0 STEP0@1 F4@1 B2@0 STEP1@2 B4@1 STEP2@3",
        "F1@0 F3@0 B1@0 STEP0@1 B3@0 STEP1@2 STEP2@3",
        "F0@0 B0@0 STEP0@1 F1@1 B1@1 STEP1@2 F2@2 B2@2 STEP2@3 F3@3 B3@3 STEP3@4 F4@4 B4@4 STEP4@5",
    ]


def test_vertical_sync_runs_a_batch_on_one_version_everywhere() -> None:
    system = get_system("pipedream", {"vertical_sync": True})
    program = system.program(Plan.even(3, 3), (4,) * 6)
    for stage in range(3):
        versions = re.findall(r"F\d@(\d)", computed(program, stage))
        assert versions == ["0", "0", "0", "1", "2", "3"]


def test_2bw_runs_a_batch_on_the_version_before_the_latest_also_across_a_drain() -> None:
    system = get_system("pipedream_2bw")
    plan = Plan.even(2, 2, micro_batches=2)
    first, later = (system.program(plan, (4,) * 3, carried=carried) for carried in (0, 1))
    assert computed(first, 0) == (
        "F0@0 F1@0 B0@0 F2@0 B1@0 STEP0@1 F3@0 B2@0 F4@1 B3@0 STEP1@2 F5@1 B4@1 B5@1 STEP2@3"
    )
    assert computed(later, 0) == (
        "F0@0 F1@0 B0@0 F2@1 B1@0 STEP0@2 F3@1 B2@1 F4@2 B3@1 STEP1@3 F5@2 B4@2 B5@2 STEP2@4"
    )


def test_with_a_norm_a_2bw_step_waits_until_its_version_is_needed() -> None:
    """So the sum over all stages has a batch's time; NORM takes the gradients before the next
    batch's first backward."""
    plan = Plan.even(2, 2, micro_batches=2)
    program = get_system("pipedream_2bw").program(plan, (4,) * 3, norm=True)
    assert computed(program, 1) == (
        "F0@0 B0@0 F1@0 B1@0 NORM0@0 F2@0 B2@0 F3@0 B3@0 NORM1@0 STEP0@1 F4@1 B4@1 F5@1 B5@1 "
        "NORM2@1 STEP1@2 STEP2@3"
    )


def computed(program: Program, rank: int) -> str:
    shown = COMPUTE | {Op.NORM, Op.STEP}
    actions = [action for action in program.streams[rank] if action.op in shown]
    return " ".join(str(action).split(".")[3] for action in actions)


def test_units_in_flight_reach_exactly_the_declared_bound() -> None:
    for name in sorted(SYSTEMS.keys() - {"dp"}):
        system = get_system(name)
        plan = fitting_plan(system, Plan.even(4, 4, micro_batches=8))
        program = system.program(plan, (8,) * 6)
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


def test_a_walk_that_keeps_nothing_gives_the_same_actions() -> None:
    """Beyond what a stream keeps, too, and whoever has walked it before or walks it meanwhile."""
    plan = Plan.even(2, 2, (2, 1), micro_batches=4)
    program = get_system("dapple").program(plan, (8, 7) * 200)
    for stream in program.streams:
        once = list(stream.once())
        assert once == list(stream) == list(stream.once())
        assert [pair[0] for pair in zip(stream, stream, strict=True)] == once
    assert len(once) > 4096


def test_a_step_waits_for_the_slowest_replica() -> None:
    """Replica 1 holds the one sample of the first unit as well, so it is busy for longer."""
    plan = Plan.even(2, 1, (2,), micro_batches=2, cuts=(1,))
    program = get_system("dp").program(plan, (3, 3))
    rows = grid(program).splitlines()
    assert rows[0].split(" | ")[1].split()[:7] == ["F1", "B1", "B1", ".", ".", ".", "F3"]
    assert rows[1].split(" | ")[1].split()[:7] == ["F0", "B0", "B0", "F1", "B1", "B1", "F2"]
