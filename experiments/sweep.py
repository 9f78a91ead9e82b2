"""A sweep: one config that stands for a run at every point of a grid of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

__all__ = ["Axes", "Point", "axes_of", "point_text", "points"]

#: The values that each dotted key takes in turn.
Axes = Mapping[str, tuple[Any, ...]]
#: One value of each axis.
Point = Mapping[str, Any]


def axes_of(tables: Any, above: str = "") -> dict[str, tuple[Any, ...]]:
    """The axes of a ``[sweep]``, which repeats the sections of the config, with a list of values
    where the config has a value: ``train.optimizer.lr = [0.01, 0.1]``.

    Raises ValueError for a list that is missing, empty, or repeats a value.
    """
    if isinstance(tables, Mapping):
        axes: dict[str, tuple[Any, ...]] = {}
        for key, below in tables.items():
            axes |= axes_of(below, f"{above}.{key}" if above else str(key))
        if not axes:
            raise ValueError(f"{above or 'it'} names no key with values to take in turn")
        return axes
    if not above or not isinstance(tables, Sequence) or isinstance(tables, str):
        example = f"{above or 'train.optimizer.lr'} = [0.01, 0.1]"
        raise ValueError(f"{above or 'it'} is {tables!r}, but must list values, as in {example}")
    if not tables:
        raise ValueError(f"{above} has no values: list one or more")
    values = tuple(tables)
    if any(value in values[:place] for place, value in enumerate(values)):
        raise ValueError(f"{above} repeats a value in {list(values)}")
    return {above: values}


def points(axes: Axes) -> list[Point]:
    """All combinations, the last axis changing fastest."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def point_text(point: Point) -> str:
    """E.g. "stages=8 lr=0.1": keys by their last part, where that tells them apart."""
    ends = [key.rpartition(".")[2] for key in point]
    short = {
        key: end if ends.count(end) == 1 else key for key, end in zip(point, ends, strict=True)
    }
    return " ".join(f"{short[key]}={value}" for key, value in point.items())
