"""Compute orders: what a stage computes, one after the other, before any communication.

s  stage, S  stages, M  units of a batch, K  forwards before the first backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from runtimes.schedule.action import Op
from runtimes.schedule.batches import Batches

__all__ = ["Compute", "Order", "flush", "forward_only", "one_flush", "warm_up"]


class Compute(NamedTuple):
    """A step of a compute order: F, B, REDUCE or STEP of a unit (or update) on a weight version."""

    op: Op
    unit: int
    version: int | None = None


#: (pipeline, stage, replica) → that replica's compute order over the whole segment.
Order = Callable[[int, int, int], Iterator[Compute]]


def warm_up(stage: int, stages: int, units: int, *, advance: int = 0) -> int:
    """K_s = min(S − s + a, M): forwards before the first backward, so also units in flight.

    a = 0 is 1F1B (DAPPLE's policy A), a ≥ M is GPipe's order (all forwards first), and between
    them lies AvgPipe's advance forward propagation; DAPPLE's policy B is a = S − s − 1.
    """
    return min(stages - stage + advance, units)


def one_flush(units: Sequence[int], forwards: int, version: int) -> Iterator[Compute]:
    """``forwards`` forwards, then one backward one forward in turn, then the backwards left."""
    for unit in units[:forwards]:
        yield Compute(Op.F, unit, version)
    for done, unit in enumerate(units):
        yield Compute(Op.B, unit, version)
        if forwards + done < len(units):
            yield Compute(Op.F, units[forwards + done], version)


def flush(batches: Batches, forwards: Callable[[int, int], int]) -> Order:
    """Every batch drains before its step: version of batch t = t.

    ``forwards(stage, units)`` is K of a batch with that many units.
    """

    def order(pipeline: int, stage: int, replica: int) -> Iterator[Compute]:
        for update in range(batches.updates):
            units = batches.units(pipeline, update)
            if units:
                yield from one_flush(units, forwards(stage, len(units)), update)
            yield Compute(Op.REDUCE, update, update)
            yield Compute(Op.STEP, update, update + 1)

    return order


def forward_only(batches: Batches) -> Order:
    """Evaluation: every unit forward once, on the latest weights."""

    def order(pipeline: int, stage: int, replica: int) -> Iterator[Compute]:
        for update in range(batches.updates):
            for unit in batches.units(pipeline, update):
                yield Compute(Op.F, unit, 0)

    return order
