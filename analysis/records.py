"""Run records as typed data: what the tables and figures know of a results directory.

A results directory holds ``runs/<id>/`` (fresh) and ``reference/**/`` (committed, each from the
machine it names).  Only result.json, events.jsonl and config.toml are read.  A failed run is a
record like any other.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from analysis.evidence import Evidence

__all__ = [
    "PARTS",
    "Evaluation",
    "Record",
    "Round",
    "Step",
    "load_records",
]

RESULT_SCHEMA = "pipebench.result/1"
PARTS = (
    "compute",
    "interference",
    "communication",
    "reduce",
    "optimizer",
    "idle",
    "overhead",
)
"""The parts that add up to a rank's wall time, in the order of tables and figures."""

STATUSES = (
    "ok",
    "failed",
    "oom",
    "timeout",
    "diverged",
    "interrupted",
    "unfinished",
    "skipped_hardware",
)

T = TypeVar("T")


@dataclass(frozen=True)
class Round:
    """One timed round: ``samples`` trained in ``wall_s`` seconds of the slowest rank;
    ``compute_bound_s`` is the schedule's own lower bound, from slices measured in this round."""

    index: int
    position: int
    wall_s: float
    samples: int
    compute_bound_s: float | None

    @property
    def images_per_s(self) -> float:
        return self.samples / self.wall_s


@dataclass(frozen=True)
class Step:
    """One update of the weights; ``loss`` is the mean over the global batch."""

    index: int
    epoch: int
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """Top-1 ``accuracy`` (0 … 1) over the whole validation set after ``updates`` updates."""

    updates: int
    epoch: int
    accuracy: float


@dataclass(frozen=True)
class Record:
    """One run, or one contender of a benchmark.

    ``source`` is "" for a fresh run, else the path below reference/ that holds it.
    ``replicas`` is one number if all stages have as many, else one a stage, as in "2,1".
    ``breakdown`` maps each rank to seconds, averaged over rounds: "wall", and those of
    :data:`PARTS` that are known of the system.
    ``evidence`` is the class of its times.
    """

    id: str
    source: str
    name: str
    kind: str
    system: str
    label: str
    seed: int
    status: str
    error: str | None
    evidence: Evidence
    machine: Mapping[str, Any]
    batch_size: int
    micro_batches: int
    stages: int
    replicas: str
    bench_id: str | None = None
    epochs: int | None = None
    final_loss: float | None = None
    accuracy: float | None = None
    rounds: tuple[Round, ...] = ()
    breakdown: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def load_records(results_dir: Path) -> tuple[Record, ...]:
    """All records below ``results_dir``, fresh ones first, in a stable order.

    A run that was begun and has no result (it is still going, or its launcher was killed) is a
    record of status "unfinished"; so is a contender of such a benchmark.

    Raises:
        ValueError: there are none, or a file is broken; the message names it.
    """
    records: list[Record] = []
    for source, directory in _run_directories(Path(results_dir)):
        records += _load_directory(source, directory)
    if not records:
        raise ValueError(f"no runs in {results_dir}: run ./reproduce.sh first")
    return tuple(records)


def _run_directories(results_dir: Path) -> Iterator[tuple[str, Path]]:
    runs = results_dir / "runs"
    if runs.is_dir():
        for directory in sorted(runs.iterdir()):
            if directory.is_dir():
                yield "", directory
    reference = results_dir / "reference"
    if reference.is_dir():
        for result in sorted(reference.rglob("result.json")):
            yield result.parent.parent.relative_to(reference).as_posix(), result.parent


def _load_directory(source: str, directory: Path) -> list[Record]:
    events = _read(directory / "events.jsonl", _events) or _Events()
    config = _read(directory / "config.toml", _toml) or {}

    def finished(content: bytes) -> list[Record]:
        return [_record(source, directory.name, json.loads(content.decode()), events, config)]

    def unfinished(content: bytes) -> list[Record]:
        return _unfinished(directory, _toml(content), events)

    records = _read(directory / "result.json", finished)
    if records is None:
        records = _read(directory / "config.toml", unfinished)
    return records or []


def _toml(content: bytes) -> dict[str, Any]:
    return tomllib.loads(content.decode())


def _read(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """``parse`` of a file's bytes, None for no file; a fault in it becomes one line naming it."""
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except KeyError as error:
        raise ValueError(f"{path} is broken: the key {error} is missing") from error
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{path} is broken: {error}") from error


@dataclass(frozen=True)
class _Events:
    steps: tuple[Step, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()


def _events(content: bytes) -> _Events:
    """What a file of events says; a last line that a crash cut short is left out."""
    lines = [(n, line) for n, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    steps, evaluations = [], []
    for number, line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            if number == lines[-1][0]:
                break
            raise ValueError(f"line {number} is not JSON") from None
        try:
            if event["event"] == "step":
                index, epoch = _value(event, "step", int), _value(event, "epoch", int)
                steps.append(Step(index, epoch, _loss(event["loss"])))
            elif event["event"] == "evaluation":
                updates, epoch = _value(event, "step", int), _value(event, "epoch", int)
                accuracy = _value(event, "accuracy", float)
                evaluations.append(Evaluation(updates, epoch, accuracy))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is not a valid event: {error!r}") from None
    return _Events(tuple(steps), tuple(evaluations))


def _loss(value: float | None) -> float:
    """Strict JSON has no NaN: a loss that is not a number may be stored as null."""
    return math.nan if value is None else float(value)


def _record(
    source: str,
    identity: str,
    result: Mapping[str, Any],
    events: _Events,
    config: Mapping[str, Any],
) -> Record:
    if result["schema"] != RESULT_SCHEMA:
        raise ValueError(f"its schema is {result['schema']!r}, but must be {RESULT_SCHEMA!r}")
    if result["status"] not in STATUSES:
        known = ", ".join(STATUSES)
        raise ValueError(f"unknown status {result['status']!r}: one of {known}")
    return Record(
        id=_value(result, "id", str, identity),
        source=source,
        name=_value(result, "name", str),
        kind=_value(result, "kind", str),
        system=_value(result, "system", str),
        label=_value(result, "label", str, result["system"]),
        seed=_value(result, "seed", int),
        status=result["status"],
        error=_optional(result, "error", str),
        evidence=Evidence.parse(_value(result, "evidence", str)),
        machine=_value(result, "machine", dict, {}),
        batch_size=_value(result, "batch_size", int),
        micro_batches=_value(result, "micro_batches", int),
        stages=_value(result, "stages", int),
        replicas=_replicas(result["replicas"]),
        bench_id=_optional(result, "bench_id", str),
        epochs=_optional(result, "epochs", int),
        final_loss=_optional(result, "final_loss", float),
        accuracy=_optional(result, "accuracy", float),
        rounds=tuple(_round(entry) for entry in _value(result, "rounds", list, [])),
        breakdown=_breakdown(_value(result, "breakdown", dict, {})),
        steps=events.steps,
        evaluations=events.evaluations,
        config=config,
    )


def _value(entry: Mapping[str, Any], key: str, kind: type[T], missing: T | None = None) -> T:
    """``entry[key]``, which must be of that kind; a whole number is a float as well."""
    value = entry[key] if missing is None else entry.get(key, missing)
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{key} is {value!r}, but must be of type {kind.__name__}")
    return value


def _optional(entry: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    return None if entry.get(key) is None else _value(entry, key, kind)


def _replicas(value: int | list[int]) -> str:
    """One number if all stages have as many replicas, else one a stage, as in "2,1"."""
    counts = [value] if isinstance(value, int) else value
    return ",".join(str(count) for count in (counts if len(set(counts)) > 1 else counts[:1]))


def _unfinished(directory: Path, config: Mapping[str, Any], events: _Events) -> list[Record]:
    """What a directory without a result was to become: a run, or the contenders of a benchmark
    less those whose records lie beside it."""
    bench = config.get("bench")
    if bench is None:
        return [_begun(directory.name, config, config["system"]["name"], config["plan"], events)]
    records = []
    for contender in bench["contenders"]:
        identity = f"{directory.name}.{contender['label']}"
        if not (directory.parent / identity / "result.json").exists():
            plan = {**config["plan"], **contender.get("plan", {})}
            record = _begun(identity, config, contender["system"], plan, events)
            records.append(replace(record, label=contender["label"], bench_id=directory.name))
    return records


def _begun(
    identity: str,
    config: Mapping[str, Any],
    system: str,
    plan: Mapping[str, Any],
    events: _Events,
) -> Record:
    return Record(
        id=identity,
        source="",
        name=config["name"],
        kind="bench" if "bench" in config else "train",
        system=system,
        label=system,
        seed=config["train"]["seed"],
        status="unfinished",
        error=None,
        evidence=Evidence.MEASURED,
        machine={},
        batch_size=config["train"]["batch_size"],
        micro_batches=plan.get("micro_batches", 1),
        stages=plan.get("stages", 1),
        replicas=_replicas(plan.get("replicas") or 1),
        steps=events.steps,
        evaluations=events.evaluations,
        config=config,
    )


def _round(entry: Mapping[str, Any]) -> Round:
    timed = Round(
        index=_value(entry, "round", int),
        position=_value(entry, "position", int),
        wall_s=_value(entry, "wall_s", float),
        samples=_value(entry, "samples", int),
        compute_bound_s=_optional(entry, "compute_bound_s", float),
    )
    if timed.wall_s <= 0:
        raise ValueError(f"round {timed.index} took {timed.wall_s} s, but time must be positive")
    return timed


def _breakdown(entry: Mapping[str, Any]) -> Mapping[int, Mapping[str, float]]:
    """Of each rank "wall" and the parts that are known; torch's schedules do not tell all."""
    return {
        int(rank): {part: float(seconds[part]) for part in ("wall", *PARTS) if part in seconds}
        for rank, seconds in entry.items()
    }
