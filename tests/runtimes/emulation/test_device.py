"""Waits neither drift nor add up, and a rank is never ahead of its device."""

from __future__ import annotations

import copy

import pytest

from runtimes.emulation.device import Device
from tests.runtimes.emulation.clocks import Clock, device_at

MS, US = 1_000_000, 1_000
LATE = 60 * US


class Uncorrected(Device):
    def _behind(self, real: int) -> int:
        return 0


class Greedy(Device):
    """Credits what would have been idle time."""

    def _behind(self, real: int) -> int:
        return max(0, self._real - self._virtual)


def computes(device: Device, *seconds: float) -> None:
    device.begin()
    for number, layer in enumerate(seconds, 1):
        device.spend(layer)
        device.wait(last=number == len(seconds))


@pytest.mark.parametrize("layers", [(1e-3,), (0.5e-3, 0.5e-3), (0.7e-3, 0.15e-3, 0.15e-3)])
def test_what_one_wait_overshoots_the_next_makes_up_for(layers: tuple[float, ...]) -> None:
    def drift(kind: type[Device]) -> int:
        clock = Clock(LATE)
        device = device_at(clock, kind)
        begin = clock.time
        for _ in range(50):
            computes(device, *layers)
        return clock.time - begin - 50 * MS

    assert drift(Device) == LATE
    assert drift(Uncorrected) >= 50 * LATE


def test_waits_shorter_than_the_credit_keep_the_rest() -> None:
    clock = Clock(LATE)
    device = device_at(clock)
    begin = clock.time
    for _ in range(1000):
        computes(device, 10e-6)
    assert clock.time - begin - 1000 * 10 * US <= LATE
    assert clock.sleeps <= 1000 * 10 // 60 + 1


def test_no_credit_for_what_waiting_for_others_would_have_hidden() -> None:
    def took(kind: type[Device], blocked: int) -> int:
        clock = Clock(LATE)
        device = device_at(clock, kind)
        computes(device, 1e-3)
        clock.block(blocked)
        begin = clock.time
        computes(device, 1e-3)
        return clock.time - begin - LATE

    assert took(Device, 5 * MS) == MS
    assert took(Device, 20 * US) == MS - LATE + 20 * US
    assert took(Greedy, 5 * MS) == MS - LATE


def test_work_inside_a_computation_is_part_of_it_and_work_between_is_not() -> None:
    clock = Clock()
    device = device_at(clock)
    begin = clock.time
    for _ in range(10):
        device.begin()
        for last in (False, True):
            clock.work(30 * US)
            device.spend(1e-3)
            device.wait(last=last)
        clock.work(40 * US)
    assert clock.time - begin == 10 * (2 * MS + 40 * US)


def test_work_that_takes_longer_than_the_layer_is_no_credit() -> None:
    clock = Clock()
    device = device_at(clock)
    device.begin()
    device.spend(10e-6)
    clock.work(500 * US)
    device.wait()
    assert clock.sleeps == 0
    begin = clock.time
    computes(device, 1e-3)
    assert clock.time - begin == MS


def test_short_waits_of_one_computation_are_joined() -> None:
    clock = Clock()
    begin = clock.time
    computes(device_at(clock), *[10e-6] * 15)
    assert (clock.time - begin, clock.sleeps) == (150 * US, 1)


def test_computing_is_the_wait_without_what_it_overshot() -> None:
    clock = Clock(LATE)
    device = device_at(clock)
    begin = device.busy_ns()
    device.begin()
    clock.work(100 * US)
    device.spend(1e-3)
    device.wait()
    assert device.busy_ns() - begin == MS
    assert (device.waits, device.late) == (1, LATE)


def test_a_message_that_was_waited_for_is_there_when_it_was_due() -> None:
    clock = Clock(LATE)
    device = device_at(clock)
    due = clock.time + MS
    device.sleep_until(due, device.now())
    assert device.now() == due
    computes(device, 1e-3)
    assert clock.time == due + MS + LATE
    # Not a computation.
    assert device.waited == MS - LATE


def test_a_message_that_came_while_the_wait_before_overshot() -> None:
    clock = Clock(LATE)
    device = device_at(clock)
    computes(device, 1e-3)
    since, due = device.now(), clock.time - LATE // 2
    device.sleep_until(due, since)
    assert clock.sleeps == 1
    assert device.now() == due
    device.sleep_until(due - LATE, device.now())
    assert device.now() == due


class Tardy(Device):
    """Takes a message that really came late for one that was due then."""

    def sleep_until(self, deadline: int, since: int) -> None:
        super().sleep_until(deadline, max(since, self.now()))


@pytest.mark.parametrize("kind", [Device, Tardy])
def test_a_message_that_really_came_late_is_there_when_it_was_due(kind: type[Device]) -> None:
    clock = Clock()
    device = device_at(clock, kind)
    since = device.now()
    due = since + MS
    clock.block(4 * MS)
    device.sleep_until(due, since)
    computes(device, 10e-3)
    assert (clock.time - since == 11 * MS) == (kind is Device)


def test_a_rank_does_not_go_on_before_it_began_to_wait() -> None:
    clock = Clock()
    device = device_at(clock)
    clock.work(5 * MS)
    since = device.now()
    clock.block(MS)
    device.sleep_until(since - 3 * MS, since)
    assert device.now() == since


class Jostled(Device):
    """Takes what other ranks kept it from its core for time of its own."""

    def now(self) -> int:
        return self.met()


@pytest.mark.parametrize("kind", [Device, Jostled])
def test_with_links_only_own_work_takes_time_between_waits(kind: type[Device]) -> None:
    clock = Clock(LATE)
    device = device_at(clock, kind, linked=True)
    device.resume()
    begin = clock.time
    for _ in range(20):
        computes(device, 1e-3)
        clock.work(40 * US)
        clock.block(300 * US)
    took = clock.time - begin - 20 * (MS + 40 * US) - LATE - 300 * US
    assert (took <= 0) == (kind is Device)


def test_with_links_a_core_that_others_use_makes_no_layer_longer() -> None:
    clock = Clock()
    device = device_at(clock, linked=True)
    device.resume()
    begin = clock.time
    for _ in range(10):
        device.begin()
        clock.work(30 * US)
        clock.block(2 * MS)
        device.spend(1e-3)
        device.wait()
        computes(device, 9e-3)
    assert clock.time - begin == 100 * MS


def test_a_program_that_begins_has_nothing_to_catch_up_with() -> None:
    clock = Clock()
    device = device_at(clock, linked=True)
    clock.block(50 * MS)
    device.resume()
    begin = clock.time
    computes(device, 1e-3)
    assert clock.time - begin == MS


def test_copies_of_a_layer_share_their_device() -> None:
    device = device_at(Clock())
    assert copy.deepcopy({"device": device})["device"] is device
