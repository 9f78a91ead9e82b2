"""A link's latency and bandwidth from the times of messages of several sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["LineFit", "fit_line"]

_ROUNDS, _LEAST_RESIDUAL = 50, 1e-4


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
    """The line with the least sum of absolute relative errors, so that neither long messages nor
    a single bad time outweigh the others: least squares, weighted anew by their own residuals.

    ValueError without two sizes, or where longer messages do not take longer.
    """
    if len(seconds) < 2:
        raise ValueError(f"a line needs times of two sizes or more, not of {len(seconds)}")
    sizes, times = np.array(list(seconds), dtype=float), np.array(list(seconds.values()))
    weights = 1 / times**2
    latency = slope = 0.0
    for _ in range(_ROUNDS):
        mean = np.average(sizes, weights=weights)
        spread = np.average((sizes - mean) ** 2, weights=weights)
        middle = np.average(times, weights=weights)
        slope = float(np.average((sizes - mean) * (times - middle), weights=weights) / spread)
        latency = float(middle - slope * mean)
        if latency < 0:  # No message is there before it is sent.
            latency = 0.0
            slope = float(np.average(sizes * times, weights=weights))
            slope /= float(np.average(sizes**2, weights=weights))
        residuals = np.abs((latency + slope * sizes) / times - 1)
        weights = 1 / times**2 / np.maximum(residuals, _LEAST_RESIDUAL)
    if not (slope > 0 and math.isfinite(slope)):
        raise ValueError(
            "longer messages took no longer than short ones, so they have no bandwidth: measure "
            "again, with longer ones or more repeats"
        )
    errors = (latency + slope * sizes) / times - 1
    return LineFit(
        latency, 1 / slope, {int(s): float(e) for s, e in zip(sizes, errors, strict=True)}
    )
