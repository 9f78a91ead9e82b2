"""Values of a contender by round, and what is worked out from those of two in one launch."""

from __future__ import annotations

import math

import pandas as pd

from analysis.evidence import Evidence
from analysis.records import Records
from analysis.statistics import Estimate, PerRound, median, paired_ratios

__all__ = ["ends", "per_round", "ratio_of", "triple"]

ENDS = ("median", "low", "high")


def triple(name: str, unit: str = "") -> list[str]:
    """Names of the columns that hold an estimate."""
    return [f"{name}_{end}{unit}" for end in ENDS]


def per_round(records: Records, runs: pd.DataFrame, run: int, value: str) -> PerRound:
    """A column of ``records.rounds`` for one contender of ``runs``, without rounds that lack it."""
    rounds = records.rounds[records.rounds["run"] == run].set_index("round")
    evidence = Evidence.parse(str(runs.at[run, "evidence"]))
    return PerRound(rounds[value].dropna(), evidence, str(runs.at[run, "launch"]))


def ratio_of(numerator: PerRound, denominator: PerRound) -> Estimate | None:
    """Median of the ratios in the rounds that both have; None if there is none."""
    shared = numerator.values.index.intersection(denominator.values.index)
    return None if shared.empty else median(paired_ratios(numerator, denominator))


def ends(name: str, estimate: Estimate | None, unit: str = "") -> dict[str, float]:
    """An estimate under the names of :func:`triple`; NaN without one."""
    values = (estimate.median, estimate.low, estimate.high) if estimate else [math.nan] * 3
    return dict(zip(triple(name, unit), values, strict=True))
