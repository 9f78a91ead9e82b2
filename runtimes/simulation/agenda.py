"""What is to happen, in the order of time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

__all__ = ["Agenda"]

Subject = TypeVar("Subject")


class Agenda:
    """Of equal times, what was planned first happens first: so a simulation repeats exactly."""

    def __init__(self) -> None:
        self._planned: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self._numbers = count()

    def at(self, time: float, happen: Callable[[Subject, float], None], subject: Subject) -> None:
        """Call ``happen(subject, time)`` when the time has come."""
        heappush(self._planned, (time, next(self._numbers), happen, subject))

    def run(self) -> None:
        """Until nothing is left to happen.

        Millions of objects come and go meanwhile, none of them in cycles: Python's search for such
        would take up to a tenth of the time and find nothing.
        """
        planned, collecting = self._planned, gc.isenabled()
        gc.disable()
        try:
            while planned:
                time, _, happen, subject = heappop(planned)
                happen(subject, time)
        finally:
            if collecting:
                gc.enable()
