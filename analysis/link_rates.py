"""One system ÷ another over the rate of a link: emulated, simulated, and where a paper's is met.

What decides is no rate but two numbers without a dimension, which stand beside it: an all-reduce ÷
the computation of a batch, and the transfer of a unit's activations ÷ a stage's computation of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.evidence import Evidence, Quantity, ratio
from analysis.layout import ABSENT, Table, View, fixed, with_interval
from analysis.records import Records
from analysis.rounds import per_round, ratio_of
from analysis.simulations import simulated_by_run

__all__ = ["crossing", "link_rates", "tables"]

CAPTION = (
    "Images/s, paired by round: median and 95 % interval, and simulated. Links: the share of the "
    "cluster's bandwidth that they reach. All-reduce ÷ compute: of a batch, of the system that is "
    "divided by; transfer ÷ stage: of a unit's activations to a stage's computation, of the other."
)
#: What has to be the same for benchmarks to differ in nothing but their links.
SAME = ["cluster", "model", "batch_size", "evidence"]


def link_rates(records: Records, results_dir: Path) -> pd.DataFrame:
    """A row for each pair of contenders, of systems that the config's paper compares, of each
    benchmark on a cluster: ``ratio`` of images/s with its interval, ``simulated`` of the same."""
    runs = records.runs[(records.runs["kind"] == "bench") & (records.runs["status"] == "ok")]
    known = simulated_by_run(results_dir)
    rows = [
        row
        for launch, field in runs.groupby("launch", sort=False)
        for row in _rows(records, str(launch), field, known)
    ]
    return pd.DataFrame(rows)


def _rows(
    records: Records, launch: str, field: pd.DataFrame, known: dict[tuple[str, str], Any]
) -> Iterator[dict[str, Any]]:
    config = field["config"].iloc[0]
    where, paper = config.get("launch", {}), config.get("paper")
    if where.get("cluster") is None or paper is None:
        return
    above, below = (field[field["system"] == paper[key]] for key in ("of", "over"))
    for one, other in product(above.index, below.index):
        labels = str(field.at[one, "label"]), str(field.at[other, "label"])
        speeds = [per_round(records, field, run, "images_per_s") for run in (one, other)]
        found = ratio_of(*speeds)
        if found is None:
            continue
        simulated = [known.get((launch, label)) for label in labels]
        yield {
            "name": field.at[one, "name"],
            "cluster": where["cluster"],
            "model": config["model"]["name"],
            "batch_size": field.at[one, "batch_size"],
            "evidence": field.at[one, "evidence"],
            "bandwidth_share": where.get("bandwidth_share") or 1.0,
            "pair": " ÷ ".join(labels),
            "ratio": found.median,
            "low": found.low,
            "high": found.high,
            **_beside(*simulated),
            "paper_ratio": paper["ratio"],
        }


def _beside(one: Any, other: Any) -> dict[str, float]:
    """Of the same batches as were timed: what is simulated of both."""
    if one is None or other is None:
        return dict.fromkeys(("simulated", "all_reduce_to_compute", "transfer_to_stage"), math.nan)
    speeds = [Quantity(1 / row["segment_seconds"], Evidence.SIMULATED) for row in (one, other)]
    return {
        "simulated": ratio(*speeds).value,
        "all_reduce_to_compute": other["all_reduce_to_compute"],
        "transfer_to_stage": one["transfer_to_stage"],
    }


def crossing(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """Where y passes ``level`` between two neighbours of (x, y), on a line in log x and log y; None
    if it does not."""
    for (left, below), (right, above) in pairwise(sorted(points)):
        if min(below, above) <= level <= max(below, above) and below != above:
            part = math.log(level / below) / math.log(above / below)
            return math.exp(math.log(left) + part * math.log(right / left))
    return None


def tables(records: Records, results_dir: Path) -> Sequence[Table]:
    found = link_rates(records, results_dir)
    if found.empty:
        return ()
    views = [
        _view(rows.sort_values(["pair", "bandwidth_share"], ascending=[True, False]))
        for _, rows in found.groupby(SAME, sort=False)
        if rows["bandwidth_share"].nunique() > 1
    ]
    return (Table("link_rates", found, tuple(views)),) if views else ()


def _view(rows: pd.DataFrame) -> View:
    cells = pd.DataFrame(
        {
            "system": rows["pair"],
            "links": [f"{share:.3g}×" for share in rows["bandwidth_share"]],
            "ratio": [
                with_interval(*ends, 3)
                for ends in zip(rows["ratio"], rows["low"], rows["high"], strict=True)
            ],
            "simulated": [fixed(value, 3) for value in rows["simulated"]],
            "all-reduce ÷ compute": [fixed(value, 3) for value in rows["all_reduce_to_compute"]],
            "transfer ÷ stage": [fixed(value, 4) for value in rows["transfer_to_stage"]],
            "evidence": rows["evidence"],
        }
    )
    first = rows.iloc[0]
    title = f"Link rates: {first['model']}, batch {first['batch_size']}, on {first['cluster']}"
    told = [_told(str(pair), field) for pair, field in rows.groupby("pair", sort=False)]
    return View(title, f"{CAPTION} {' '.join(told)}", cells)


def _told(pair: str, rows: pd.DataFrame) -> str:
    """At which share of the bandwidth, and which all-reduce ÷ compute, the paper's ratio lies."""
    level, said = float(rows["paper_ratio"].iloc[0]), []
    for name, column in ((rows["evidence"].iloc[0], "ratio"), ("simulated", "simulated")):
        known = rows.dropna(subset=[column])
        at = crossing(list(zip(known["bandwidth_share"], known[column], strict=True)), level)
        amounts = zip(known["all_reduce_to_compute"], known[column], strict=True)
        amount = crossing(list(amounts), level)
        if at is None:
            said.append(f"nowhere ({name})")
        else:
            share = ABSENT if amount is None else f"{amount:.3g}"
            said.append(f"at {at:.3g}× with all-reduce ÷ compute = {share} ({name})")
    return f"{pair} is {level:g} {', '.join(said)}."
