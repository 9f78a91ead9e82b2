"""Accuracy over seeds, and how closely the losses of synchronous systems agree step by step."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.layout import ABSENT, Table, View, fixed, percent
from analysis.records import Records

__all__ = ["AGREEMENT", "agreements", "differences", "status_lines", "tables", "training"]

AGREEMENT = 1e-3
"""Largest relative difference of a step's loss at which two synchronous systems count as equal:
what float32 sums in another order leave after an epoch."""

LEARNED = (
    *("model.", "data.", "launch.device", "train.batch_size", "train.optimizer"),
    *("train.learning_rate", "train.label_smoothing", "train.precision", "train.start_from"),
)
"""Configuration that a synchronous system's losses depend on, besides seed and epochs."""
COSMETIC = (
    *("name", "tiers", "tracking.", "train.seed", "train.action_timeout_s", "data.root"),
    *("data.download", "launch.node_rank", "launch.address", "launch.port"),
    *("launch.local_address", "launch.rendezvous"),
)
"""Configuration that changes no result, and the seed, over which accuracies are averaged."""
OPTION = re.compile(r"(?:switch\.)?system\.options\.")


def training(records: Records) -> pd.DataFrame:
    """The training runs, those of one task together, with these columns more:

    ``task``: a key of model, data, regime, epochs and source.  Synchronous systems of one task and
    seed have the same loss at every step.
    ``variant``: a key of all but the seed: runs that differ in it are never averaged.
    ``shown``: the system with its options, as in "dp (overlap = false)", and whether all its ranks
    were in one process: a time of such a run is none, its accuracy is as good as any.
    ``model``, ``data``, ``regime``: in words for people; ``task`` tells them apart.
    """
    runs = records.runs[records.runs["kind"] == "train"]
    names = ["task", "variant", "shown", "model", "data", "regime"]
    added = [_described(run, _settings(run["config"])) for run in runs.to_dict("records")]
    runs = runs.join(pd.DataFrame(added, index=runs.index, columns=names))
    runs["first"] = runs.groupby("task")["name"].transform("first")
    return runs.sort_values(["source", "first", "task"], kind="stable").drop(columns="first")


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """A nested configuration by dotted keys, less what is cosmetic."""
    flat = pd.json_normalize(config).to_dict("records")[0] if config else {}
    return {str(key): flat[key] for key in flat if not str(key).startswith(COSMETIC)}


def _described(run: Mapping[Any, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    learned = {key: value for key, value in settings.items() if key.startswith(LEARNED)}
    epochs = settings.get("train.epochs", run["epochs"])
    task = [run["source"], learned, run["batch_size"], epochs]
    variant = [run["label"], run["evidence"], run["transport"], run["plan"], settings]
    options = sorted(key for key in settings if OPTION.match(key))
    special = [f"{OPTION.sub('', key)} = {json.dumps(settings[key])}" for key in options]
    # Whoever chose a label has named the options, but for that of a switch, which tells when.
    own = run["label"] not in (run["system"], f"{run['system']}@{_moment(settings)}")
    remarks = [] if own else special
    if run["transport"] == "in-process":
        remarks.append("in-process")

    def words(*parts: tuple[str, str]) -> str:
        known = [word.format(settings[key]) for word, key in parts if settings.get(key)]
        return " ".join(known)

    regime = (
        f"B = {run['batch_size']}",
        words(("{}", "train.optimizer.name"), ("{}", "train.optimizer.lr")),
        words(("{}", "train.learning_rate.kind")),
        words(("label smoothing {}", "train.label_smoothing")),
        words(("{}", "train.precision")),
        words(("from {}", "train.start_from")),
    )
    return {
        "task": json.dumps(task, sort_keys=True, default=str),
        "variant": json.dumps(variant, sort_keys=True, default=str),
        "shown": run["label"] + (f" ({', '.join(remarks)})" if remarks else ""),
        "model": words(
            ("{}", "model.name"),
            ("width {}", "model.args.embed_dim"),
            ("depth {}", "model.args.depth"),
            ("patch {}", "model.args.patch_size"),
        ),
        "data": words(("{}", "data.set"), ("{0}×{0}", "data.image_size")),
        "regime": ", ".join(part for part in regime if part),
    }


def _moment(settings: Mapping[str, Any]) -> str:
    return str(settings.get("switch.epoch", "plateau"))


def tables(records: Records) -> tuple[Table, ...]:
    """An accuracy table a task, then a loss agreement table a task with something to compare."""
    runs = training(records)
    agreed = agreements(records)
    agreed = agreed[agreed["task"].isin(runs.loc[runs.index.isin(records.steps["run"]), "task"])]
    accuracy = [_accuracy_table(group) for _, group in runs.groupby("task", sort=False)]
    agreement = [_agreement_table(group) for _, group in agreed.groupby("task", sort=False)]
    return (*accuracy, *agreement)


def _title(subject: str, runs: pd.DataFrame) -> str:
    first = runs.iloc[0]
    on = f"{first['model']} on {first['data']}" if first["data"] else first["model"]
    parts = [part for part in (on, first["regime"]) if part]
    if first["source"]:
        parts.append(f"reference record of {first['source']}")
    return f"{subject}: {', '.join(parts)}"


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
    told = ("source", "name", "shown", "plan", "model", "data", "regime")
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
    ends = ("status", "error", "evidence", "machine")
    columns = [name for name in frame if name not in ("variant", *ends)]
    frame = frame[[*columns, *ends]].rename(columns={"shown": "system"})
    caption = (
        "Top-1 in percent over the whole validation set after the last epoch: mean ± sample "
        f"standard deviation over seeds. Machine: {'; '.join(runs['machine'].unique())}."
    )
    cells = pd.DataFrame(
        {
            "system": frame["system"],
            "plan": frame["plan"],
            "accuracy": frame.apply(_mean, axis=1),
            "min–max": frame.apply(_range, axis=1),
            "seeds": frame["seeds"],
            "epochs": frame["epochs"].map(lambda epochs: fixed(epochs, 0)),
            "final loss": frame["final_loss_mean"].map(lambda loss: fixed(loss, 4)),
            "evidence": frame["evidence"],
            "status": status_lines(frame),
        }
    )
    return Table("accuracy", frame, (View(_title("Accuracy", runs), caption, cells),))


def _mean(row: pd.Series[Any]) -> str:
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
    runs = training(records).reset_index()
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
    return Table("loss-agreement", frame, (View(_title("Loss against dp", items), caption, cells),))
