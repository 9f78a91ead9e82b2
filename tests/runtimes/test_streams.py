"""Several streams of a rank over processes: messages and sums of pipelines never get mixed up, a
rank goes on with the stream that can, and sleeps when none can."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtimes.avgpipe import AvgPipe
from runtimes.execution.arrivals import Arrivals, Counts
from runtimes.execution.endpoint import ActionTimeoutError, GroupEndpoint
from runtimes.plan import Plan
from runtimes.schedule.action import Action, Op
from runtimes.schedule.program import Program
from tests.processes import RankError, run_ranks
from tests.runtimes.streams import Walk, endpoint_of
from tests.runtimes.test_jitter import dawdling


def plan_of(
    stages: int, pipelines: int, replicas: list[int] | None = None, micro_batches: int = 3
) -> Plan:
    plan = Plan.even(6, stages, replicas, micro_batches=micro_batches, cuts=[1])
    return replace(plan, pipelines=pipelines)


#: The last has too few samples for every unit.
ODD = (14, 14, 3)
#: Of messages that are all of one size: gloo ends a rank that receives more than it expects.
EVEN = (18, 18)


def program_of(
    plan: Plan, sizes: tuple[int, ...] = ODD, *, norm: bool = False, advance: int = 0
) -> Program:
    return AvgPipe(advance=advance).program(plan, sizes, norm=norm)


#: (plan, with norms) by number of ranks.
CASES = {
    2: [
        (plan_of(2, 2), False),
        (plan_of(2, 3), True),
        (plan_of(1, 2, [2]), True),
        (plan_of(1, 3, [2]), False),
    ],
    3: [(plan_of(3, 2), True), (plan_of(2, 3, [1, 2]), True), (plan_of(2, 2, [2, 1]), False)],
}


def walks(
    rank: int, world_size: int, cases: list[tuple[Plan, bool]], mutant: str = ""
) -> list[list[str]]:
    """What was wrong in each case, on one end twice."""
    if mutant:
        MUTANTS[mutant]()
    found = []
    for number, (plan, norm) in enumerate(cases):
        end, wrong = endpoint_of(plan, rank, timeout_s=2 if mutant else 20), list[str]()
        for advance in (0, 2):
            walk = Walk(
                end,
                program_of(plan, EVEN if mutant else ODD, norm=norm, advance=advance),
                dawdling(rank, 2 * number + advance),
                # Replicas come to the reductions of their pipelines in different orders.
                turned=rank % 2 == 1,
            )
            walk.run()
            wrong += walk.wrong
            assert walk.looks <= 2 * len(walk.done) + walk.rests, "it does not sleep"
        found.append(wrong)
        if not mutant:
            end.groups.leave()
    return found


@pytest.mark.parametrize("ranks", CASES)
def test_who_is_late_mixes_nothing_up(ranks: int) -> None:
    for of_rank in run_ranks(ranks, walks, CASES[ranks]):
        assert of_rank == [[]] * len(CASES[ranks])


# -- first ready ------------------------------------------------------------------------------


def one_is_held(rank: int, world_size: int, plan: Plan, held: int) -> list[Action]:
    """Stage 0 keeps one pipeline back until another has stepped."""
    end = endpoint_of(plan, rank)
    walk = Walk(end, program_of(plan))

    def is_held(action: Action) -> bool:
        others = (p for p in range(plan.pipelines) if p != held)
        stepped = any(Action(p, 0, 0, Op.STEP, 0, version=1) in walk.done for p in others)
        return action.pipeline == held and not stepped

    if rank == 0:
        walk.held = is_held
    walk.run()
    assert not walk.wrong
    return walk.done


@pytest.mark.parametrize(("pipelines", "held"), [(2, 0), (3, 0), (2, 1)])
def test_a_rank_goes_on_with_the_stream_that_can(pipelines: int, held: int) -> None:
    _, last = run_ranks(2, one_is_held, plan_of(2, pipelines), held)
    stepped = next(a.pipeline for a in last if a.op == Op.STEP)
    begun = next(a.pipeline for a in last)
    assert begun != held
    assert stepped != held


# -- what ends a rank -------------------------------------------------------------------------


def never_sent(rank: int, world_size: int, plan: Plan) -> str:
    """Stage 0 begins with pipeline 1 and then does nothing."""
    end = endpoint_of(plan, rank, timeout_s=0.5)
    walk = Walk(end, program_of(plan))
    if rank == 0:
        walk.held = lambda action: len(walk.done) == 2 or action.pipeline == 0
    try:
        walk.run()
    except ActionTimeoutError as error:
        # The first to give up ends its connections: the other is to see its own time run out.
        time.sleep(0.5)
        return str(error)
    return ""


def test_a_time_out_names_what_all_streams_wait_for() -> None:
    first, last = run_ranks(2, never_sent, plan_of(2, 2))
    assert "p0.s0.r0.F0@0, p1.s0.r0.F1@0 waited" in first
    assert "p0.s1.r0.RECV_ACT0<r0[0:2]@0, p1.s1.r0.RECV_ACT1<r0" in last
    assert "the action time-out: a rank hangs, or action_timeout_s is too short" in last


def dies(rank: int, world_size: int, plan: Plan) -> None:
    end = endpoint_of(plan, rank)
    walk = Walk(end, program_of(plan))
    if rank == 0:
        walk.before = lambda action: os._exit(7) if len(walk.done) == 12 else None
    walk.run()


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(RankError, match="ended with exit code 7") as error:
        run_ranks(2, dies, plan_of(2, 2))
    assert error.value.rank == 0
    assert "rank 1: " in str(error.value)
    assert "RuntimeError: " in str(error.value)
    assert "ActionTimeoutError" not in str(error.value)


# -- refused ----------------------------------------------------------------------------------


def refused(rank: int, world_size: int, plan: Plan, kind: str) -> str:
    end, program = endpoint_of(plan, rank), program_of(plan)
    if kind == "rendezvous":
        program = replace(program, rendezvous=True)
    else:
        end.device = torch.device("meta")
    with pytest.raises(ValueError, match="2 streams of a rank") as error:
        end.open(program)
    return str(error.value)


@pytest.mark.parametrize("kind", ["rendezvous", "device"])
def test_several_streams_are_refused_where_they_would_hold_each_other_up(kind: str) -> None:
    (line,) = run_ranks(1, refused, plan_of(1, 2), kind)
    assert "use one pipeline" in line


# -- mutants ----------------------------------------------------------------------------------


def told_too_early() -> None:
    """A posted receive counts as arrived."""
    expect = Arrivals.expect

    def mutant(self: Arrivals, channel: Counts, work: dist.Work) -> None:
        channel.arrived += 1
        expect(self, channel, work)

    Arrivals.expect = mutant  # type: ignore[method-assign]


def sums_told_too_early() -> None:
    """As if they were over as soon as they are issued, and not awaited."""
    Arrivals.watch = lambda self, sums, work: self._news.put((sums, None))  # type: ignore[method-assign]
    GroupEndpoint._wait = lambda self, work, action, **words: None  # type: ignore[method-assign]


def one_group_for_all_messages() -> None:
    init = GroupEndpoint.__init__

    def mutant(self: GroupEndpoint, *words: Any) -> None:
        init(self, *words)
        groups = self.groups.messages
        for pipeline, kind in groups:
            groups[pipeline, kind] = groups[0, kind]

    GroupEndpoint.__init__ = mutant  # type: ignore[method-assign]


def one_group_for_all_sums() -> None:
    init = GroupEndpoint.__init__

    def mutant(self: GroupEndpoint, *words: Any) -> None:
        init(self, *words)
        for pipeline, stage in self.groups.replicas:
            self.groups.replicas[pipeline, stage] = self.groups.replicas[0, stage]

    GroupEndpoint.__init__ = mutant  # type: ignore[method-assign]


def another_pipelines_link() -> None:
    """A receive takes the message of the pipeline before it, if one is there."""
    receive = GroupEndpoint.receive

    def mutant(self: GroupEndpoint, action: Action, shape: Iterable[int]) -> Any:
        key, other = ((p, action.op, action.peer) for p in (action.pipeline, action.pipeline - 1))
        there = self._links.get(other)
        if there is not None and there.arrived and there.posted[0][1].shape == shape:
            mine = self._links[key]
            mine.posted[0], there.posted[0] = there.posted[0], mine.posted[0]
        return receive(self, action, tuple(shape))

    GroupEndpoint.receive = mutant  # type: ignore[assignment, method-assign]


def is_caught(mutant: str, case: tuple[Plan, bool]) -> bool:
    """By what was wrong, or because a stream waits for what another one got."""
    try:
        ranks = run_ranks(2, walks, [case], mutant)
    except RankError as error:
        return "ActionTimeoutError" in str(error)
    return any(wrong for (wrong,) in ranks)


MUTANTS: dict[str, Callable[[], None]] = {
    "told too early": told_too_early,
    "sums told too early": sums_told_too_early,
    "one group for all messages": one_group_for_all_messages,
    "one group for all sums": one_group_for_all_sums,
    "another pipeline's link": another_pipelines_link,
}


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        ("told too early", (plan_of(2, 2, micro_batches=1), False)),
        ("sums told too early", (plan_of(1, 2, [2]), False)),
        ("one group for all messages", (plan_of(2, 3), False)),
        ("one group for all sums", (plan_of(1, 3, [2]), False)),
        ("another pipeline's link", (plan_of(2, 2), False)),
    ],
    ids=MUTANTS,
)
def test_what_is_mixed_up_shows(mutant: str, case: tuple[Plan, bool]) -> None:
    assert is_caught(mutant, case)
