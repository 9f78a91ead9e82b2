"""Clocks that stand still until somebody sleeps: what a run over processes takes is then exact.

Messages and reductions of a cluster carry times from rank to rank, so that each rank's clock is
where the run's events put it.
"""

from __future__ import annotations

from runtimes.emulation.device import Device

__all__ = ["Clock", "device_at"]


class Clock:
    """Nanoseconds; a sleep ends ``overshoot`` late, work and being blocked take what is asked."""

    def __init__(self, overshoot: int = 0):
        self.time, self.thread, self.overshoot = 1, 0, overshoot
        self.sleeps = 0

    def now(self) -> int:
        return self.time

    def on_core(self) -> int:
        return self.thread

    def sleep_until(self, deadline: int) -> None:
        self.time = max(self.time, deadline) + self.overshoot
        self.sleeps += 1

    def work(self, nanoseconds: int) -> None:
        self.time += nanoseconds
        self.thread += nanoseconds

    def block(self, nanoseconds: int) -> None:
        self.time += nanoseconds


def device_at(clock: Clock, kind: type[Device] = Device, *, linked: bool = False) -> Device:
    return kind(clock.now, clock.on_core, clock.sleep_until, linked=linked)
