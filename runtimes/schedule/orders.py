"""Compute orders: what a stage computes, one after the other, before any communication.

s  stage, S  stages, M  units of a batch, K  forwards before the first backward
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from runtimes.schedule.action import Op
from runtimes.schedule.batches import Batches

__all__ = [
    "Compute",
    "Order",
    "double_buffered",
    "flush",
    "forward_only",
    "one_forward_one_backward",
    "one_step_a_unit",
    "warm_up",
]


class Compute(NamedTuple):
    """A step of a compute order: F or B of a unit, REDUCE, NORM, STEP or AVERAGE of an update, on
    a weight version."""

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


def one_forward_one_backward(units: Sequence[int], forwards: int) -> Iterator[tuple[Op, int]]:
    """``forwards`` forwards, then one backward one forward in turn, then the backwards left."""
    for unit in units[:forwards]:
        yield Op.F, unit
    for done, unit in enumerate(units):
        yield Op.B, unit
        if forwards + done < len(units):
            yield Op.F, units[forwards + done]


def _close(update: int, version: int, *, norm: bool) -> Iterator[Compute]:
    """An update's gradients, made on ``version``, are complete."""
    yield Compute(Op.REDUCE, update, version)
    if norm:
        yield Compute(Op.NORM, update, version)


def flush(
    batches: Batches,
    forwards: Callable[[int, int], int],
    *,
    norm: bool = False,
    averaged: Callable[[int], bool] = lambda update: False,
) -> Order:
    """Every batch drains before its step: version of batch t = t, or as many as there were steps
    before, for a pipeline that has no sample of some batch, and so makes no step of it.

    ``forwards(stage, units)`` is K of a batch with that many units; ``norm``: clip by global norm;
    ``averaged(update)``: whether parallel pipelines are tied together after it.
    """

    def order(pipeline: int, stage: int, replica: int) -> Iterator[Compute]:
        version = 0
        for update in range(len(batches.sizes)):
            if units := batches.units_of_batch(pipeline, update):
                for op, unit in one_forward_one_backward(units, forwards(stage, len(units))):
                    yield Compute(op, unit, version)
                yield from _close(update, version, norm=norm)
                version += 1
                yield Compute(Op.STEP, update, version)
            if averaged(update):
                yield Compute(Op.AVERAGE, update, version)

    return order


def one_step_a_unit(
    batches: Batches,
    replicas: Sequence[int],
    warm_up: Callable[[int], int],
    version: Callable[[int, int], int],
) -> Order:
    """Asynchronous 1F1B: after every backward an update, and the pipeline is never flushed.

    ``warm_up(stage)`` forwards precede the first forward-backward pair; update i of a stage (a unit
    shared by its replicas, or a round of one unit for each) runs on ``version(stage, i)``.
    """

    def order(pipeline: int, stage: int, replica: int) -> Iterator[Compute]:
        copies = replicas[stage]
        updates = range(batches.updates(copies))
        in_flight = deque[int]()
        for op, update in one_forward_one_backward(updates, warm_up(stage) + 1):
            if op is Op.F:
                used = version(stage, update)
                in_flight.append(used)
            else:
                used = in_flight.popleft()
            unit = update * copies + replica if batches.rounds else update
            # A round at the end of a segment may have no unit for this replica, which still joins
            # the reduction.
            if unit < len(batches.sizes):
                yield Compute(op, unit, used)
            if op is Op.B:
                yield Compute(Op.REDUCE, update, used)
                yield Compute(Op.STEP, update, update + 1)

    return order


def double_buffered(batches: Batches, stages: int, *, carried: int, norm: bool = False) -> Order:
    """PipeDream-2BW: 1F1B over all micro-batches, those of batch t on version max(0, t − 1).

    ``carried`` is 1 if the segment begins with two versions, then numbered 0 and 1: batch t runs
    on version t.  A forward waits for the step that makes its version, so where a batch has fewer
    units than stages backwards go first.  With ``norm`` a step stands just before the first
    forward that needs its version, so that the sum over all stages has a batch's time to arrive.
    """

    def units(pipeline: int) -> Iterator[int]:
        for batch in range(len(batches.sizes)):
            yield from batches.units_of_batch(pipeline, batch)

    def version(unit: int) -> int:
        return max(0, batches.batch(unit) - 1 + carried)

    def order(pipeline: int, stage: int, replica: int) -> Iterator[Compute]:
        forwards, backwards = units(pipeline), units(pipeline)
        ahead, unit = next(forwards, None), next(backwards, None)
        in_flight = closed = stepped = 0
        while unit is not None:
            if (
                ahead is not None
                and in_flight < stages - stage
                and (version(ahead) <= carried + closed)
            ):
                while carried + stepped < version(ahead):
                    stepped += 1
                    yield Compute(Op.STEP, stepped - 1, carried + stepped)
                yield Compute(Op.F, ahead, version(ahead))
                in_flight, ahead = in_flight + 1, next(forwards, None)
                continue
            yield Compute(Op.B, unit, version(unit))
            in_flight, last, unit = in_flight - 1, unit, next(backwards, None)
            if unit is None or batches.batch(unit) != batches.batch(last):
                yield from _close(closed, version(last), norm=norm)
                closed += 1
            while stepped < closed and (not norm or unit is None):
                stepped += 1
                yield Compute(Op.STEP, stepped - 1, carried + stepped)

    return order


def forward_only(batches: Batches) -> Order:
    """Evaluation: every unit forward once, on the latest weights."""

    def order(pipeline: int, stage: int, replica: int) -> Iterator[Compute]:
        for batch in range(len(batches.sizes)):
            for unit in batches.units_of_batch(pipeline, batch):
                yield Compute(Op.F, unit, 0)

    return order
