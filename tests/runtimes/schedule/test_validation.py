"""Programs that break a rule are refused, naming the rule, the rank and the action."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from runtimes.plan import Plan
from runtimes.schedule import Action, Op, Program, ScheduleError, parse, validate
from runtimes.system import evaluation_program
from runtimes.systems import get_system

PLAN = Plan.even(4, 2, micro_batches=3)
DAPPLE = get_system("dapple")
GPIPE = get_system("gpipe")
Edit = Callable[[list[Action]], list[Action]]


def without(text: str) -> Edit:
    return lambda actions: [action for action in actions if str(action) != text]


def swapped(first: str, second: str) -> Edit:
    def edit(actions: list[Action]) -> list[Action]:
        texts = [str(action) for action in actions]
        i, j = texts.index(first), texts.index(second)
        actions[i], actions[j] = actions[j], actions[i]
        return actions

    return edit


def changed(text: str, to: str) -> Edit:
    return lambda actions: [parse(to) if str(action) == text else action for action in actions]


def doubled(text: str) -> Edit:
    def edit(actions: list[Action]) -> list[Action]:
        at = [str(action) for action in actions].index(text)
        return [*actions[: at + 1], actions[at], *actions[at + 1 :]]

    return edit


def edited(program: Program, rank: int, edit: Edit) -> Program:
    before = list(program.of_rank(rank)[0])
    after = edit(list(before))
    assert after != before, "the edit hit nothing"
    return program.replaced(rank, after)


CASES = {
    "a missing receive": (
        GPIPE, 1, without("p0.s1.r0.RECV_ACT1<r0[0:1]@0"),
        5, 1, "p0.s1.r0.F1@0", "a receive is missing",
    ),
    "a missing send": (
        GPIPE, 0, without("p0.s0.r0.SEND_ACT2>r0[0:1]@0"),
        3, 1, "p0.s1.r0.RECV_ACT2<r0[0:1]@0", "rank 0 has no send for it",
    ),
    "a missing last send": (
        GPIPE, 1, without("p0.s1.r0.SEND_GRAD5>r0[0:2]@1"),
        3, 0, "p0.s0.r0.RECV_GRAD5<r0[0:2]@1", "rank 1 has no send for it",
    ),
    "a message that nobody takes in": (
        GPIPE, 1, doubled("p0.s1.r0.SEND_GRAD5>r0[0:2]@1"),
        3, 1, "p0.s1.r0.SEND_GRAD5>r0[0:2]@1", "no receive takes it in",
    ),
    "crossed sends": (
        GPIPE, 0, swapped("p0.s0.r0.SEND_ACT1>r0[0:1]@0", "p0.s0.r0.SEND_ACT2>r0[0:1]@0"),
        5, 0, "p0.s0.r0.SEND_ACT2>r0[0:1]@0", "sent before the F",
    ),
    "crossed receives": (
        GPIPE, 1, swapped("p0.s1.r0.RECV_ACT1<r0[0:1]@0", "p0.s1.r0.RECV_ACT2<r0[0:1]@0"),
        4, 1, "p0.s1.r0.RECV_ACT2<r0[0:1]@0", "crossed: rank 0 sends p0.s0.r0.SEND_ACT1",
    ),
    "B before F": (
        GPIPE, 1, swapped("p0.s1.r0.F1@0", "p0.s1.r0.B1@0"),
        2, 1, "p0.s1.r0.B1@0", "B before its F",
    ),
    "a second F": (GPIPE, 0, doubled("p0.s0.r0.F1@0"), 2, 0, "p0.s0.r0.F1@0", "second forward"),
    "a second B": (GPIPE, 0, doubled("p0.s0.r0.B1@0"), 2, 0, "p0.s0.r0.B1@0", "second backward"),
    "a wrong version in B": (
        DAPPLE, 0, changed("p0.s0.r0.B3@1", "p0.s0.r0.B3@0"),
        7, 0, "p0.s0.r0.B3@0", "its forward used version @1",
    ),
    "an old version in F": (
        DAPPLE, 1, changed("p0.s1.r0.F4@1", "p0.s1.r0.F4@0"),
        8, 1, "p0.s1.r0.F4@0", "1 updates old at update 1, declared is 0",
    ),
    "a version that is not there yet": (
        DAPPLE, 1, changed("p0.s1.r0.F1@0", "p0.s1.r0.F1@1"),
        8, 1, "p0.s1.r0.F1@1", "only versions up to @0 exist",
    ),
    "an odd byte count": (
        GPIPE, 1, changed("p0.s1.r0.RECV_ACT5<r0[0:2]@1", "p0.s1.r0.RECV_ACT5<r0[0:1]@1"),
        3, 1, "p0.s1.r0.RECV_ACT5<r0[0:1]@1",
        r"expects 1,200 bytes \(1 samples\), but rank 0 sends 2,400 bytes \(2 samples\)",
    ),
    "a message beyond the unit": (
        GPIPE, 0, changed("p0.s0.r0.SEND_ACT1>r0[0:1]@0", "p0.s0.r0.SEND_ACT1>r0[0:2]@0"),
        3, 0, "p0.s0.r0.SEND_ACT1>r0[0:2]@0", "leaves this replica's samples",
    ),
    "an empty unit": (
        GPIPE, 0, doubled("p0.s0.r0.STEP1@2"),
        8, 0, "p0.s0.r0.STEP1@2", "update 2 to @3 is next",
    ),
    "another stage's action": (
        GPIPE, 0, changed("p0.s0.r0.F1@0", "p0.s1.r0.F1@0"),
        1, 0, "p0.s1.r0.F1@0", "not of that stage",
    ),
    "a unit that does not exist": (
        GPIPE, 0, changed("p0.s0.r0.F1@0", "p0.s0.r0.F9@0"),
        1, 0, "p0.s0.r0.F9@0", "the unit is empty here",
    ),
    "a step before the last backward": (
        DAPPLE, 0, swapped("p0.s0.r0.STEP0@1", "p0.s0.r0.B2@0"),
        10, 0, "p0.s0.r0.STEP0@1", "no gradient yet",
    ),
    "a missing step": (
        DAPPLE, 0, without("p0.s0.r0.STEP1@2"),
        10, 0, "p0.s0.r0.STEP1", "ends without this step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_broken_program_is_refused(name: str) -> None:
    system, rank, edit, rule, at_rank, at, words = CASES[name]
    program = system.program(PLAN, (3, 4))
    validate(program, system.declared(PLAN))
    broken = edited(program, rank, edit)
    with pytest.raises(ScheduleError, match=words) as caught:
        validate(broken, system.declared(PLAN), sample_bytes=(1200,))
    assert (caught.value.rule, caught.value.rank) == (rule, at_rank)
    assert str(caught.value.action) == at
    assert f"rank {at_rank}, {at}" in str(caught.value)
    assert ">>" in str(caught.value), "the grid marks the cell"


def test_an_empty_unit_is_refused() -> None:
    program = GPIPE.program(PLAN, (3, 1))
    broken = edited(program, 0, changed("p0.s0.r0.F5@1", "p0.s0.r0.F3@1"))
    with pytest.raises(ScheduleError, match=r"rank 0, p0.s0.r0.F3@1: the unit is empty here"):
        validate(broken)


def test_a_circle_of_waits_is_a_deadlock() -> None:
    """Stage 0 wants unit 0 back before it starts unit 1; stage 1 wants both first."""
    program = GPIPE.program(PLAN, (3,))
    order = ["F0", "SEND_ACT0", "RECV_GRAD0", "B0", "F1", "SEND_ACT1", "F2", "SEND_ACT2"]
    order += ["RECV_GRAD1", "B1", "RECV_GRAD2", "B2", "STEP0"]
    known = {f"{action.op}{action.unit}": action for action in program.of_rank(0)[0]}
    broken = program.replaced(0, [known[name] for name in order])
    with pytest.raises(
        ScheduleError, match=r"deadlock, all wait: rank 0 at .*RECV_GRAD0.*; rank 1 at"
    ):
        validate(broken)


def test_too_many_units_in_flight_are_refused() -> None:
    program = GPIPE.program(PLAN, (3,))
    with pytest.raises(ScheduleError, match="3 units in flight, declared are 2") as caught:
        validate(program, DAPPLE.declared(PLAN))
    assert caught.value.rule == 9


def test_explicit_edges_are_part_of_the_proof() -> None:
    program = GPIPE.program(PLAN, (3,))
    first, last = parse("p0.s0.r0.F0@0"), parse("p0.s1.r0.B2@0")
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(replace(program, after={first: (last,)}))
    validate(replace(program, after={last: (first,)}))


REPLICATED = Plan.even(4, 2, (2, 2), micro_batches=2, cuts=(1, 3))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without("p0.s0.r1.REDUCE0/1@0"), "a STEP before its gradients are reduced"),
        (swapped("p0.s0.r1.REDUCE0/1@0", "p0.s0.r1.STEP0@1"), "before its gradients are reduced"),
        (doubled("p0.s0.r1.REDUCE0/1@0"), "reduced twice"),
        (swapped("p0.s0.r1.REDUCE0/1@0", "p0.s0.r1.B1/1@0"), "reduced before its backward"),
        (changed("p0.s0.r1.REDUCE0/1@0", "p0.s0.r1.REDUCE0@0"), "reduced twice"),
        (changed("p0.s0.r1.REDUCE1/1@1", "p0.s0.r1.REDUCE1/1@0"), "those of version @1"),
    ],
)
def test_reductions_are_checked(edit: Edit, words: str) -> None:
    program = DAPPLE.program(REPLICATED, (8, 8))
    validate(program, DAPPLE.declared(REPLICATED))
    with pytest.raises(ScheduleError, match=words) as caught:
        validate(edited(program, 1, edit))
    assert caught.value.rank == 1


def test_replicas_that_reduce_in_different_orders_are_refused() -> None:
    plan = Plan.even(4, 1, (2,), cuts=(2,))
    program = get_system("dp").program(plan, (8,))
    actions = list(program.of_rank(1)[0])
    late = [action for action in actions if action.op == Op.REDUCE]
    rest = [action for action in actions if action.op not in (Op.REDUCE, Op.STEP)]
    step = actions[-1]
    validate(program.replaced(1, [*rest, *late, step]))
    with pytest.raises(ScheduleError, match="another replica reduces update 0 part 0") as caught:
        validate(program.replaced(1, [*rest, *late[::-1], step]))
    assert caught.value.rule == 11


def test_recomputation_is_checked() -> None:
    plan = Plan.even(4, 2, micro_batches=2, recompute=True)
    program = DAPPLE.program(plan, (4,))
    validate(program, DAPPLE.declared(plan))
    with pytest.raises(ScheduleError, match="B before its R"):
        validate(edited(program, 0, without("p0.s0.r0.R1@0")))
    with pytest.raises(ScheduleError, match="not asked for"):
        validate(edited(program, 0, doubled("p0.s0.r0.R1@0")))


def test_an_evaluation_that_leaves_samples_out_is_refused() -> None:
    program = evaluation_program(PLAN, 5, 2)
    validate(program)
    only = [action for action in program.of_rank(0)[0] if action.unit != 2]
    half = program.replaced(0, only).replaced(
        1, [action for action in program.of_rank(1)[0] if action.unit != 2]
    )
    with pytest.raises(ScheduleError, match="never evaluated"):
        validate(half)


def test_a_reduction_without_replicas_is_refused() -> None:
    program = DAPPLE.program(PLAN, (3,))
    step = parse("p0.s0.r0.STEP0@1")
    reduce = parse("p0.s0.r0.REDUCE0/0@0")
    actions = list(program.of_rank(0)[0])
    actions.insert(actions.index(step), reduce)
    with pytest.raises(ScheduleError, match="no other replica to reduce with"):
        validate(program.replaced(0, actions))


def test_a_message_that_repeats_samples_does_not_stand_for_those_left_out() -> None:
    program = GPIPE.program(Plan.even(4, 2), (4,))
    halves = []
    for rank, op in ((0, "SEND_ACT0>r0"), (1, "RECV_ACT0<r0")):
        whole = f"p0.s{rank}.r0.{op}[0:4]@0"
        half = parse(f"p0.s{rank}.r0.{op}[0:2]@0")
        actions = list(program.of_rank(rank)[0])
        at = actions.index(parse(whole))
        halves.append([*actions[:at], half, half, *actions[at + 1 :]])
    with pytest.raises(ScheduleError, match="RECV_ACT of sample 0 came twice") as caught:
        validate(program.replaced(0, halves[0]).replaced(1, halves[1]))
    assert (caught.value.rule, str(caught.value.action)) == (5, "p0.s1.r0.F0@0")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without("p0.s1.r0.NORM0@0"), "other ranks take this update's norm"),
        (doubled("p0.s1.r0.NORM0@0"), "a second norm"),
        (swapped("p0.s1.r0.NORM1@1", "p0.s1.r0.STEP1@2"), "step came before it"),
        (swapped("p0.s1.r0.NORM0@0", "p0.s1.r0.B2@0"), "no gradient yet"),
    ],
)
def test_norms_are_checked(edit: Edit, words: str) -> None:
    program = DAPPLE.program(PLAN, (3, 3), norm=True)
    validate(program, DAPPLE.declared(PLAN))
    with pytest.raises(ScheduleError, match=words) as caught:
        validate(edited(program, 1, edit))
    assert caught.value.rank == 1


ASHPIPE = get_system("ashpipe")
THREE = Plan.even(6, 3, (2, 3, 1))


@pytest.mark.parametrize(
    ("rank", "edit", "rule", "words"),
    [
        (0, changed("p0.s0.r0.B1@0", "p0.s0.r0.B1@1"), 7, "its forward used version @0"),
        (0, swapped("p0.s0.r0.STEP0@1", "p0.s0.r0.F3@1"), 8, "only versions up to @0 exist"),
        (0, changed("p0.s0.r0.F3@1", "p0.s0.r0.F3@0"), 8, "3 updates old at update 3"),
        (0, swapped("p0.s0.r0.F3@1", "p0.s0.r0.B0@0"), 8, "only versions up to @0 exist"),
        (5, without("p0.s2.r0.STEP1@2"), 8, "only versions up to @1"),
    ],
)
def test_programs_without_a_flush_are_checked(rank: int, edit: Edit, rule: int, words: str) -> None:
    program = ASHPIPE.program(THREE, (9,) * 5)
    validate(program, ASHPIPE.declared(THREE))
    with pytest.raises(ScheduleError, match=words) as caught:
        validate(edited(program, rank, edit), ASHPIPE.declared(THREE))
    assert (caught.value.rule, caught.value.rank) == (rule, rank)


def test_a_rendezvous_that_its_receiver_never_comes_to_is_a_deadlock() -> None:
    """Stage 1 wants to send its gradient only after the activation that stage 0 sends next: with
    sends that are not awaited this is legal, with a rendezvous stage 0 has to be met first."""
    plan = Plan.even(4, 2)
    program = get_system("ashpipe", {"order": "published"}).program(plan, (4, 4, 4))
    validate(program)
    late = edited(
        program, 1, swapped("p0.s1.r0.RECV_ACT1<r0[0:4]@1", "p0.s1.r0.SEND_GRAD0>r0[0:4]@0")
    )
    validate(late)
    actions = list(program.of_rank(0)[0])
    texts = [str(action) for action in actions]
    # Stage 0 takes the gradient of unit 0 in before it sends unit 1, which stage 1 awaits first.
    moved = actions.pop(texts.index("p0.s0.r0.RECV_GRAD0<r0[0:4]@0"))
    actions.insert(texts.index("p0.s0.r0.SEND_ACT1>r0[0:4]@0"), moved)
    validate(replace(program.replaced(0, actions), rendezvous=False))
    blocked = late.replaced(0, actions)
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        validate(blocked)
    assert caught.value.rule == 6
