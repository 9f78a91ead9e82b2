"""Where the wall time went: the parts are what they say, and add up."""

from __future__ import annotations

import pytest

from runtimes.execution.trace import PARTS, Clocked, Trace, breakdown
from runtimes.plan import Plan
from runtimes.schedule import parse

PLAN = Plan.even(2, 2)


def trace(wall: int, *clocked: tuple[str, int, int, int, int]) -> Trace:
    items = [Clocked(parse(text), a, b, cpu, waited) for text, a, b, cpu, waited in clocked]
    return Trace(0, wall, items)


SENDER = trace(
    100_000,
    ("p0.s0.r0.F0@0", 0, 10_000, 9_000, 0),
    ("p0.s0.r0.SEND_ACT0>r0[0:4]@0", 10_000, 11_000, 0, 0),
    ("p0.s0.r0.REDUCE0/0@0", 20_000, 22_000, 0, 0),
    ("p0.s0.r0.STEP0@1", 30_000, 40_000, 0, 4_000),
)
RECEIVER = trace(
    100_000,
    ("p0.s1.r0.RECV_ACT0<r0[0:4]@0", 2_000, 15_000, 0, 0),
    ("p0.s1.r0.B0@0", 15_000, 20_000, 7_000, 0),
)


def test_waits_are_idle_until_the_sender_had_it_and_communication_after() -> None:
    parts = breakdown(RECEIVER, SENDER.sent(PLAN), PLAN)
    assert parts["idle"] == pytest.approx(8e-6)
    assert parts["communication"] == pytest.approx(5e-6)
    assert parts["compute"] == pytest.approx(5e-6), "CPU time beyond the wall is clock noise"
    assert parts["interference"] == 0


def test_computation_is_split_into_own_time_and_interference() -> None:
    parts = breakdown(SENDER, {}, PLAN)
    assert parts["compute"] == pytest.approx(9e-6)
    assert parts["interference"] == pytest.approx(1e-6)
    assert parts["reduce"] == pytest.approx(6e-6)
    assert parts["optimizer"] == pytest.approx(6e-6)
    assert parts["communication"] == pytest.approx(1e-6)
    assert parts["overhead"] == pytest.approx(100e-6 - 23e-6)


@pytest.mark.parametrize("record", [SENDER, RECEIVER])
def test_the_parts_add_up_to_the_wall(record: Trace) -> None:
    parts = breakdown(record, SENDER.sent(PLAN), PLAN)
    assert set(parts) == {*PARTS, "wall"}
    assert sum(parts[name] for name in PARTS) == pytest.approx(parts["wall"])


@pytest.mark.parametrize(("ready", "idle"), [(-5_000, 0.0), (99_000, 13e-6)])
def test_a_message_ready_before_or_after_the_wait(ready: int, idle: float) -> None:
    key = next(iter(SENDER.sent(PLAN)))
    parts = breakdown(RECEIVER, {key: ready}, PLAN)
    assert parts["idle"] == pytest.approx(idle)
    assert parts["communication"] == pytest.approx(13e-6 - idle)


def test_clocks_of_other_hosts_are_shifted_to_ours() -> None:
    key = next(iter(SENDER.sent(PLAN)))
    parts = breakdown(RECEIVER, {key: 1_000_010_000}, PLAN, [-1_000_000_000, 0])
    assert parts["idle"] == pytest.approx(8e-6)
