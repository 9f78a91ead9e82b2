"""Sweeps and grids: every value beside every other, and what diverged in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.accuracy import mean_and_spread
from analysis.layout import ABSENT, Table, View
from analysis.records import Records
from analysis.tasks import LEARNED, short, swept, title

__all__ = ["tables"]

PLACE = ["shown", "plan", "row", "value"]
"""What tells the cells of a table apart: the system, and the values of the axes that all systems of
the table have; the last axis is across, and an axis such as plan.stages shows in the plan."""


def tables(records: Records) -> tuple[Table, ...]:
    """A table for the sweeps of one task over the same axes."""
    return tuple(_table(runs) for _, runs in swept(records).groupby("study", sort=False))


def _table(runs: pd.DataFrame) -> Table:
    axes = [key for key in runs["swept"].iloc[0] if key.startswith((*LEARNED, "train.epochs"))]
    across, down = axes[-1:], axes[:-1]
    runs = runs.assign(
        row=runs["swept"].map(lambda point: tuple(point[key] for key in down)),
        value=runs["swept"].map(lambda point: tuple(point[key] for key in across)),
        axes=" × ".join(axes),
        point=runs["swept"].map(_words),
    )
    frame = _cells(runs)
    told = ("source", "name", "shown", "plan", "model", "data", "regime", "axes", "point")
    found = ("accuracy_mean_fraction", "accuracy_sd_fraction", "seeds", "best_of_row")
    ends = ("final_loss_mean", "status", "error", "evidence", "machine")
    plain = frame[[*told, *found, *ends]].rename(columns={"shown": "system"})
    return Table("sweep", plain, (View(title("Sweep", runs), _caption(runs), _grid(frame, axes)),))


def _cells(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for the seeds of a cell that ended alike, in the order of systems, rows and values."""
    ok = runs["status"] == "ok"
    runs = runs.assign(
        accuracy=runs["accuracy"].where(ok),
        final_loss=runs["final_loss"].where(ok),
        seeds=runs["seed"].astype(str),
        order=runs.groupby("shown", sort=False).ngroup(),
    )
    plan = ["order", "stages", "replicas", "micro_batches", "plan"]
    runs = runs.assign(place=runs.groupby(plan).ngroup())
    told = ("source", "name", "model", "data", "regime", "axes", "point", "place")
    frame = runs.groupby([*PLACE, "status", "error"], dropna=False, as_index=False).agg(
        **{name: (name, "first") for name in told},
        accuracy_mean_fraction=("accuracy", "mean"),
        accuracy_sd_fraction=("accuracy", "std"),
        seeds=("seeds", " ".join),
        final_loss_mean=("final_loss", "mean"),
        evidence=("evidence", "first"),
        machine=("machine", "first"),
    )
    frame = frame.sort_values(["place", "row", "value"], kind="stable", ignore_index=True)
    # What ended in several ways is no choice; of equals the first is, at the smaller value.
    whole = frame[~frame.duplicated(PLACE, keep=False) & (frame["status"] == "ok")]
    best = whole.groupby(["place", "row"])["accuracy_mean_fraction"].idxmax()
    return frame.assign(best_of_row=frame.index.isin(best))


def _grid(frame: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
    """Cells as text: a row a system and plan, a column a value; what has no record is absent."""
    texts = frame.assign(text=frame.apply(_text, axis=1))
    cells = texts.groupby(["place", "row", "value"])["text"].agg(", ".join).unstack("value")
    rows = texts.drop_duplicates(["place", "row"]).set_index(["place", "row"]).loc[cells.index]
    named = {"system": rows["shown"], "plan": rows["plan"]}
    for place, key in enumerate(axes[:-1]):
        named[short(key)] = pd.Series([str(row[place]) for _, row in cells.index], cells.index)
    heads = [f"{short(axes[-1])} = {value[0]}" if axes else "accuracy" for value in cells.columns]
    cells = cells.fillna(ABSENT).set_axis(heads, axis=1)
    return pd.concat([pd.DataFrame(named), cells], axis=1).reset_index(drop=True)


def _text(row: Mapping[str, Any]) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    text = mean_and_spread(row)
    return f"**{text}**" if row["best_of_row"] else text


def _words(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in point.items())


def _caption(runs: pd.DataFrame) -> str:
    held_out = runs["data"].str.contains("held out").all()
    where = "images held out of the training set" if held_out else "the whole validation set"
    seeds = ", ".join(map(str, sorted(runs["seed"].unique())))
    return (
        f"Top-1 in percent over {where} after the last epoch, seed {seeds}; bold is the best of "
        f"its row, {ABSENT} is not run. Machine: {'; '.join(runs['machine'].unique())}."
    )
