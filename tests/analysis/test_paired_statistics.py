"""Medians and their intervals, pairing by round, the noise floor, and verdicts."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from analysis.evidence import Evidence
from analysis.statistics import (
    Estimate,
    NoiseFloor,
    PerRound,
    Reading,
    median,
    noise_floor,
    paired_ratios,
    read,
    verdict,
)

MEASURED, SIMULATED = Evidence.MEASURED, Evidence.SIMULATED


def series(*values: float, evidence: Evidence = MEASURED, launch: str = "b") -> PerRound:
    return PerRound(pd.Series(values, dtype=float), evidence, launch)


def estimate(center: float, low: float, high: float, count: int = 9) -> Estimate:
    return Estimate(center, low, high, count, MEASURED)


def floor(half_width: float, reach: float) -> NoiseFloor:
    return NoiseFloor(half_width, reach, 9, MEASURED)


# ---- the median and its interval -----------------------------------------------------------------


def test_median_of_nine_lies_between_the_second_and_eighth_value() -> None:
    found = median(series(9, 1, 8, 2, 100, 3, 7, 4, 6))
    assert found == Estimate(6, 2, 9, 9, MEASURED)


def test_median_of_an_even_count_is_the_mean_of_the_middle_two() -> None:
    assert median(series(1, 2, 4, 50)).median == 3


def test_five_values_have_no_interval_and_six_have_their_range() -> None:
    few = median(series(1, 2, 3, 4, 5))
    assert (few.low, few.high, few.bounded) == (-math.inf, math.inf, False)
    assert median(series(1, 2, 3, 4, 5, 6)) == Estimate(3.5, 1, 6, 6, MEASURED)


def interval_rank(count: int) -> int:
    """The largest k with P(Binomial(count, 1/2) < k) ≤ 0.025, in whole numbers: so many values
    lie at or below the interval's lower end, and so many at or above its upper end."""
    below = [sum(math.comb(count, i) for i in range(k)) for k in range(count)]
    return max(k for k, ways in enumerate(below) if 40 * ways <= 2**count)


def test_the_interval_ends_at_the_order_statistics_of_the_binomial() -> None:
    generator = np.random.default_rng(0)
    for count in range(6, 80):
        values = sorted(generator.normal(size=count))
        rank = interval_rank(count)
        found = median(series(*values))
        assert (found.low, found.high) == (values[rank - 1], values[-rank]), count


@pytest.mark.parametrize(("count", "coverage"), [(6, 0.96875), (9, 0.9609), (20, 0.9586)])
def test_the_interval_covers_the_median_as_often_as_computed(count: int, coverage: float) -> None:
    # Of 4000 draws the standard error is 0.003; log-normal, because times are skewed.
    draws = np.sort(np.random.default_rng(1).lognormal(size=(4000, count)), axis=1)
    rank = int(median(series(*range(1, count + 1))).low)
    inside = (draws[:, rank - 1] <= 1.0) & (draws[:, -rank] >= 1.0)
    assert inside.mean() == pytest.approx(coverage, abs=0.012)


def test_no_values_have_no_median() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        median(series())


# ---- pairs ---------------------------------------------------------------------------------------


def test_ratios_are_paired_by_round_and_not_by_size_or_place() -> None:
    ours = PerRound(pd.Series({3: 30.0, 1: 10.0, 2: 60.0}), MEASURED, "b")
    theirs = PerRound(pd.Series({1: 20.0, 2: 20.0, 4: 1.0, 3: 10.0}), MEASURED, "b")
    assert paired_ratios(ours, theirs).values.to_dict() == {1: 0.5, 2: 3.0, 3: 3.0}


def test_the_median_of_pairs_is_not_the_ratio_of_medians_nor_the_mean() -> None:
    ours, theirs = series(2, 9, 30), series(1, 3, 20)
    assert median(paired_ratios(ours, theirs)).median == 2  # medians: 9 ÷ 3; mean: 6.5 ÷ 3


def test_rounds_of_two_launches_are_not_paired() -> None:
    with pytest.raises(ValueError, match="launches b and c cannot be paired"):
        paired_ratios(series(1), series(1, launch="c"))


def test_pairs_do_not_cross_evidence_classes() -> None:
    with pytest.raises(ValueError, match="cannot mix measured and simulated"):
        paired_ratios(series(1), series(1, evidence=SIMULATED))


def test_no_common_round_is_an_error() -> None:
    with pytest.raises(ValueError, match="share no round"):
        paired_ratios(
            PerRound(pd.Series({1: 1.0}), MEASURED, "b"),
            PerRound(pd.Series({2: 1.0}), MEASURED, "b"),
        )


# ---- the noise floor -----------------------------------------------------------------------------

NOISE = (0.97, 1.0, 1.04, 0.98, 1.0, 1.05, 0.99, 1.01, 1.0)  # interval [0.98, 1.04]


def test_noise_floor_is_the_half_width_and_reach_of_the_pairs_interval() -> None:
    first = series(*[100.0 * (1 + index % 3) for index in range(9)])
    again = series(*[first.values[index] * ratio for index, ratio in enumerate(NOISE)])
    found = noise_floor(first, again)
    assert found.half_width == pytest.approx(0.03)
    assert found.reach == pytest.approx(0.04)
    assert (found.count, found.evidence) == (9, MEASURED)


def test_a_slow_minute_that_hits_both_halves_of_a_pair_is_no_noise() -> None:
    first = series(100, 50, 100, 50, 25, 100, 100)
    assert noise_floor(first, first).reach == 0


def test_noise_floor_needs_six_pairs() -> None:
    with pytest.raises(ValueError, match="5 A/A pairs .* at least 6"):
        noise_floor(series(1, 1, 1, 1, 1), series(1, 1, 1, 1, 1))


# ---- readings and verdicts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "reading"),
    [
        (estimate(1.06, 1.02, 1.08), Reading.FASTER),
        (estimate(0.94, 0.92, 0.98), Reading.SLOWER),
        (estimate(1.03, 1.02, 1.035), Reading.INDISTINGUISHABLE),  # inside the floor
        (estimate(0.97, 0.96, 0.98), Reading.INDISTINGUISHABLE),
        (estimate(1.06, 0.99, 1.08), Reading.INDISTINGUISHABLE),  # may be 1
    ],
)
def test_a_ratio_inside_the_floor_tells_nothing(ratio: Estimate, reading: Reading) -> None:
    assert read(ratio, floor(half_width=0.03, reach=0.04)) is reading


@pytest.mark.parametrize(
    ("ratio", "met", "reason"),
    [
        (estimate(1.25, 1.20, 1.30), True, "reach 1.2"),
        (estimate(1.20, 1.17, 1.30), True, "reach 1.2"),  # lower end exactly a half-width below
        (estimate(1.25, 1.165, 1.30), False, "lower end 1.165 is below 1.17"),
        (estimate(1.19, 1.19, 1.30), False, "median 1.19 is below the target 1.2"),
        (estimate(1.25, 1.20, 1.30, count=8), False, "8 pairs, but at least 9"),
    ],
)
def test_verdict_on_a_target_of_1_2(ratio: Estimate, met: bool, reason: str) -> None:
    found = verdict(ratio, 1.2, floor(half_width=0.03 + 1e-12, reach=0.04))
    assert found.met is met
    assert reason in found.reason


def test_verdicts_do_not_cross_evidence_classes() -> None:
    simulated = NoiseFloor(0.03, 0.04, 9, SIMULATED)
    for decide in (lambda r, f: read(r, f), lambda r, f: verdict(r, 1.2, f)):
        with pytest.raises(ValueError, match="cannot mix"):
            decide(estimate(1.25, 1.2, 1.3), simulated)
