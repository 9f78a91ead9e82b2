"""A link's latency and bandwidth from the times of messages of several sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

__all__ = ["LineFit", "fit_line"]


@dataclass(frozen=True)
class LineFit:
    """t = ``latency_seconds`` + bytes / ``bandwidth_bytes_per_s``; ``errors``: (fitted − measured)
    ÷ measured, by bytes."""

    latency_seconds: float
    bandwidth_bytes_per_s: float
    errors: Mapping[int, float]

    @property
    def largest_error(self) -> float:
        return max(map(abs, self.errors.values()))


def fit_line(seconds: Mapping[int, float]) -> LineFit:
    """Of the lines through two of the points, or through one and the origin, the one with the
    least sum of |log(fitted ÷ measured)|: neither long messages nor one bad time outweigh others.

    A latency below 0 is none.  ValueError without two sizes, or if the longest message takes no
    longer than the shortest.
    """
    if len(seconds) < 2:
        raise ValueError(f"a line needs times of two sizes or more, not of {len(seconds)}")
    points = sorted(seconds.items())
    if points[-1][1] <= points[0][1]:
        raise ValueError(
            "the longest messages took no longer than the shortest, so they have no bandwidth: "
            "measure again, with longer ones or more repeats"
        )
    lines = [(0.0, size / time) for size, time in points]
    for (size, time), (longer, later) in combinations(points, 2):
        if later > time and time * longer >= later * size:
            bandwidth = (longer - size) / (later - time)
            lines.append((max(0.0, time - size / bandwidth), bandwidth))
    latency, bandwidth = min(lines, key=lambda line: _distance(line, points))
    errors = {size: (latency + size / bandwidth) / time - 1 for size, time in points}
    return LineFit(latency, bandwidth, errors)


def _distance(line: tuple[float, float], points: Sequence[tuple[int, float]]) -> float:
    latency, bandwidth = line
    return sum(abs(math.log((latency + size / bandwidth) / time)) for size, time in points)
