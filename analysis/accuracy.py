"""Accuracy over seeds, and how closely the losses of synchronous systems agree step by step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.layout import ABSENT, Table, View, fixed, percent
from analysis.records import Records

__all__ = ["AGREEMENT", "agreements", "differences", "status_lines", "tables", "training"]

AGREEMENT = 1e-3
"""Largest relative difference of a step's loss at which two synchronous systems count as equal:
what float32 sums in another order leave after an epoch."""

REGIME = ("batch_size", "optimizer", "learning_rate", "label_smoothing", "precision")
"""What of [train] a synchronous system's losses depend on, besides seed and epochs."""

COSMETIC = ("name", "tiers", "tracking")
COSMETIC_IN = {
    "train": ("seed", "seeds", "action_timeout_s"),
    "data": ("root", "download"),
    "launch": ("node_rank", "address", "port", "local_address", "rendezvous"),
}
"""Configuration that changes no result, and the seed, over which accuracies are averaged."""


def training(records: Records) -> pd.DataFrame:
    """The training runs, those of one task together, with these columns more:

    ``task``: a key of model, data, regime, epochs and source.  Synchronous systems of one task and
    seed have the same loss at every step.
    ``variant``: a key of all but the seed: runs that differ in it are never averaged.
    ``shown``: the system with its options, as in "dp (overlap = false)".
    ``model``, ``data``, ``regime``: in words for people; ``task`` tells them apart.
    """
    runs = records.runs[records.runs["kind"] == "train"]
    added = [_described(run) for run in runs.to_dict("records")]
    runs = runs.join(pd.DataFrame(added, index=runs.index, columns=[*DESCRIPTION]))
    runs["first"] = runs.groupby("task")["name"].transform("first")
    return runs.sort_values(["source", "first", "task"], kind="stable").drop(columns="first")


DESCRIPTION = ("task", "variant", "shown", "model", "data", "regime")


def _described(run: Mapping[Any, Any]) -> dict[str, str]:
    config = run["config"]
    plain = {key: value for key, value in config.items() if key not in COSMETIC}
    for section, names in COSMETIC_IN.items():
        values = _section(config, section)
        plain[section] = {key: value for key, value in values.items() if key not in names}
    train, data, model = plain["train"], plain["data"], _section(plain, "model")
    settings = {key: train.get(key) for key in REGIME}
    epochs = train.get("epochs", None if pd.isna(run["epochs"]) else int(run["epochs"]))
    device = plain["launch"].get("device")
    learned = [run["source"], model, data, settings, run["batch_size"], epochs, device]
    variant = [run["label"], run["evidence"], run["plan"], plain]
    optimizer, size = _section(train, "optimizer"), data.get("image_size")
    smoothing = train.get("label_smoothing")
    regime = [
        f"B = {run['batch_size']}",
        f"{optimizer['name']} {optimizer.get('lr', '')}".strip() if "name" in optimizer else "",
        str(_section(train, "learning_rate").get("kind", "")),
        f"label smoothing {smoothing}" if smoothing else "",
        str(train.get("precision", "")),
    ]
    return {
        "task": json.dumps(learned, sort_keys=True, default=str),
        "variant": json.dumps(variant, sort_keys=True, default=str),
        "shown": _system(run),
        "model": _model(model),
        "data": f"{data['set']}{f' {size}×{size}' if size else ''}" if "set" in data else "",
        "regime": ", ".join(part for part in regime if part),
    }


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _model(model: Mapping[str, Any]) -> str:
    arguments = _section(model, "args")
    shown = (("width", "embed_dim"), ("depth", "depth"), ("patch", "patch_size"))
    parts = [f"{word} {arguments[key]}" for word, key in shown if key in arguments]
    return " ".join([str(model.get("name", "")), *parts]).strip()


def _options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return _section(_section(config, "system"), "options")


def _system(run: Mapping[Any, Any]) -> str:
    options = _options(run["config"])
    if run["label"] != run["system"] or not options:
        return str(run["label"])
    words = ", ".join(f"{key} = {json.dumps(options[key])}" for key in sorted(options))
    return f"{run['label']} ({words})"


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
    top, loss = runs["accuracy"].where(ok), runs["final_loss"].where(ok)
    seeds = runs["seed"].astype(str)
    groups = runs.assign(accuracy=top, final_loss=loss, seeds=seeds).groupby(
        ["variant", "status", "error"], sort=False, dropna=False, as_index=False
    )
    kept = ("source", "name", "shown", "plan", "model", "data", "regime")
    frame = groups.agg(
        **{name: (name, "first") for name in kept},
        accuracy_mean_fraction=("accuracy", "mean"),
        accuracy_sd_fraction=("accuracy", "std"),
        accuracy_min_fraction=("accuracy", "min"),
        accuracy_max_fraction=("accuracy", "max"),
        seeds=("seeds", " ".join),
        epochs=("epochs", "first"),
        final_loss_mean=("final_loss", "mean"),
        evidence=("evidence", "first"),
        machine=("machine", "first"),
    )
    ends = ["status", "error", "evidence", "machine"]
    columns = [name for name in frame if name not in ("variant", *ends)]
    frame = frame[[*columns, *ends]].rename(columns={"shown": "system"})
    frame["source"] = frame["source"].replace("", "fresh")
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
    dp = dp.assign(disturbed=dp["status"] != "ok", special=dp["config"].map(_options).astype(bool))
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
    compared = shared.groupby("run").size().reindex(runs.index, fill_value=0)
    expected = runs["reference"].map(first).fillna(0).astype(int)
    return runs.assign(
        difference=worst["difference"],
        step=worst["step"].astype("Int64"),
        compared=compared,
        expected=expected,
        agrees=(expected > 0)
        & (expected == compared)
        & (worst["difference"].reindex(runs.index) <= AGREEMENT),
    )


def _agreement_table(items: pd.DataFrame) -> Table:
    known = items["reference"].notna()
    frame = pd.DataFrame(
        {
            "source": items["source"].replace("", "fresh"),
            "name": items["name"],
            "system": items["shown"],
            **{name: items[name] for name in ("plan", "model", "data", "regime", "seed")},
            "reference": items["reference_id"],
            "largest_relative_difference": items["difference"],
            "step": items["step"],
            "steps_compared": items["compared"],
            "steps_of_dp": items["expected"],
            "agrees": items["agrees"].astype(object).where(known, None),
            **{name: items[name] for name in ("status", "error", "evidence")},
        }
    )
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
    title = _title("Loss against dp", items)
    return Table("loss-agreement", frame, (View(title, caption, cells),))
