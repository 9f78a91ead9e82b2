"""Predicted against measured: simulations beside the records of the very runs they were made of.

error = predicted ÷ found − 1, of the wall time of a benchmark's segment; found is the median of its
rounds.  Where the profile and the round both know what a fixed piece of work took at their time (a
CPU shared with others is not as fast from one hour to the next), the round's time is multiplied by
the profile's and divided by its own.  A row whose own spread (half-width of the median's 95 %
interval) is larger than the limit of its class is unresolved: it neither proves nor refutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.layout import Table, View, fixed, percent
from analysis.records import Records
from analysis.simulations import simulated_runs
from analysis.statistics import interval

__all__ = ["LIMITS", "predictions", "tables"]

#: Of the absolute error, by the evidence class of what was found: its median, and the worst.
LIMITS = {"measured": (0.05, 0.12), "emulated": (0.02, None)}
FOUND = ["found_seconds", "speed", "spread", "rounds"]
CAPTION = (
    "Seconds of the timed batches. Found: median of the rounds. Speed: of fixed work timed beside "
    "them, median, ÷ its speed when the model was profiled; found times are multiplied by it, "
    "round by round. Error: predicted ÷ found − 1. Spread: half-width of the 95 % interval of the "
    "found median, in percent of it; a row whose spread exceeds its class's limit is unresolved "
    "and counts for nothing. Simulations were written {order}."
)


def predictions(records: Records, results_dir: Path) -> pd.DataFrame:
    """A row for each simulated contender that has also run, at the links' whole bandwidth."""
    simulated = simulated_runs(results_dir)
    if simulated.empty:
        return pd.DataFrame()
    simulated = simulated.drop(columns=["source", "evidence"])
    runs = records.runs[records.runs["status"] == "ok"]
    runs = runs[["launch", "label", "source", "evidence", "began"]].reset_index()
    both = simulated.rename(columns={"run": "launch", "segment_seconds": "predicted_seconds"})
    both = both.merge(runs, on=["launch", "label"])
    found = [_found(records, run, at) for run, at in both[["run", "profile_reference_s"]].values]
    both = both.join(pd.DataFrame(found, both.index, FOUND)).dropna(subset="found_seconds")
    worst = both["evidence"].map({name: median for name, (median, _) in LIMITS.items()})
    return both.assign(
        error=both["predicted_seconds"] / both["found_seconds"] - 1,
        resolved=both["spread"] <= worst,
        before=both["written"] < both["began"],
    )


def _found(records: Records, run: int, profiled: float | None) -> tuple[float, float, float, int]:
    """:data:`FOUND` of a run; ``profiled``: what the reference took when its model was profiled."""
    rounds = records.rounds[records.rounds["run"] == run]
    speeds = pd.Series(1.0, rounds.index)
    if profiled is not None and not pd.isna(profiled) and rounds["reference_s"].notna().all():
        speeds = profiled / rounds["reference_s"]
    walls = rounds["wall_s"] * speeds
    if walls.empty:
        return float("nan"), float("nan"), float("nan"), 0
    return float(walls.median()), float(speeds.median()), _spread(walls), len(walls)


def _spread(walls: pd.Series[float]) -> float:
    low, high = interval(walls)
    return float((high - low) / 2 / walls.median())


def tables(records: Records, results_dir: Path) -> Sequence[Table]:
    found = predictions(records, results_dir)
    if found.empty:
        return ()
    order = "before the runs" if found["before"].all() else "not all before the runs"
    columns = [
        "name",
        "label",
        "system",
        "batch_size",
        "predicted_seconds",
        "found_seconds",
        "speed",
        "error",
        "spread",
        "rounds",
        "resolved",
        "before",
        "evidence",
    ]
    views = [View("Predicted against found", CAPTION.format(order=order), _cells(found))]
    views.append(View("Predicted against found, by class", "", _summary(found)))
    return (Table("predicted", found[columns], tuple(views)),)


def _cells(found: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "system": found["label"],
            "plan": found["name"],
            "batch": found["batch_size"].astype(str),
            "predicted (s)": [fixed(value, 4) for value in found["predicted_seconds"]],
            "found (s)": [fixed(value, 4) for value in found["found_seconds"]],
            "speed": [fixed(value, 3) for value in found["speed"]],
            "error (%)": [percent(value) for value in found["error"]],
            "spread (%)": [percent(value) for value in found["spread"]],
            "rounds": found["rounds"].astype(str),
            "evidence": found["evidence"],
            "status": ["resolved" if well else "unresolved" for well in found["resolved"]],
        }
    )


def _summary(found: pd.DataFrame) -> pd.DataFrame:
    """By evidence class of what was found: the errors of resolved rows beside their limits."""
    lines = []
    for name, rows in found.groupby("evidence"):
        middle, worst = LIMITS.get(str(name), (None, None))
        errors = rows.loc[rows["resolved"], "error"].abs()
        lines.append(
            {
                "evidence": str(name),
                "configurations": str(len(rows)),
                "resolved": str(len(errors)),
                "median |error| (%)": percent(errors.median()),
                "limit (%)": percent(middle),
                "worst |error| (%)": percent(errors.max()),
                "limit of the worst (%)": percent(worst),
            }
        )
    return pd.DataFrame(lines)
