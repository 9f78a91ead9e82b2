"""A device that takes its time and does nothing: waits that neither drift nor add up.

A wait ends a little late, by what the kernel takes to wake a thread.  Uncorrected, that would be
added to every wait.  So the rank has a *virtual time*, in which every wait has ended when it should
have: a computation begins at the virtual time, and so its deadline makes up for what the wait
before overshot.

v  the virtual time at the last wait's end     r  the real time then
now = t − max(0, (r − v) − blocked)            t  the real time, blocked: of t − r, not on a core

What a rank slept or was kept from its core in between would have hidden the overshoot; it earns no
credit, so a rank is never ahead of what the device allows.

Where links are emulated too (``linked``) all that a rank waits for has a known time, and it goes on
from that, or from when it began to wait, however late a message really came and woke it.  In
between only what its own thread computes takes time,

now = v + CPU time since

so that a rank which other ranks keep from a core is late, but not slow: it catches up.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from time import perf_counter_ns, thread_time_ns
from typing import Any

__all__ = ["Device", "sharp_timers"]

#: A wait that is due sooner is left to the next layer's of the same computation.
_JOINED_NS = 200_000
_PR_SET_TIMERSLACK = 29


def sharp_timers() -> None:
    """Let this thread's sleeps end when they should, not up to 50 µs later, where the kernel
    (Linux) can be told."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    except (OSError, AttributeError):
        return


def _sleep_until(deadline: int) -> None:
    time.sleep(max(0, deadline - perf_counter_ns()) / 1e9)


class Device:
    """Of one rank, and of its main thread.  Times are nanoseconds of perf_counter.

    A computation is :meth:`begin`, then a :meth:`spend` for each layer, each followed by a
    :meth:`wait`.  What the runtime does in between is part of the layers' time, as the launch of
    a kernel is of an accelerator's; what it does between computations is not.
    """

    def __init__(
        self,
        clock: Callable[[], int] = perf_counter_ns,
        thread_clock: Callable[[], int] = thread_time_ns,
        sleep_until: Callable[[int], None] = _sleep_until,
        *,
        linked: bool = False,
    ):
        self._linked = linked
        self._clock, self._thread_clock, self._sleep_until = clock, thread_clock, sleep_until
        self._virtual = self._real = clock()
        self._thread = thread_clock()
        self._owed = 0
        #: Nanoseconds waited for computations, without what waits overshot.
        self.waited = 0
        #: Number of waits, and nanoseconds by which they ended late.
        self.waits = self.late = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Device:
        """Copies of a layer are of the same device."""
        return self

    def _behind(self, real: int) -> int:
        """By how much the virtual time is behind."""
        late = self._real - self._virtual
        if late <= 0:
            return 0
        blocked = real - self._real - self._since()
        return max(0, late - max(0, blocked))

    def _since(self) -> int:
        """What the thread has computed since the last wait's end."""
        return self._thread_clock() - self._thread

    def now(self) -> int:
        """The virtual time."""
        return self._virtual + self._since() if self._linked else self.met()

    def met(self) -> int:
        """The virtual time after a wait for others that is of no known time."""
        real = self._clock()
        return real - self._behind(real)

    def resume(self) -> None:
        """A program begins: whatever was before it is nothing to catch up with."""
        real = self._clock()
        self._settle(real, real)

    def busy_ns(self) -> int:
        """CPU time of the thread, and what it has waited for computations."""
        return self._thread_clock() + self.waited

    def begin(self) -> None:
        """A computation begins."""
        self._settle(self.now(), self._clock())

    def spend(self, seconds: float) -> None:
        """The computation goes on for so long."""
        self._owed += round(seconds * 1e9)

    def wait(self, *, last: bool = True) -> None:
        """Until what was spent is over; unless it is the computation's last, a short wait is left
        to the next."""
        real = self._clock()
        taken = self._since() if self._linked else real - self._real
        end = self._virtual + max(self._owed, taken)
        if not last and end - real < _JOINED_NS:
            return
        if end > real:
            self.waited += end - real
            real = self._sleep(end)
        self._settle(end, real)

    def sleep_until(self, deadline: int, since: int) -> None:
        """Until something has arrived that was waited for from the virtual time ``since`` on; no
        computation."""
        end, real = max(deadline, since), self._clock()
        if end > real:
            real = self._sleep(end)
        self._settle(end, real)

    def rest(self, arrival: Callable[[float], bool], seconds: float, due: int | None) -> None:
        """Until ``due``, which has not come yet, or until something arrives before, but for
        ``seconds`` at most.  ``arrival`` sleeps so long and says whether something has."""
        real = self._clock()
        if due is None or due > real:
            if arrival(seconds if due is None else min(seconds, (due - real) / 1e9)) or due is None:
                return
            real = self._clock()
            self.waits += 1
            self.late += real - due
        if due <= real:
            self._settle(due, real)

    def _sleep(self, deadline: int) -> int:
        self._sleep_until(deadline)
        real = self._clock()
        self.waits += 1
        self.late += real - deadline
        return real

    def _settle(self, virtual: int, real: int) -> None:
        """At ``real``, it is ``virtual``."""
        self._virtual, self._real, self._thread = virtual, real, self._thread_clock()
        self._owed = 0
