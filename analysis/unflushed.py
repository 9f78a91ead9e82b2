"""Schedules without a flush against 1F1B with one: how much of what they can gain is gained.

attained = (images/s of one ÷ of the other) ÷ (ratio of what their bounds allow), round by round
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.layout import Table, View, percent, with_interval
from analysis.records import Records
from analysis.rounds import ends, per_round, ratio_of, triple
from analysis.statistics import PerRound
from analysis.throughput import AGAIN, compare

__all__ = ["UNFLUSHED", "tables"]

UNFLUSHED = ("pipedream", "pipedream_2bw", "ashpipe")
FLUSHED = ("torch-1f1b", "dapple")
MEASURES = ("ratio", "ratio_of_bounds", "attained")
CAPTION = (
    "Median [95 % interval] over interleaved rounds, paired by round. Ratio: of images/s. Ratio of "
    "bounds: of the images/s that the two schedules allow, each with the work measured at its own "
    "unit size. Attained: the first ÷ the second; 1 is as much as the schedule promises."
)


def tables(records: Records) -> tuple[Table, ...]:
    """A table for each benchmark launch that measured both kinds."""
    found = []
    for comparison in compare(records):
        runs = records.runs[
            (records.runs["launch"] == comparison.launch)
            & (records.runs["source"] == comparison.source)
            & (records.runs["status"] == "ok")
        ]
        rows = _rows(records, runs)
        if rows:
            heading = f"{comparison.name} ({comparison.launch})"
            if comparison.source:
                heading += f", reference record of {comparison.source}"
            floor = comparison.floor
            noise = f" A/A floor: ±{percent(floor.reach)} %." if floor else ""
            frame = pd.DataFrame(rows)
            view = View(f"Without a flush: {heading}", CAPTION + noise, _cells(frame))
            found.append(Table("unflushed", frame, (view,)))
    return tuple(found)


def _rows(records: Records, runs: pd.DataFrame) -> list[dict[str, Any]]:
    first = runs[~runs["label"].str.endswith(AGAIN)]
    ours = first[first["system"].isin(UNFLUSHED)]
    others = first[first["system"].isin(FLUSHED) & (first["stages"] > 1)]
    return [
        {
            "source": run["source"],
            "benchmark": run["launch"],
            "name": run["name"],
            "label": run["label"],
            "against": other["label"],
            "evidence": run["evidence"],
            **_measures(records, runs, one, two),
        }
        for one, run in ours.iterrows()
        for two, other in others[others["stages"] == run["stages"]].iterrows()
    ]


def _measures(records: Records, runs: pd.DataFrame, one: Any, two: Any) -> dict[str, Any]:
    speeds = [per_round(records, runs, run, "images_per_s") for run in (one, two)]
    bounds = [per_round(records, runs, run, "bound_images_per_s") for run in (one, two)]
    shares = [
        PerRound((speed.values / bound.values).dropna(), speed.evidence, speed.launch)
        for speed, bound in zip(speeds, bounds, strict=True)
    ]
    pairs = zip(MEASURES, (speeds, bounds, shares), strict=True)
    found: dict[str, Any] = {"rounds": len(speeds[0].values)}
    for name, (numerator, denominator) in pairs:
        found |= ends(name, ratio_of(numerator, denominator))
    return found


def _cells(frame: pd.DataFrame) -> pd.DataFrame:
    def shown(name: str) -> list[str]:
        middle, low, high = (frame[column] for column in triple(name))
        return [with_interval(*values, 3) for values in zip(middle, low, high, strict=True)]

    return pd.DataFrame(
        {
            "system": frame["label"],
            "against": frame["against"],
            "ratio": shown("ratio"),
            "ratio of bounds": shown("ratio_of_bounds"),
            "attained": shown("attained"),
            "rounds": frame["rounds"].astype(str),
            "evidence": frame["evidence"],
        }
    )
