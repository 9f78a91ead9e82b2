"""Accuracy over seeds, and how closely the losses of synchronous systems agree step by step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.layout import Cell, Column, Row, Table, View, fixed, percent
from analysis.records import Record
from analysis.statistics import spread
from analysis.throughput import machine_line, order, plan_line, status_line

__all__ = ["AGREEMENT", "Agreement", "agreements", "describe", "tables", "task"]

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


@dataclass(frozen=True)
class Agreement:
    """How far a run's losses are from dp's over the first epoch, as max |loss − dp| ÷ |dp|.

    ``difference`` is nan if a loss is not a number, None if there is nothing to compare with;
    ``step`` is where it is largest.  ``compared`` of dp's ``expected`` steps are in both records.
    """

    record: Record
    reference: Record | None
    difference: float | None
    step: int | None
    compared: int
    expected: int

    @property
    def agrees(self) -> bool:
        complete = 0 < self.expected == self.compared
        return complete and self.difference is not None and self.difference <= AGREEMENT


def task(record: Record) -> str:
    """What a training run learns from, as a key: model, data, regime and epochs, and where it was
    recorded.  Synchronous systems of one task and seed have the same loss at every step."""
    config = record.config
    train = _section(config, "train")
    data = {
        key: value
        for key, value in _section(config, "data").items()
        if key not in COSMETIC_IN["data"]
    }
    regime = {key: train.get(key) for key in REGIME}
    epochs = train.get("epochs", record.epochs)
    device = _section(config, "launch").get("device")
    learned = [_section(config, "model"), data, regime, record.batch_size, epochs, device]
    return json.dumps([record.source, *learned], sort_keys=True, default=str)


def describe(record: Record) -> dict[str, str]:
    """Model, data and regime of a record in words for people; :func:`task` tells them apart."""
    train, data, model = (_section(record.config, key) for key in ("train", "data", "model"))
    size = data.get("image_size")
    optimizer, rate = _section(train, "optimizer"), _section(train, "learning_rate")
    smoothing = train.get("label_smoothing")
    regime = [
        f"B = {record.batch_size}",
        f"{optimizer['name']} {optimizer.get('lr', '')}".strip() if "name" in optimizer else "",
        str(rate.get("kind", "")),
        f"label smoothing {smoothing}" if smoothing else "",
        str(train.get("precision", "")),
    ]
    return {
        "model": _model(model),
        "data": f"{data['set']}{f' {size}×{size}' if size else ''}" if "set" in data else "",
        "regime": ", ".join(part for part in regime if part),
    }


def _model(model: Mapping[str, Any]) -> str:
    arguments = _section(model, "args")
    shown = (("width", "embed_dim"), ("depth", "depth"), ("patch", "patch_size"))
    parts = [f"{word} {arguments[key]}" for word, key in shown if key in arguments]
    return " ".join([str(model.get("name", "")), *parts]).strip()


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def tables(records: Iterable[Record]) -> tuple[Table, ...]:
    """An accuracy table a task, then a loss agreement table a task with step losses."""
    tasks: dict[str, list[Record]] = {}
    for record in records:
        if record.kind == "train":
            tasks.setdefault(task(record), []).append(record)
    groups = [sorted(group, key=lambda item: (*order(item), item.id)) for group in tasks.values()]
    groups.sort(key=lambda group: (group[0].source, group[0].name, task(group[0])))
    accuracy = [_accuracy_table(group) for group in groups]
    agreement = [_agreement_table(group) for group in groups if any(run.steps for run in group)]
    return (*accuracy, *agreement)


def _title(subject: str, record: Record) -> str:
    words = describe(record)
    on = f"{words['model']} on {words['data']}" if words["data"] else words["model"]
    parts = [part for part in (on, words["regime"]) if part]
    if record.source:
        parts.append(f"reference record of {record.source}")
    return f"{subject}: {', '.join(parts)}"


def _accuracy_table(records: Sequence[Record]) -> Table:
    """A row for the seeds of a system that ended alike: failures are rows of their own."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault((_variant(record), record.status, record.error), []).append(record)
    machines = "; ".join(dict.fromkeys(machine_line(record.machine) for record in records))
    view = View(
        _title("Accuracy", records[0]),
        "Top-1 in percent over the whole validation set after the last epoch: mean ± sample "
        f"standard deviation over seeds. Machine: {machines}.",
        (
            Column("system", lambda row: str(row["system"]), numeric=False),
            Column("plan", lambda row: str(row["plan"]), numeric=False),
            Column("accuracy", _mean),
            Column("min–max", _range),
            Column("seeds", lambda row: str(row["seeds"])),
            Column("epochs", lambda row: fixed(row["epochs"], 0)),
            Column("final loss", lambda row: fixed(row["final_loss_mean"], 4)),
            Column("evidence", lambda row: str(row["evidence"]), numeric=False),
            Column("status", status_line, numeric=False),
        ),
    )
    return Table("accuracy", tuple(_accuracy_row(group) for group in groups.values()), (view,))


def _variant(record: Record) -> str:
    """A key for runs that differ in nothing but the seed: no others are averaged."""
    config = {key: value for key, value in record.config.items() if key not in COSMETIC}
    for section, names in COSMETIC_IN.items():
        values = _section(record.config, section)
        config[section] = {key: value for key, value in values.items() if key not in names}
    parts = [record.label, record.evidence.label, plan_line(record), config]
    return json.dumps(parts, sort_keys=True, default=str)


def _accuracy_row(records: Sequence[Record]) -> Row:
    first = records[0]
    top = [record.accuracy for record in records if record.ok and record.accuracy is not None]
    losses = [
        record.final_loss for record in records if record.ok and record.final_loss is not None
    ]
    accuracy, loss = spread(top) if top else None, spread(losses) if losses else None
    return {
        "source": first.source or "fresh",
        "name": first.name,
        "system": _system(first),
        "plan": plan_line(first),
        **describe(first),
        "accuracy_mean_fraction": accuracy.mean if accuracy else None,
        "accuracy_sd_fraction": accuracy.deviation if accuracy else None,
        "accuracy_min_fraction": accuracy.low if accuracy else None,
        "accuracy_max_fraction": accuracy.high if accuracy else None,
        "seeds": " ".join(str(record.seed) for record in records),
        "epochs": first.epochs,
        "final_loss_mean": loss.mean if loss else None,
        "status": first.status,
        "error": first.error,
        "evidence": first.evidence.label,
        "machine": machine_line(first.machine),
    }


def _system(record: Record) -> str:
    """The label, with the options that make it another system: "dp (overlap = false)"."""
    options = _section(_section(record.config, "system"), "options")
    if record.label != record.system or not options:
        return record.label
    words = ", ".join(f"{key} = {json.dumps(options[key])}" for key in sorted(options))
    return f"{record.label} ({words})"


def _mean(row: Row) -> str:
    mean, deviation = row["accuracy_mean_fraction"], row["accuracy_sd_fraction"]
    known = isinstance(deviation, float) and not math.isnan(deviation)
    return f"{percent(mean, 2)} ± {percent(deviation, 2)}" if known else percent(mean, 2)


def _range(row: Row) -> str:
    low, high = row["accuracy_min_fraction"], row["accuracy_max_fraction"]
    return percent(low, 2) if low == high else f"{percent(low, 2)}–{percent(high, 2)}"


def agreements(records: Iterable[Record]) -> tuple[Agreement, ...]:
    """Every training run that is not dp against dp of the same task and seed."""
    runs = sorted(
        (record for record in records if record.kind == "train"),
        key=lambda item: (*order(item), item.id),
    )
    # An undisturbed dp run comes first, then the one under the plain name.
    runs_of_dp = sorted(
        (run for run in runs if run.system == "dp" and run.steps),
        key=lambda run: (not run.ok, bool(_section(run.config, "system").get("options"))),
    )
    results = []
    for run in runs:
        fitting = (dp for dp in runs_of_dp if dp.seed == run.seed and task(dp) == task(run))
        reference = next(fitting, None)
        if reference is not run:
            results.append(_agreement(run, reference))
    return tuple(results)


def _agreement(run: Record, reference: Record | None) -> Agreement:
    if reference is None:
        return Agreement(run, None, None, None, 0, 0)
    ours, theirs = (
        {step.index: step.loss for step in side.steps if step.epoch == 0}
        for side in (run, reference)
    )
    difference, worst = None, None
    for index in sorted(ours.keys() & theirs.keys()):
        apart = relative_difference(ours[index], theirs[index])
        # nan outranks every number, and is kept once seen.
        if difference is None or apart > difference or (math.isnan(apart) > math.isnan(difference)):
            difference, worst = apart, index
    compared = len(ours.keys() & theirs.keys())
    return Agreement(run, reference, difference, worst, compared, len(theirs))


def relative_difference(value: float, reference: float) -> float:
    """|value − reference| ÷ |reference|; 0 if both are 0."""
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def _agreement_table(records: Sequence[Record]) -> Table:
    rows = tuple(_agreement_row(item) for item in agreements(records))
    view = View(
        _title("Loss against dp", records[0]),
        "Largest |loss − dp| ÷ |dp| over the steps of the first epoch, same seed and batches; "
        f"{AGREEMENT:g} or less over all of dp's steps agrees.",
        (
            Column("system", lambda row: str(row["system"]), numeric=False),
            Column("plan", lambda row: str(row["plan"]), numeric=False),
            Column("seed", lambda row: str(row["seed"])),
            Column("largest difference", _difference),
            Column("at step", lambda row: fixed(row["step"], 0)),
            Column("steps", lambda row: f"{row['steps_compared']} of {row['steps_of_dp']}"),
            Column("agrees", _agrees, numeric=False),
            Column("status", status_line, numeric=False),
        ),
    )
    return Table("loss-agreement", rows, (view,))


def _agreement_row(item: Agreement) -> Row:
    record = item.record
    return {
        "source": record.source or "fresh",
        "name": record.name,
        "system": _system(record),
        "plan": plan_line(record),
        **describe(record),
        "seed": record.seed,
        "reference": item.reference.id if item.reference else None,
        "largest_relative_difference": item.difference,
        "step": item.step,
        "steps_compared": item.compared,
        "steps_of_dp": item.expected,
        "agrees": item.agrees if item.reference else None,
        "status": record.status,
        "error": record.error,
        "evidence": record.evidence.label,
    }


def _difference(row: Row) -> str:
    value: Cell = row["largest_relative_difference"]
    return f"{value:.1e}" if isinstance(value, float) else fixed(value)


def _agrees(row: Row) -> str:
    return (
        {True: "yes", False: "no"}.get(bool(row["agrees"]), "") if row["reference"] else "no dp run"
    )
