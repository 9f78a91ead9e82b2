"""Accuracy over seeds, and how closely the losses of synchronous systems agree step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.layout import ABSENT, Table, View, fixed, percent, with_interval
from analysis.records import Records
from analysis.statistics import mean_interval
from analysis.tasks import synchronous, title, training

__all__ = ["AGREEMENT", "agreements", "differences", "mean_and_spread", "status_lines", "tables"]

AGREEMENT = 1e-3
"""Largest relative difference of a step's loss at which two synchronous systems count as equal:
what float32 sums in another order leave after an epoch."""


def tables(records: Records) -> tuple[Table, ...]:
    """An accuracy table a study, then a loss agreement table a task with something to compare."""
    runs = training(records)
    agreed = agreements(records)
    agreed = agreed[agreed["task"].isin(runs.loc[runs.index.isin(records.steps["run"]), "task"])]
    accuracy = [_accuracy_table(group) for _, group in runs.groupby("study", sort=False)]
    agreement = [_agreement_table(group) for _, group in agreed.groupby("task", sort=False)]
    return (*accuracy, *agreement)


def _accuracy_table(runs: pd.DataFrame) -> Table:
    """A row for the seeds of a system that ended alike: failures are rows of their own."""
    ok = runs["status"] == "ok"
    runs = runs.assign(
        accuracy=runs["accuracy"].where(ok),
        final_loss=runs["final_loss"].where(ok),
        seeds=runs["seed"].astype(str),
    )
    alike = ["variant", "status", "error"]
    groups = runs.groupby(alike, sort=False, dropna=False, as_index=False)
    told = ("source", "name", "shown", "plan", "chosen", "model", "data", "regime")
    spread = {"mean": "mean", "sd": "std", "min": "min", "max": "max"}
    frame = groups.agg(
        **{name: (name, "first") for name in told},
        **{f"accuracy_{name}_fraction": ("accuracy", how) for name, how in spread.items()},
        seeds=("seeds", " ".join),
        epochs=("epochs", "first"),
        final_loss_mean=("final_loss", "mean"),
        evidence=("evidence", "first"),
        machine=("machine", "first"),
    )
    against = frame[["variant"]].join(_against_dp(runs), on="variant").drop(columns="variant")
    frame = frame.join(against.where(frame["status"] == "ok"))
    ends = ("status", "error", "evidence", "machine")
    columns = [name for name in frame if name not in ("variant", *ends)]
    frame = frame[[*columns, *ends]].rename(columns={"shown": "system"})
    differ = (frame["pairs_with_dp"] > 1).any()
    caption = (
        "Top-1 in percent over the whole validation set after the last epoch: mean ± sample "
        f"standard deviation over seeds. {AGAINST_DP if differ else ''}"
        f"Machine: {'; '.join(runs['machine'].unique())}."
    )
    cells = pd.DataFrame(
        {
            "system": frame["system"],
            "plan": frame["plan"],
            **({"chosen": frame["chosen"]} if (frame["chosen"] != "").any() else {}),
            "accuracy": frame.apply(mean_and_spread, axis=1),
            **({"− dp": frame.apply(_difference, axis=1)} if differ else {}),
            "min–max": frame.apply(_range, axis=1),
            "seeds": frame["seeds"],
            "epochs": frame["epochs"].map(lambda epochs: fixed(epochs, 0)),
            "final loss": frame["final_loss_mean"].map(lambda loss: fixed(loss, 4)),
            "evidence": frame["evidence"],
            "status": status_lines(frame),
        }
    )
    return Table("accuracy", frame, (View(title("Accuracy", runs), caption, cells),))


AGAINST_DP = (
    "− dp: difference in points, paired by seed, with its 95 % interval (Student's t over seeds). "
)


def _against_dp(runs: pd.DataFrame) -> pd.DataFrame:
    """By variant: accuracy less dp's of the same seed, as mean and ends of its 95 % interval, and
    over how many pairs; dp itself, in its plain form where there are several, has none."""
    names = [f"difference_to_dp_{end}_fraction" for end in ("mean", "low", "high")]
    scores = runs[runs["status"] == "ok"].drop_duplicates(["variant", "seed"])
    scores = scores.set_index(["variant", "seed"])["accuracy"].unstack()
    dp = runs[runs["system"] == "dp"].sort_values("shown", key=lambda shown: shown.str.len())
    reference = dp["variant"].iloc[0] if len(dp) else None
    rows = {}
    for variant, accuracies in scores.iterrows():
        if reference in scores.index and variant != reference:
            differences = (accuracies - scores.loc[reference]).dropna()
            rows[variant] = [*mean_interval(differences), len(differences)]
    columns = [*names, "pairs_with_dp"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns, dtype=float)


def _difference(row: pd.Series[Any]) -> str:
    mean, low, high = (
        100 * row[f"difference_to_dp_{end}_fraction"] for end in ("mean", "low", "high")
    )
    return with_interval(mean, low, high, 2)


def mean_and_spread(row: Mapping[str, Any]) -> str:
    """Mean ± sample standard deviation in percent, of a row of the accuracy table."""
    mean, deviation = row["accuracy_mean_fraction"], row["accuracy_sd_fraction"]
    spread = "" if pd.isna(deviation) else f" ± {percent(deviation, 2)}"
    return percent(mean, 2) + spread


def _range(row: pd.Series[Any]) -> str:
    low, high = row["accuracy_min_fraction"], row["accuracy_max_fraction"]
    return "–".join(dict.fromkeys((percent(low, 2), percent(high, 2))))


def status_lines(frame: pd.DataFrame) -> pd.Series[str]:
    """How the runs of each row ended, and why."""
    reason = ": " + frame["error"].astype(object).fillna("").astype(str)
    return frame["status"] + reason.where(reason != ": ", "")


def differences(records: Records) -> pd.DataFrame:
    """|loss − dp| ÷ |dp| of every update that a training run and its ``reference`` both have: 0 if
    both losses are 0, NaN if one is not a number."""
    pairs = _referred(records)["reference"].reset_index()
    theirs = records.steps.rename(columns={"run": "reference", "loss": "loss_of_dp"})
    steps = pairs.merge(records.steps, on="run").merge(theirs, on=["reference", "step", "epoch"])
    apart = (steps["loss"] - steps["loss_of_dp"]).abs() / steps["loss_of_dp"].abs()
    return steps.assign(difference=apart.mask(steps["loss"] == steps["loss_of_dp"], 0.0))


def _referred(records: Records) -> pd.DataFrame:
    """Training runs with the ``reference`` they are compared with, which is not among them: dp of
    the same task and seed, an undisturbed run first, then the one under the plain name."""
    runs = synchronous(records).reset_index()
    dp = runs[(runs["system"] == "dp") & runs["run"].isin(records.steps["run"])]
    special = dp["shown"] != dp["label"]
    dp = dp.assign(disturbed=dp["status"] != "ok", special=special)
    dp = dp.sort_values(["disturbed", "special"], kind="stable").drop_duplicates(["task", "seed"])
    dp = dp.assign(reference=dp["run"].astype("Int64"), reference_id=dp["id"])
    references = dp[["task", "seed", "reference", "reference_id"]]
    runs = runs.merge(references, on=["task", "seed"], how="left")
    return runs[runs["run"].ne(runs["reference"]).fillna(True)].set_index("run")


def agreements(records: Records) -> pd.DataFrame:
    """Every training run but the references, with its largest difference in the first epoch.

    ``difference`` is NaN if a loss is not a number or nothing is compared; it is largest at
    ``step``.  ``compared`` of the ``expected`` steps of dp are in both records.
    """
    runs = _referred(records)
    shared = differences(records)
    shared = shared[shared["epoch"] == 0]
    ranked = shared.sort_values("difference", ascending=False, na_position="first", kind="stable")
    worst = ranked.drop_duplicates("run").set_index("run")
    first = records.steps[records.steps["epoch"] == 0].groupby("run").size()
    runs = runs.assign(
        difference=worst["difference"],
        step=worst["step"].astype("Int64"),
        compared=shared.groupby("run").size().reindex(runs.index, fill_value=0),
        expected=runs["reference"].map(first).fillna(0).astype(int),
    )
    complete = (runs["expected"] > 0) & (runs["expected"] == runs["compared"])
    return runs.assign(agrees=complete & (runs["difference"] <= AGREEMENT))


def _agreement_table(items: pd.DataFrame) -> Table:
    known = items["reference"].notna()
    renamed = {
        "shown": "system",
        "reference_id": "reference",
        "difference": "largest_relative_difference",
        "compared": "steps_compared",
        "expected": "steps_of_dp",
    }
    told = ("source", "name", "shown", "plan", "model", "data", "regime", "seed", "reference_id")
    found = ("difference", "step", "compared", "expected", "agrees", "status", "error", "evidence")
    frame = items.assign(agrees=items["agrees"].astype(object).where(known, None))
    frame = frame[[*told, *found]].rename(columns=renamed)
    caption = (
        "Largest |loss − dp| ÷ |dp| over the steps of the first epoch, same seed and batches; "
        f"{AGREEMENT:g} or less over all of dp's steps agrees."
    )
    largest = items["difference"].map("{:.1e}".format).where(items["compared"] > 0, ABSENT)
    cells = pd.DataFrame(
        {
            "system": items["shown"],
            "plan": items["plan"],
            "seed": items["seed"].astype(str),
            "largest difference": largest,
            "at step": items["step"].map(lambda step: fixed(step, 0)),
            "steps": items["compared"].astype(str) + " of " + items["expected"].astype(str),
            "agrees": items["agrees"].map({True: "yes", False: "no"}).where(known, "no dp run"),
            "status": status_lines(items),
        }
    )
    return Table("loss-agreement", frame, (View(title("Loss against dp", items), caption, cells),))
