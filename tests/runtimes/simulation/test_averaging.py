"""AvgPipe simulated: its identities in time, what averaging costs, and how pipelines interleave."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.avgpipe import AvgPipe
from runtimes.plan import Plan
from runtimes.schedule.action import Op
from runtimes.simulation import simulator
from runtimes.simulation.cluster import Cluster, Link, Node
from runtimes.simulation.costs import ProfileCosts, UniformCosts
from runtimes.simulation.grid import draw
from runtimes.simulation.simulator import Simulation, simulate
from runtimes.systems import get_system
from tests.random_schedules import fitting_plan, random_plan
from tests.runtimes.planning.profiles import profile_of

SLOW = Cluster("slow", (Node(4), Node(4)), Link(16.0, 0.25), Link(4.0, 1.0))


def simulated(
    system: AvgPipe, plan: Plan, batches: tuple[int, ...], cluster: Cluster | None = None,
    **costs: float,
) -> Simulation:  # fmt: skip
    where = cluster or Cluster.ideal(plan.world_size)
    return simulate(system.program(plan, batches), where, UniformCosts(plan, **costs))


@given(st.randoms(use_true_random=False))
def test_with_one_pipeline_it_takes_dapples_or_gpipes_time(dice: random.Random) -> None:
    plan = fitting_plan(get_system("gpipe"), random_plan(dice, layers=6))
    sizes = tuple(dice.choice((2, 7, 18)) for _ in range(dice.randint(1, 4)))
    costs = UniformCosts(
        plan, sample_bytes=1.5, parameter_bytes=32.0, optimizer_seconds=0.3, copy_seconds=9.0
    )
    for advance, other in ((0, "dapple"), (plan.micro_batches, "gpipe")):
        ours, theirs = (
            simulate(system.program(plan, sizes), SLOW, costs)
            for system in (AvgPipe(advance=advance), get_system(other))
        )
        assert ours.end_seconds == theirs.end_seconds
        assert ours.timed == theirs.timed


@given(st.integers(1, 4), st.integers(1, 7), st.integers(1, 3), st.integers(0, 8))
def test_units_in_flight(stages: int, units: int, pipelines: int, advance: int) -> None:
    """K_s = min(S − s + a, M) in each pipeline, reached, and so at most N · K_s on a device."""
    plan = Plan.even(stages, stages, micro_batches=units, pipelines=pipelines)
    simulation = simulated(AvgPipe(advance=advance), plan, (pipelines * units,) * 2)
    for stage, timed in enumerate(simulation.timed):
        bound, flying = min(stages - stage + advance, units), dict.fromkeys(range(pipelines), 0)
        most, together = dict(flying), 0
        for item in timed:
            flying[item.action.pipeline] += (item.action.op == Op.F) - (item.action.op == Op.B)
            most[item.action.pipeline] = max(most[item.action.pipeline], *flying.values())
            together = max(together, sum(flying.values()))
        assert all(peak >= bound for peak in most.values())
        assert max(most.values()) == bound
        assert bound <= together <= pipelines * bound


def test_two_pipelines_fill_what_one_leaves_idle() -> None:
    """S = M = 4, a backward of two forwards, links that cost nothing: two batches take
    33, DAPPLE 21 for each batch, or 33 for both as one of 8 micro-batches."""
    plan, batches = Plan.even(4, 4, micro_batches=4, pipelines=2), (8,)
    took = {a: simulated(AvgPipe(advance=a), plan, batches).makespan_seconds for a in (0, 1, 4)}
    assert took == {0: 33.0, 1: 33.0, 4: 33.0}
    for units, seconds in ((4, 21.0), (8, 33.0)):
        alone = Plan.even(4, 4, micro_batches=units)
        program = get_system("dapple").program(alone, (units,))
        found = simulate(program, Cluster.ideal(4), UniformCosts(alone))
        assert found.makespan_seconds == seconds


def test_pipelines_that_average_alone_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they never drain together: an update of both takes 29 in the long run.  By the order of
    streams alone it takes 34, as the first is through long before the second."""
    plan = Plan.even(4, 4, micro_batches=4, pipelines=2)

    def update() -> float:
        system = AvgPipe(averaging="asynchronous")
        few, many = (simulated(system, plan, (8,) * n).makespan_seconds for n in (8, 24))
        return (many - few) / 16

    assert update() == 29.0
    monkeypatch.setattr(simulator, "in_turn", lambda heads, batches: heads)
    assert update() == 34.0


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 6))
def test_no_device_does_better_than_its_work(
    stages: int, units: int, pipelines: int, advance: int
) -> None:
    """N M (t_F + t_B), with the ramp to the last stage and back that nothing can fill."""
    plan = Plan.even(stages, stages, micro_batches=units, pipelines=pipelines)
    found = simulated(AvgPipe(advance=advance), plan, (pipelines * units,))
    assert found.makespan_seconds >= 3.0 * (pipelines * units + stages - 1)
    assert found.makespan_seconds <= 3.0 * pipelines * (units + stages - 1)


@pytest.mark.parametrize(("every", "averagings"), [(1, 4), (2, 2), (3, 1)])
def test_averaging_costs_what_tying_all_copies_takes(every: int, averagings: int) -> None:
    """On one stage nothing waits: 4 updates of 3 units of 3 s, and steps."""
    plan, batches = Plan.even(1, 1, micro_batches=1, pipelines=3), (3,) * 4
    for averaging in ("synchronous", "asynchronous"):
        system = AvgPipe(averaging=averaging, every=every)  # type: ignore[arg-type]
        found = simulated(system, plan, batches, optimizer_seconds=0.5, copy_seconds=0.25)
        assert found.makespan_seconds == 4 * 3 * (3.0 + 0.5) + averagings * 3 * 0.25
        (parts,) = found.parts
        assert parts["optimizer"] == 4 * 3 * 0.5 + averagings * 3 * 0.25


def test_who_averages_jointly_waits_for_the_last_copy() -> None:
    plan = Plan.even(1, 1, micro_batches=1, pipelines=2)
    joint = simulated(AvgPipe(), plan, (2, 2), copy_seconds=0.25)
    alone = simulated(AvgPipe(averaging="asynchronous"), plan, (2, 2), copy_seconds=0.25)

    def order(simulation: Simulation) -> list[tuple[int, str, float]]:
        return [
            (item.action.pipeline, item.action.op.value, item.end)
            for item in simulation.timed[0]
            if item.action.op != Op.STEP
        ]

    # Both are tied when the second is through: at the first one's turn, for both.
    assert order(joint)[:5] == [
        (0, "F", 1.0), (0, "B", 3.0), (1, "F", 4.0), (1, "B", 6.0), (0, "AVERAGE", 6.5),
    ]  # fmt: skip
    assert (1, "AVERAGE", joint.makespan_seconds) in order(joint)
    assert order(alone)[:4] == [(0, "F", 1.0), (0, "B", 3.0), (0, "AVERAGE", 3.25), (1, "F", 4.25)]


def test_averaging_follows_from_the_step_of_plain_sgd() -> None:
    """Each copy takes two passes like it, and scaling the reference two thirds of one."""
    profile = profile_of()
    plan = Plan.even(len(profile.layers), 1, pipelines=2)
    size = sum(layer.parameter_bytes for layer in profile.layers)
    seconds = profile.optimizer_seconds_per_byte["sgd"] * size
    costs = ProfileCosts(profile, plan, "sgd")
    assert costs.average_seconds(0, 0, 2) == pytest.approx((4 + 2 / 3) * seconds)
    assert ProfileCosts(profile, plan).average_seconds(0, 0, 2) == 0.0


def test_pipelines_share_a_row() -> None:
    plan = Plan.even(2, 2, micro_batches=2, pipelines=2)
    found = simulated(AvgPipe(), plan, (4,))
    assert draw(found, 1.0).splitlines() == [
        "rank 0 (stage 0) | F0a F1a F0b F1b B0a B0a .   B1a B1a .   B0b B0b .   B1b B1b",
        "rank 1 (stage 1) | .   F0a B0a B0a F1a B1a B1a F0b B0b B0b F1b B1b B1b .   .",
    ]
    many = Plan.even(1, 1, micro_batches=1, pipelines=27)
    assert " F0.26 B0.26 B0.26" in draw(simulated(AvgPipe(), many, (27,)), 1.0)
