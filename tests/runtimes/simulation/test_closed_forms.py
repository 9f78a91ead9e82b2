"""Makespans are those of the formulas, exactly; wrong simulators are told from the right one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from runtimes.plan import Plan
from runtimes.schedule import Program
from runtimes.simulation import network, simulator
from runtimes.simulation.cluster import Cluster
from runtimes.simulation.costs import UniformCosts
from runtimes.simulation.network import Message, Network
from runtimes.simulation.steady import steady
from runtimes.systems import get_system
from tests.runtimes.simulation.closed_forms import CHECKS, bubble_of


@pytest.mark.parametrize("name", CHECKS)
def test_a_makespan_is_that_of_its_formula(name: str) -> None:
    found, expected = CHECKS[name]()
    assert found == expected


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("units", [1, 2, 5, 8, 32])
@pytest.mark.parametrize("name", ["gpipe", "dapple"])
def test_the_bubble_is_the_papers(name: str, stages: int, units: int) -> None:
    found, expected = bubble_of(name, stages, units)
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_batch_more_takes_its_period() -> None:
    """With a flush (M + S − 1) · t + step, without one the slowest stage's t + step."""
    costs: dict[str, Any] = {"optimizer_seconds": 0.5}
    plan = Plan.even(3, 3, micro_batches=4)
    for system, expected in [("dapple", (4 + 3 - 1) * 3.0 + 0.5), ("pipedream_2bw", 4 * 3.0 + 0.5)]:
        make = partial(program_of, system, plan)
        found = steady(make, Cluster.ideal(3), UniformCosts(plan, **costs), 8).batch_seconds
        assert found == expected
    plan = Plan.even(3, 3)
    unequal = UniformCosts(plan, (1.0, 2.0, 1.0), (2.0, 4.0, 2.0), **costs)
    make = partial(program_of, "ashpipe", plan)
    assert steady(make, Cluster.ideal(3), unequal, 8).batch_seconds == 6.0 + 0.5


def program_of(system: str, plan: Plan, batches: int) -> Program:
    return get_system(system).program(plan, (4,) * batches)


# -- mutants -----------------------------------------------------------------------------------

Original = Callable[..., Any]


def passes_its_first_port_twice(ports: Original, self: Cluster, *ends: int) -> Any:
    """A link shared twice: every message counts as two."""
    first, last = ports(self, *ends)
    return first, first, last


def shares_nothing(ports: Original, self: Cluster, sender: int, receiver: int) -> Any:
    kinds = [kind for kind, _ in ports(self, sender, receiver)]
    return tuple((f"{kind} {sender} {receiver}", 0) for kind in kinds)


def half(ports: Original, self: Cluster, *ends: int) -> Any:
    return tuple(
        (kind.replace("out", "both").replace("in", "both"), index)
        for kind, index in ports(self, *ends)
    )


def forgets_latency(arrives: Original, self: Any, message: Message[Any], time: float) -> None:
    arrives(self, message, time - message.route.latency_seconds)


def receives_early(arrives: Original, self: Any, message: Message[Any], time: float) -> None:
    """When a message begins to come in, not when it is there."""
    arrives(self, message, time - message.route.latency_seconds - message.seconds)


def needs_no_receive(send: Original, self: Any, rank: Any, lane: Any, *args: Any) -> bool:
    """As of a rendezvous."""
    lane.posted += 1
    return send(self, rank, lane, *args)  # type: ignore[no-any-return]


def steps_at_once(joined: Original, self: Any, *args: Any) -> float:
    return 0.0


def reduces_side_by_side(
    reduce: Original, self: Network[Any], ranks: Any, size: float, calls: int, now: float
) -> float:
    return now + self._cluster.all_reduce_seconds(ranks, size, calls)


def reduces_at_once(
    reduce: Original, self: Network[Any], ranks: Any, size: float, calls: int, now: float
) -> float:
    return reduce(self, ranks, size, 1, now)  # type: ignore[no-any-return]


SIMULATOR = simulator._Simulator
MUTANTS: list[tuple[Callable[..., Any], type, str, str]] = [
    (passes_its_first_port_twice, Cluster, "ports", "saturated_link"),
    (shares_nothing, Cluster, "ports", "shared_nic"),
    (half, Cluster, "ports", "full_duplex"),
    (forgets_latency, SIMULATOR, "_arrives", "asynchronous_links"),
    (receives_early, SIMULATOR, "_arrives", "asynchronous_links"),
    (needs_no_receive, SIMULATOR, "_send", "rendezvous"),
    (steps_at_once, SIMULATOR, "_joined", "ring"),
    (steps_at_once, SIMULATOR, "_joined", "norm"),
    (reduces_side_by_side, network.Network, "reduce", "overlapped_long_reductions"),
    (reduces_at_once, network.Network, "reduce", "one_reduction_a_tensor"),
]


@pytest.mark.parametrize(
    ("mutant", "owner", "name", "check"), MUTANTS, ids=[f"{m[0].__name__}-{m[3]}" for m in MUTANTS]
)
def test_a_wrong_simulator_is_told(
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[..., Any],
    owner: type,
    name: str,
    check: str,
) -> None:
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *args: mutant(original, self, *args))
    found, expected = CHECKS[check]()
    assert not math.isclose(found, expected)
