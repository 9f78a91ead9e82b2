"""Statistics of interleaved measurements: medians, paired ratios, noise floor, verdicts.

The interval of a median is the exact order-statistic one: with n values drawn independently from
one continuous distribution, the number of them below its median is Binomial(n, 1/2), so the k-th
smallest and the k-th largest value enclose the median with probability
1 − 2·P(Binomial(n, 1/2) < k), whatever the distribution (Conover, Practical Nonparametric
Statistics, section 3.2).  It was chosen over the bootstrap because it is never narrower than
promised at the 9 rounds of a usual benchmark, where a bootstrapped median is, because one outlier
on either side does not move it there, and because it needs no random numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from analysis.evidence import Evidence, same_class

__all__ = [
    "MINIMUM_PAIRS",
    "MINIMUM_ROUNDS",
    "Estimate",
    "NoiseFloor",
    "Reading",
    "Series",
    "Spread",
    "Verdict",
    "median",
    "noise_floor",
    "paired_ratios",
    "read",
    "spread",
    "verdict",
]

CONFIDENCE = 0.95
MINIMUM_ROUNDS = 6
"""Fewer values have no 95 % interval of the median: even their whole range covers less."""
MINIMUM_PAIRS = 9
"""Fewer paired ratios decide nothing about a target."""


@dataclass(frozen=True)
class Series:
    """One value a bench round, of one launch: rounds of different launches share no weather and
    are never paired."""

    values: Mapping[int, float]
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


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (n − 1; nan for one value), and extremes."""

    mean: float
    deviation: float
    low: float
    high: float
    count: int


def interval_rank(count: int) -> int:
    """k such that the k-th smallest and k-th largest of ``count`` values enclose the median with
    95 % confidence; 0 if no k does.  k is the largest with P(Binomial(n, 1/2) < k) ≤ 0.025."""
    tail, rank = 0.0, 0
    for below in range(count // 2):
        tail += math.comb(count, below) / 2**count
        if tail > (1 - CONFIDENCE) / 2:
            break
        rank = below + 1
    return rank


def median(series: Series) -> Estimate:
    """The median over rounds with its exact 95 % interval.

    Raises:
        ValueError: the series has no values.
    """
    if not series.values:
        raise ValueError(
            "the median of no rounds is undefined: at least one round must be recorded"
        )
    ordered = sorted(series.values.values())
    rank = interval_rank(len(ordered))
    low, high = (ordered[rank - 1], ordered[-rank]) if rank else (-math.inf, math.inf)
    return Estimate(statistics.median(ordered), low, high, len(ordered), series.evidence)


def paired_ratios(numerator: Series, denominator: Series) -> Series:
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
    shared = sorted(numerator.values.keys() & denominator.values.keys())
    if not shared:
        raise ValueError(f"the two systems share no round of launch {numerator.launch}")
    ratios = {index: numerator.values[index] / denominator.values[index] for index in shared}
    return Series(ratios, evidence, numerator.launch)


def noise_floor(first: Series, again: Series) -> NoiseFloor:
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


def spread(values: Sequence[float]) -> Spread:
    """Mean, standard deviation and extremes over seeds.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("the mean of no seeds is undefined")
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(statistics.fmean(values), deviation, min(values), max(values), len(values))
