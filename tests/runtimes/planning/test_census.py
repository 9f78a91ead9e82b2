"""What a rank holds follows from its program; the moments that matter, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.plan import Plan
from runtimes.planning.census import Holding, census
from runtimes.schedule import Action, Op
from runtimes.schedule.posting import AHEAD, posting
from runtimes.schedule.replay import replay
from runtimes.systems import get_system
from tests.runtimes.transparency import ArrayFeed, Case, job_of, stack_of


def largest(found: dict[Holding, Action]) -> set[tuple[int, int]]:
    """(units kept, sets of gradients) that no other moment exceeds in both."""
    pairs = {(len(holding.kept), holding.gradients) for holding in found}
    return {
        pair
        for pair in pairs
        if not any(a >= pair[0] and b >= pair[1] and (a, b) != pair for a, b in pairs)
    }


@pytest.mark.parametrize(
    ("system", "stages", "units", "norm", "expected"),
    [
        # All M forwards, then the first backward makes the gradients.
        ("gpipe", 3, 4, False, [{(4, 0), (3, 1)}] * 3),
        ("dapple", 3, 3, False, [{(3, 0), (2, 1)}, {(2, 1)}, {(1, 1)}]),
        ("dapple", 3, 6, False, [{(3, 1)}, {(2, 1)}, {(1, 1)}]),
        ("dp", 1, 1, False, [{(1, 0), (0, 1)}]),
        ("ashpipe", 3, 1, False, [{(3, 0), (2, 1)}, {(2, 0), (1, 1)}, {(1, 0), (0, 1)}]),
        ("pipedream", 3, 1, False, [{(3, 0), (2, 1)}, {(2, 0), (1, 1)}, {(1, 0), (0, 1)}]),
        ("pipedream_2bw", 3, 4, False, [{(3, 1)}, {(2, 1)}, {(1, 1)}]),
        ("pipedream_2bw", 3, 4, True, [{(3, 2)}, {(2, 2)}, {(1, 2)}]),
        # As many units in flight as a batch has: the step comes first.
        ("pipedream_2bw", 4, 4, True, [{(4, 1), (3, 2)}, {(3, 2)}, {(2, 2)}, {(1, 2)}]),
    ],
)
def test_what_is_held_at_once(
    system: str, stages: int, units: int, norm: bool, expected: list[set[tuple[int, int]]]
) -> None:
    plan = Plan.even(stages, stages, micro_batches=units)
    program = get_system(system).program(plan, (24,) * 8, norm=norm)
    found = census(program, "distributed", dict.fromkeys(range(stages), stages))
    assert [largest(share) for (share,) in found] == expected


def test_recomputation_keeps_inputs_and_one_unit() -> None:
    plan = Plan.even(3, 3, micro_batches=6, recompute=True)
    program = get_system("dapple").program(plan, (24,) * 3)
    for stage, (found,) in enumerate(census(program, "distributed", {0: 3, 1: 2, 2: 1})):
        assert max(len(holding.kept) for holding in found) == 1
        assert max(holding.inputs for holding in found) == (3 - stage) * 4
        at_once = max(holding.inputs + sum(holding.kept) for holding in found)
        assert at_once == (3 - stage) * 4


def test_messages_of_a_middle_stage() -> None:
    """1F1B, 4 units of 6 samples: two receives posted each way, and one being used."""
    plan = Plan.even(3, 3, micro_batches=4)
    program = get_system("dapple").program(plan, (24,) * 3)
    (found,) = census(program, "distributed", {0: 3, 1: 2, 2: 1})[1]
    assert max(holding.activations for holding in found) == 3 * 6
    assert max(holding.gradients_in for holding in found) == 3 * 6
    # One to be sent; and the stage before may hold three units, whose gradients are under way.
    assert max(holding.gradients_out for holding in found) == (1 + 3) * 6
    # An output that was sent is kept for the backward, until which it has arrived.
    assert all(holding.outputs == 0 for holding in found)


def test_receives_are_posted_ahead_on_each_channel() -> None:
    plan = Plan.even(2, 2, micro_batches=4)
    (stream,) = get_system("gpipe").program(plan, (8,)).of_rank(0)
    ahead = posting(stream, rendezvous=False)
    posted = [action.unit for action in ahead.begin()]
    assert posted == [0, 1]
    assert len(posted) == AHEAD
    for action in stream:
        if action.op == Op.RECV_GRAD:
            assert list(ahead.before(action)) == []
            posted += [following.unit for following in ahead.after(action)]
            assert len(posted) == min(4, action.unit + 1 + AHEAD)
    assert posted == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "case",
    [
        Case("gpipe", 3, 4),
        Case("pipedream", 3, replicas=(2, 2, 1), epoch=(6,) * 7, segments=((6,) * 7,)),
        Case("pipedream_2bw", 2, 4, (2, 2), clip=0.5),
        Case("ashpipe", 3, replicas=(1, 3, 2), cuts=(1, 2), recompute=True),
    ],
    ids=str,
)
def test_a_replay_is_the_order_in_which_one_process_acts(case: Case) -> None:
    acted: list[Action] = []
    job = job_of(case)
    feed = ArrayFeed(case.precision, case.epoch)
    engine: Any = InProcess(job, job.tasks[0], stack_of(case.model), feed, before=acted.append)
    engine.train(Segment(0, case.segments[0]))
    program = engine.system.program(case.plan, case.segments[0], norm=engine.norm)
    assert list(replay(program)) == acted
