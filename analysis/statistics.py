"""Statistics of interleaved measurements: medians, paired ratios, noise floor, verdicts.

The interval of a median is the exact order-statistic one (Conover, Practical Nonparametric
Statistics, section 3.2), as scipy.stats.quantile_test computes it.  It was chosen over the
bootstrap because it is never narrower than promised at the 9 rounds of a usual benchmark, where a
bootstrapped median is, because one outlier on either side does not move it there, and because it
needs no random numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pandas as pd
from scipy.stats import quantile_test
from scipy.stats import t as student_t

from analysis.evidence import Evidence, same_class

__all__ = [
    "MINIMUM_PAIRS",
    "MINIMUM_ROUNDS",
    "Estimate",
    "NoiseFloor",
    "PerRound",
    "Reading",
    "Verdict",
    "interval",
    "mean_interval",
    "median",
    "noise_floor",
    "paired_ratios",
    "read",
    "verdict",
]

CONFIDENCE = 0.95
MINIMUM_ROUNDS = 6
"""Fewer values have no 95 % interval of the median: even their whole range covers less."""
MINIMUM_PAIRS = 9
"""Fewer paired ratios decide nothing about a target."""


@dataclass(frozen=True)
class PerRound:
    """One value a bench round (the index), of one launch: rounds of different launches share no
    weather and are never paired."""

    values: pd.Series[float]
    evidence: Evidence
    launch: str


@dataclass(frozen=True)
class Estimate:
    """A median of ``count`` values with the ends of its 95 % interval.

    Below :data:`MINIMUM_ROUNDS` values the interval is (−∞, ∞): nothing narrower is known.
    """

    median: float
    low: float
    high: float
    count: int
    evidence: Evidence

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True)
class NoiseFloor:
    """What this machine shows between two runs of the same system, from A/A pairs.

    ``half_width`` is half the 95 % interval of the paired ratios; ``reach`` is how far that
    interval extends from 1, and so also holds a bias of the position in a round.  Each use takes
    the one that is harder to pass: a speed-up must leave ``reach`` to be told apart, a target may
    be missed by no more than ``half_width``.
    """

    half_width: float
    reach: float
    count: int
    evidence: Evidence


@dataclass(frozen=True)
class Verdict:
    """Whether a target ratio is met, with the reason in words."""

    met: bool
    reason: str


class Reading(Enum):
    """What a paired ratio says of two systems on this machine."""

    FASTER = "faster"
    SLOWER = "slower"
    INDISTINGUISHABLE = "indistinguishable"


def interval(values: pd.Series[float]) -> tuple[float, float]:
    """The ends of the exact 95 % interval of the median; (−∞, ∞) for too few values."""
    found = quantile_test(values.to_numpy(), p=0.5).confidence_interval(CONFIDENCE)
    low, high = np.asarray(found).tolist()
    return (-math.inf, math.inf) if math.isnan(low) or math.isnan(high) else (low, high)


def mean_interval(values: pd.Series[float]) -> tuple[float, float, float]:
    """The mean, and the ends of its 95 % interval by Student's t: for few values, such as those of
    seeds, of which the median has no interval.  NaN for no values; (−∞, ∞) for one."""
    if len(values) < 2:
        return (float(values.mean()), -math.inf, math.inf) if len(values) else (math.nan,) * 3
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))
    reach = float(student_t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    return mean, mean - reach, mean + reach


def median(series: PerRound) -> Estimate:
    """The median over rounds with its exact 95 % interval.

    Raises:
        ValueError: the series has no values.
    """
    if series.values.empty:
        raise ValueError(
            "the median of no rounds is undefined: at least one round must be recorded"
        )
    low, high = interval(series.values)
    return Estimate(float(series.values.median()), low, high, len(series.values), series.evidence)


def paired_ratios(numerator: PerRound, denominator: PerRound) -> PerRound:
    """``numerator`` ÷ ``denominator`` round by round, over the rounds that both have.

    A slow minute of the machine slows both halves of a pair and cancels; the ratio of two
    medians would keep it.

    Raises:
        ValueError: different launches or evidence classes, or no round in common.
    """
    evidence = same_class(numerator.evidence, denominator.evidence)
    if numerator.launch != denominator.launch:
        raise ValueError(
            f"rounds of launches {numerator.launch} and {denominator.launch} cannot be paired: "
            "measure both systems in one benchmark"
        )
    ratios = numerator.values.div(denominator.values).dropna()
    if ratios.empty:
        raise ValueError(f"the two systems share no round of launch {numerator.launch}")
    return PerRound(ratios, evidence, numerator.launch)


def noise_floor(first: PerRound, again: PerRound) -> NoiseFloor:
    """The A/A floor from one system that was measured twice under two labels in one launch.

    Raises:
        ValueError: as :func:`paired_ratios`, or fewer than :data:`MINIMUM_ROUNDS` pairs.
    """
    estimate = median(paired_ratios(again, first))
    if not estimate.bounded:
        raise ValueError(
            f"{estimate.count} A/A pairs have no 95 % interval: "
            f"at least {MINIMUM_ROUNDS} rounds are needed"
        )
    return NoiseFloor(
        half_width=(estimate.high - estimate.low) / 2,
        reach=max(estimate.high - 1, 1 - estimate.low),
        count=estimate.count,
        evidence=estimate.evidence,
    )


def read(ratio: Estimate, floor: NoiseFloor) -> Reading:
    """Which of two systems is faster, given the ratio of their throughputs: neither, if the median
    is inside the A/A floor or the interval holds 1."""
    same_class(ratio.evidence, floor.evidence)
    if abs(ratio.median - 1) <= floor.reach or ratio.low <= 1 <= ratio.high:
        return Reading.INDISTINGUISHABLE
    return Reading.FASTER if ratio.median > 1 else Reading.SLOWER


def verdict(ratio: Estimate, target: float, floor: NoiseFloor) -> Verdict:
    """Whether the paired ratio reaches ``target``.

    Met when the median of at least :data:`MINIMUM_PAIRS` pairs reaches the target and the
    interval's lower end is no further below it than the A/A floor.
    """
    same_class(ratio.evidence, floor.evidence)
    allowed = target - floor.half_width
    if ratio.count < MINIMUM_PAIRS:
        return Verdict(False, f"{ratio.count} pairs, but at least {MINIMUM_PAIRS} are needed")
    if ratio.median < target:
        return Verdict(False, f"median {ratio.median:.4g} is below the target {target:.4g}")
    if ratio.low < allowed:
        return Verdict(
            False,
            f"lower end {ratio.low:.4g} is below {allowed:.4g}, the target {target:.4g} less the "
            f"A/A floor {floor.half_width:.4g}",
        )
    return Verdict(
        True, f"median {ratio.median:.4g} and lower end {ratio.low:.4g} reach {target:.4g}"
    )
