"""AvgPipe's programs: what they are equal to, where pipelines average, and rule 13's mutants."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.avgpipe import AvgPipe
from runtimes.plan import Plan
from runtimes.schedule import Action, Op, Program, ScheduleError, parse, validate
from runtimes.schedule.joining import Joining
from runtimes.schedule.replay import replay
from runtimes.systems import get_system
from tests.random_schedules import fitting_plan, random_plan

Edit = Callable[[list[Action]], list[Action]]


def stream_text(program: Program, rank: int, pipeline: int) -> str:
    (stream,) = (s for s in program.of_rank(rank) if s.pipeline == pipeline)
    return " ".join(str(action).split(".", 3)[3] for action in stream)


# ---- identities --------------------------------------------------------------------------------


@given(st.randoms(use_true_random=False), st.booleans())
def test_with_one_pipeline_it_is_dapple_or_gpipe_to_the_letter(
    dice: random.Random, norm: bool
) -> None:
    """a = 0 is 1F1B, a ≥ M GPipe's order, and there is no reference to average with."""
    plan = fitting_plan(get_system("gpipe"), random_plan(dice, layers=5))
    sizes = tuple(dice.choice((1, 2, 7, 18)) for _ in range(dice.randint(1, 4)))
    most = plan.micro_batches + dice.randint(0, 3)
    for advance, other in ((0, "dapple"), (most, "gpipe")):
        ours = AvgPipe(advance=advance).program(plan, sizes, norm=norm)
        assert ours.text() == get_system(other).program(plan, sizes, norm=norm).text()


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(0, 7))
def test_every_pipeline_runs_the_flush_schedule_of_its_share(
    dice: random.Random, pipelines: int, advance: int
) -> None:
    plan = random_plan(dice, layers=5, most_pipelines=3)
    shares = [dice.randint(1, 9) for _ in range(3)]
    together = AvgPipe(advance, "symmetric").program(
        plan, tuple(plan.pipelines * share for share in shares)
    )
    single = Plan.from_json(plan.to_json() | {"pipelines": 1})
    alone = AvgPipe(advance, alpha=1.0).program(single, tuple(shares))
    for stream in together.streams:
        mine = [a._replace(pipeline=0) for a in stream if a.op != Op.AVERAGE]
        (other,) = alone.of_rank(stream.rank)
        assert mine == list(other)


def test_a_program_with_two_pipelines_by_hand() -> None:
    plan = Plan.even(2, 2, micro_batches=2, pipelines=2)
    program = AvgPipe().program(plan, (5,))
    assert [stream_text(program, 0, p) for p in (0, 1)] == [
        "F0@0 SEND_ACT0>r0[0:1]@0 F1@0 SEND_ACT1>r0[0:1]@0 RECV_GRAD0<r0[0:1]@0 B0@0 "
        "RECV_GRAD1<r0[0:1]@0 B1@0 STEP0@1 AVERAGE0@1",
        "F0@0 SEND_ACT0>r0[0:1]@0 F1@0 SEND_ACT1>r0[0:2]@0 RECV_GRAD0<r0[0:1]@0 B0@0 "
        "RECV_GRAD1<r0[0:2]@0 B1@0 STEP0@1 AVERAGE0@1",
    ]
    assert [(s.rank, s.pipeline) for s in program.streams] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(("phase", "expected"), [(0, [2, 5]), (1, [1, 4]), (2, [0, 3, 6])])
def test_averaging_is_counted_over_the_run(phase: int, expected: list[int]) -> None:
    plan = Plan.even(2, 2, micro_batches=2, pipelines=2)
    program = AvgPipe(every=3).program(plan, (8,) * 7, phase=phase)
    for stream in program.streams:
        assert [a.unit for a in stream if a.op == Op.AVERAGE] == expected


def test_a_pipeline_without_a_sample_makes_no_step_but_averages() -> None:
    """Of a batch of 1 the last pipeline has it; a smaller batch in between is made up for."""
    plan = Plan.even(2, 2, micro_batches=2, pipelines=3)
    system = AvgPipe()
    program = system.program(plan, (6, 1, 6))
    validate(program, system.declared(plan))
    kept = (Op.STEP, Op.AVERAGE)
    for pipeline, expected in (
        (0, "STEP0@1 AVERAGE0@1 AVERAGE1@1 STEP2@2 AVERAGE2@2"),
        (2, "STEP0@1 AVERAGE0@1 STEP1@2 AVERAGE1@2 STEP2@3 AVERAGE2@3"),
    ):
        (stream,) = (s for s in program.of_rank(0) if s.pipeline == pipeline)
        assert " ".join(str(a).split(".")[3] for a in stream if a.op in kept) == expected


# ---- joining -----------------------------------------------------------------------------------


def order_of_ties(averaging: str) -> list[str]:
    plan = Plan.even(1, 1, micro_batches=1, pipelines=2)
    system = get_system("avgpipe", {"averaging": averaging})
    program = system.program(plan, (3, 1))
    kept = (Op.STEP, Op.AVERAGE)
    return [f"p{a.pipeline}.{a.op}{a.unit}" for a in replay(program) if a.op in kept]


def test_a_joint_average_waits_for_all_steps_there_are() -> None:
    """Of the second batch the first pipeline has nothing, and so no step to wait for."""
    assert order_of_ties("synchronous") == [
        "p0.STEP0", "p1.STEP0", "p0.AVERAGE0", "p1.AVERAGE0", "p1.STEP1", "p0.AVERAGE1",
        "p1.AVERAGE1",
    ]  # fmt: skip


def test_a_lone_average_waits_for_its_own_step() -> None:
    assert order_of_ties("asynchronous") == [
        "p0.STEP0", "p0.AVERAGE0", "p0.AVERAGE1", "p1.STEP0", "p1.AVERAGE0", "p1.STEP1",
        "p1.AVERAGE1",
    ]  # fmt: skip


def test_who_has_no_sample_is_waited_for_until_its_last_step_before() -> None:
    program = AvgPipe(every=2).program(Plan.even(1, 1, micro_batches=1, pipelines=2), (3, 1))
    joining, average = Joining(program, 0), parse("p1.s0.r0.AVERAGE1@2")
    for step in ("p1.s0.r0.STEP0@1", "p1.s0.r0.STEP1@2"):
        joining.made(parse(step))
        assert not joining.ready(average)
    joining.made(parse("p0.s0.r0.STEP0@1"))
    assert joining.ready(average)


# ---- rule 13 -----------------------------------------------------------------------------------

PLAN = Plan.even(2, 2, micro_batches=2, pipelines=2)
SYSTEM = AvgPipe(every=2)
SIZES = (8,) * 4


def without(text: str) -> Edit:
    return lambda actions: [action for action in actions if str(action) != text]


def moved(text: str, before: str) -> Edit:
    """In front of another action."""

    def edit(actions: list[Action]) -> list[Action]:
        rest = [action for action in actions if str(action) != text]
        at = [str(action) for action in rest].index(before)
        return [*rest[:at], parse(text), *rest[at:]]

    return edit


def behind(text: str, new: str) -> Edit:
    def edit(actions: list[Action]) -> list[Action]:
        at = [str(action) for action in actions].index(text)
        return [*actions[: at + 1], parse(new), *actions[at + 1 :]]

    return edit


def exchanged(text: str, new: str) -> Edit:
    return lambda actions: [parse(new) if str(action) == text else action for action in actions]


P = "p1.s0.r0."
MUTANTS = {
    "lost": (without(P + "AVERAGE1@2"), "F4@2", "update 1 is to be averaged before it"),
    "lost at the end": (without(P + "AVERAGE3@4"), "AVERAGE3", "ends without this averaging"),
    "twice": (behind(P + "AVERAGE1@2", P + "AVERAGE1@2"), "AVERAGE1@2", "was averaged before"),
    "after another update": (behind(P + "STEP0@1", P + "AVERAGE0@1"), "AVERAGE0@1", "not average"),
    "before its step": (
        moved(P + "AVERAGE1@2", P + "STEP1@2"), "AVERAGE1@2", "update 1 is not stepped yet",
    ),
    "after the next forward": (
        moved(P + "AVERAGE1@2", P + "F5@2"), "F4@2", "update 1 is to be averaged before it",
    ),
    "of another version": (
        exchanged(P + "AVERAGE1@2", P + "AVERAGE1@1"), "AVERAGE1@1", "latest weights are @2",
    ),
    "one skipped": (
        exchanged(P + "AVERAGE1@2", P + "AVERAGE3@2"), "AVERAGE3@2", "2 is not stepped yet",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_an_averaging_at_a_wrong_place_is_refused(name: str) -> None:
    edit, at, words = MUTANTS[name]
    program = SYSTEM.program(PLAN, SIZES)
    validate(program, SYSTEM.declared(PLAN))
    (stream,) = (s for s in program.of_rank(0) if s.pipeline == 1)
    broken = program.replaced(0, edit(list(stream)), pipeline=1)
    with pytest.raises(ScheduleError, match=words) as caught:
        validate(broken, SYSTEM.declared(PLAN))
    assert (caught.value.rule, caught.value.rank) == (13, 0)
    assert str(caught.value.action) == P + at
    assert "pipeline 1" in str(caught.value), "the grid tells the rank's streams apart"


def test_pipelines_that_disagree_are_refused_without_a_declaration() -> None:
    program = SYSTEM.program(PLAN, SIZES)
    (stream,) = (s for s in program.of_rank(0) if s.pipeline == 1)
    validate(program)
    for edit, words in (
        (without(P + "AVERAGE1@2"), "other streams average after this update"),
        (moved(P + "AVERAGE1@2", P + "F5@2"), "a forward of update 2 came before"),
    ):
        with pytest.raises(ScheduleError, match=words) as caught:
            validate(program.replaced(0, edit(list(stream)), pipeline=1))
        assert caught.value.rule == 13


def test_a_system_with_one_pipeline_never_averages() -> None:
    plan = Plan.even(2, 2, micro_batches=2)
    program = AvgPipe(alpha=0.5).program(plan, (8,))
    with pytest.raises(ScheduleError, match="rule 13 .*the system does not average"):
        validate(program, get_system("dapple").declared(plan))


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (exchanged(P + "F4@2", P + "F4@1"), 8),
        (exchanged(P + "F4@2", "p0.s0.r0.F4@2"), 1),
        (without(P + "B1@0"), 10),
        (without(P + "STEP3@4"), 13),
        (moved(P + "F3@1", P + "STEP0@1"), 8),
        (exchanged(P + "SEND_ACT1>r0[0:2]@0", P + "SEND_ACT1>r0[0:1]@0"), 3),
    ],
)
def test_the_other_rules_hold_in_every_pipeline(edit: Edit, rule: int) -> None:
    program = SYSTEM.program(PLAN, SIZES)
    (stream,) = (s for s in program.of_rank(0) if s.pipeline == 1)
    before = list(stream)
    after = edit(list(stream))
    assert after != before
    with pytest.raises(ScheduleError) as caught:
        validate(program.replaced(0, after, pipeline=1), SYSTEM.declared(PLAN))
    assert caught.value.rule == rule


def test_more_units_in_flight_in_one_pipeline_are_refused() -> None:
    plan = Plan.even(2, 2, micro_batches=4, pipelines=2)
    with pytest.raises(ScheduleError, match="3 units in flight, declared are 2"):
        validate(AvgPipe(advance=1).program(plan, (16,)), AvgPipe().declared(plan))
