"""AvgPipe's parallel pipelines beside what else could train the same samples on the same devices.

N pipelines of M micro-batches each are set beside a flush schedule that cuts as many samples into
N · M micro-batches, which is the fair baseline (our reading), beside the same schedule on one
pipeline's batch after the other, and beside the fastest schedule without a flush.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.layout import Table, View, fixed, with_interval
from analysis.records import Records
from analysis.rounds import ends, per_round, ratio_of, triple
from analysis.simulations import simulated_by_run
from analysis.unflushed import UNFLUSHED

__all__ = ["parallel_pipelines", "tables"]

SYSTEM = "avgpipe"
BESIDE = ("dapple", "gpipe", "dapple_one", "unflushed")
CAPTION = (
    "Images/s, paired by round: median and 95 % interval. N · M: on as many samples in N · M "
    "micro-batches; one: on one pipeline's batch after the other; no flush: the fastest of "
    "{unflushed} on such batches. Simulated: measured ÷ simulated images/s of the same batches."
)


def parallel_pipelines(records: Records, results_dir: Path) -> pd.DataFrame:
    """A row for each contender of AvgPipe in a benchmark; NaN where a partner did not run."""
    runs = records.runs[(records.runs["kind"] == "bench") & (records.runs["status"] == "ok")]
    simulated = simulated_by_run(results_dir)
    predicted = {run: row["segment_seconds"] for run, row in simulated.items()}
    rows = [
        row
        for _, field in runs.groupby(["source", "launch"], sort=False)
        for row in _rows(records, field, predicted)
    ]
    return pd.DataFrame(rows)


def _rows(
    records: Records, field: pd.DataFrame, predicted: Mapping[tuple[str, str], float]
) -> Iterator[dict[str, Any]]:
    for index, run in field[field["system"] == SYSTEM].iterrows():
        pipelines, options = _told(run["config"], str(run["label"]))
        units, size = run["micro_batches"], run["batch_size"]
        share = size // pipelines
        beside = {
            "dapple": _find(field, "dapple", size, pipelines * units),
            "gpipe": _find(field, "gpipe", size, pipelines * units),
            "dapple_one": _find(field, "dapple", share, units),
            "unflushed": _fastest(records, field, share),
        }
        wall = records.rounds.loc[records.rounds["run"] == index, "wall_s"].median()
        yield {
            "source": run["source"],
            "benchmark": run["launch"],
            "name": run["name"],
            "label": run["label"],
            "stages": run["stages"],
            "micro_batches": units,
            "pipelines": pipelines,
            "advance": options.get("advance", 0),
            "averaging": options.get("averaging", "synchronous"),
            **_ratios(records, field, int(str(index)), beside),
            "measured_to_simulated": predicted.get((run["launch"], run["label"]), math.nan) / wall,
            "evidence": run["evidence"],
        }


def _told(config: Mapping[str, Any], label: str) -> tuple[int, Mapping[str, Any]]:
    """The number of pipelines of a contender, and its options."""
    entries = {entry["label"]: entry for entry in config["bench"]["contenders"]}
    entry = entries[label]
    plan = {**config.get("plan", {}), **entry.get("plan", {})}
    return plan.get("pipelines", 1), entry.get("options", {})


def _find(field: pd.DataFrame, system: str, size: int, units: int) -> int | None:
    same = (field["batch_size"] == size) & (field["micro_batches"] == units)
    found = field.index[(field["system"] == system) & same]
    return None if found.empty else int(found[0])


def _fastest(records: Records, field: pd.DataFrame, size: int) -> int | None:
    fitting = field[field["system"].isin(UNFLUSHED) & (field["batch_size"] == size)]
    rounds = records.rounds[records.rounds["run"].isin(fitting.index)]
    speeds = rounds.groupby("run")["images_per_s"].median()
    return None if speeds.empty else int(str(speeds.idxmax()))


def _ratios(
    records: Records, field: pd.DataFrame, run: int, beside: Mapping[str, int | None]
) -> dict[str, Any]:
    speed = per_round(records, field, run, "images_per_s")
    found: dict[str, Any] = {}
    for name, other in beside.items():
        ratio = (
            None
            if other is None
            else ratio_of(speed, per_round(records, field, other, "images_per_s"))
        )
        found |= ends(f"to_{name}", ratio)
    return found


def tables(records: Records, results_dir: Path) -> tuple[Table, ...]:
    """A table for each benchmark with AvgPipe in it."""
    found = parallel_pipelines(records, results_dir)
    if found.empty:
        return ()
    return tuple(
        Table("pipelines", rows, (View(f"Parallel pipelines: {name}", _caption(), _cells(rows)),))
        for (_, name), rows in found.groupby(["benchmark", "name"], sort=False)
    )


def _caption() -> str:
    return CAPTION.format(unflushed=", ".join(UNFLUSHED))


def _cells(rows: pd.DataFrame) -> pd.DataFrame:
    heads = ("÷ dapple N·M", "÷ gpipe N·M", "÷ dapple one", "÷ no flush")
    ratios = {
        head: [
            with_interval(middle, low, high, 3)
            for middle, low, high in rows[triple(f"to_{name}")].itertuples(index=False)
        ]
        for head, name in zip(heads, BESIDE, strict=True)
    }
    return pd.DataFrame(
        {
            "system": rows["label"],
            "N": rows["pipelines"].astype(str),
            "a": rows["advance"].astype(str),
            "averaging": rows["averaging"],
            **ratios,
            "÷ simulated": [fixed(value, 3) for value in rows["measured_to_simulated"]],
            "evidence": rows["evidence"],
        }
    )
