"""Run records as tidy tables: what the tables and figures know of a results directory.

A results directory holds ``runs/<id>/`` (fresh) and ``reference/**/`` (committed, each from the
machine it names).  Only result.json, events.jsonl and config.toml are read.  A failed run is a
record like any other.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pandas as pd
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
)

from analysis.evidence import Evidence

__all__ = ["PARTS", "PEERS", "Records", "load_records", "machine_line"]

PARTS = (
    *("compute", "interference", "communication", "reduce"),
    *("optimizer", "idle", "overhead"),
)
"""The parts that add up to a rank's wall time, in the order of tables and figures."""
PEERS = {"dp": "torch-ddp", "gpipe": "torch-gpipe", "dapple": "torch-1f1b"}
"""The peer that runs the same schedule."""

ORDER = [name for pair in PEERS.items() for name in pair]

WHOLE = ("run", "round", "position", "samples", "rank", "step", "epoch")

T = TypeVar("T")


@dataclass(frozen=True)
class Records:
    """All records, fresh ones first; then a system, its peer, the next system, as in tables.

    ``runs``: a row a run, or a contender of a benchmark; the others refer to its index, "run".
    ``source`` is "" for a fresh run, else the path below reference/ that holds it; ``evidence`` is
    the class of its times (ranks that share a process, ``transport`` "in-process", have none),
    ``launch`` who its rounds may be paired with, ``began`` Unix time, ``config`` a dict.
    ``rounds``: a row a timed round: ``samples`` trained in ``wall_s`` seconds of the slowest rank;
    ``compute_bound_s`` is the schedule's own lower bound, from slices measured in this round, and
    ``reference_s`` what a fixed piece of work took just before it.
    ``ranks``: a row a rank of a benchmark: seconds, averaged over rounds: "wall" and
    :data:`PARTS`, NaN where they are not known of the system.
    ``steps``: a row an update of ``samples`` images; ``loss`` is the mean over the global batch.
    ``evaluations``: a row an evaluation after ``step`` updates; ``accuracy`` is top-1, 0 … 1.
    """

    runs: pd.DataFrame
    rounds: pd.DataFrame
    ranks: pd.DataFrame
    steps: pd.DataFrame
    evaluations: pd.DataFrame


class _Strict(BaseModel):
    """No value is turned into another type; a whole number is a float as well."""

    model_config = ConfigDict(strict=True, frozen=True)


class _Round(_Strict):
    round: int
    position: int
    wall_s: float = Field(gt=0)
    samples: int
    compute_bound_s: float | None = None
    reference_s: float | None = None


def _number(loss: object) -> object:
    return float(loss) if loss in ("nan", "inf", "-inf") else loss


class _Step(_Strict):
    step: int
    epoch: int
    loss: Annotated[float | None, BeforeValidator(_number)]
    """Strict JSON has no NaN: a loss that is not finite may be stored as null, or as text."""
    samples: int


class _Evaluation(_Strict):
    step: int
    epoch: int
    accuracy: float


class _Launch(_Strict):
    """Ranks were about to start, at Unix time ``t``."""

    t: float


class _Switch(_Strict):
    """The system that a run ended with, and after how many updates it took over."""

    system: str
    stages: int
    replicas: int | list[int]
    micro_batches: int
    step: int | None = None


class _Result(_Strict):
    schema_: Literal["pipebench.result/1"] = Field(alias="schema")
    id: str
    name: str
    kind: str
    system: str
    label: str
    seed: int
    status: Literal[
        "ok",
        "failed",
        "oom",
        "timeout",
        "diverged",
        "interrupted",
        "unfinished",
        "skipped_hardware",
    ]
    error: str | None = None
    evidence: Annotated[str, AfterValidator(lambda text: Evidence.parse(text).label)]
    machine: dict[str, Any] = {}
    transport: Literal["distributed", "in-process"] = "distributed"
    switch: _Switch | None = None
    batch_size: int
    micro_batches: int
    stages: int
    replicas: int | list[int]
    bench_id: str | None = None
    epochs: int | None = None
    final_loss: float | None = None
    accuracy: float | None = None
    rounds: list[_Round] = []
    breakdown: dict[Annotated[int, Strict(False)], dict[str, float | None]] = {}


_Event = _Step | _Evaluation | _Launch
_EVENTS: dict[str, type[_Event]] = {"step": _Step, "evaluation": _Evaluation, "launch": _Launch}


@dataclass(frozen=True)
class _Run:
    source: str
    result: _Result
    events: Sequence[_Event]
    config: Mapping[str, Any]

    def events_of(self, kind: type[_Strict]) -> list[dict[str, Any]]:
        return [event.model_dump() for event in self.events if isinstance(event, kind)]

    @property
    def began(self) -> float:
        """Unix time of the first launch; NaN if there was none."""
        return min(
            (event.t for event in self.events if isinstance(event, _Launch)), default=math.nan
        )

    @property
    def place(self) -> tuple[Any, ...]:
        result = self.result
        system = ORDER.index(result.system) if result.system in ORDER else len(ORDER)
        shape = (result.system, result.micro_batches, result.label, result.seed, result.id)
        return self.source, system, *shape

    @property
    def row(self) -> dict[str, Any]:
        told = {"schema_", "machine", "replicas", "rounds", "breakdown", "switch"}
        then = self.result.switch
        return {
            "source": self.source,
            **self.result.model_dump(exclude=told),
            "replicas": _replicas(self.result.replicas),
            "plan": _plan(self.result) + ("" if then is None else f" → {_plan(then)}"),
            "machine": machine_line(self.result.machine),
            "launch": self.result.bench_id or self.result.id,
            "began": self.began,
            "config": self.config,
        }


def load_records(results_dir: Path) -> Records:
    """All records below ``results_dir``.

    A run that was begun and has no result (it is still going, or its launcher was killed) is a
    record of status "unfinished"; so is a contender of such a benchmark.

    Raises:
        ValueError: there are none, or a file is broken; the message names it.
    """
    directories = _run_directories(Path(results_dir))
    found = [run for source, directory in directories for run in _load(source, directory)]
    if not found:
        raise ValueError(f"no runs in {results_dir}: run ./reproduce.sh first")
    runs = sorted(found, key=lambda run: run.place)
    table = pd.DataFrame([run.row for run in runs]).rename_axis("run")
    rounds = _frame(
        _Round.model_fields, ([item.model_dump() for item in run.result.rounds] for run in runs)
    )
    accounts = [run.result.breakdown.items() for run in runs]
    return Records(
        table.astype({"epochs": "Int64", "final_loss": float, "accuracy": float}),
        rounds.assign(
            images_per_s=rounds["samples"] / rounds["wall_s"],
            bound_images_per_s=rounds["samples"] / rounds["compute_bound_s"],
        ),
        _frame(
            ("rank", "wall", *PARTS),
            ([{"rank": rank, **told} for rank, told in ranks] for ranks in accounts),
        ),
        _frame(_Step.model_fields, (run.events_of(_Step) for run in runs)),
        _frame(_Evaluation.model_fields, (run.events_of(_Evaluation) for run in runs)),
    )


def _frame(names: Iterable[str], groups: Iterable[Iterable[dict[str, Any]]]) -> pd.DataFrame:
    """A row an item, ordered by run and the first name; of two with the same, the last counts."""
    rows = [{"run": run, **item} for run, items in enumerate(groups) for item in items]
    frame = pd.DataFrame(rows, columns=["run", *names])
    frame = frame.astype({name: int if name in WHOLE else float for name in frame})
    key = [*frame.columns[:2]]
    return frame.drop_duplicates(key, keep="last").sort_values(key, ignore_index=True)


def _run_directories(results_dir: Path) -> Iterator[tuple[str, Path]]:
    runs = results_dir / "runs"
    if runs.is_dir():
        yield from (("", directory) for directory in sorted(runs.iterdir()) if directory.is_dir())
    reference = results_dir / "reference"
    for result in sorted(reference.rglob("result.json")):
        yield result.parent.parent.relative_to(reference).as_posix(), result.parent


def _load(source: str, directory: Path) -> list[_Run]:
    events = _read(directory / "events.jsonl", _events) or ()
    config = _read(directory / "config.toml", _toml) or {}

    def finished(content: bytes) -> list[_Result]:
        told = json.loads(content.decode())
        return [_Result(**{"id": directory.name, "label": told.get("system"), **told})]

    results = _read(directory / "result.json", finished)
    if results is None:
        results = _read(
            directory / "config.toml", lambda content: _unfinished(directory, _toml(content))
        )
    return [_Run(source, result, events, config) for result in results or []]


def _toml(content: bytes) -> dict[str, Any]:
    return tomllib.loads(content.decode())


def _read(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """``parse`` of a file's bytes, None for no file; a fault in it becomes one line naming it."""
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ValueError(_broken(path, _complaint(error))) from error
    except KeyError as error:
        raise ValueError(_broken(path, f"the key {error} is missing")) from error
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(_broken(path, str(error))) from error


def _broken(path: Path, what: str) -> str:
    return f"{path} is broken: {what}; run its config again with --fresh, or move its folder away"


def _complaint(error: ValidationError) -> str:
    """The first fault that pydantic found, with the value and what it must be."""
    fault = error.errors()[0]
    if fault["type"] == "missing":
        return f"the key {fault['loc'][-1]!r} is missing"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    key = ".".join(map(str, fault["loc"]))
    return f"{key} is {fault['input']!r}, but {fault['msg'].replace('Input should', 'must')}"


def _events(content: bytes) -> list[_Event]:
    """What a file of events says; a last line that a crash cut short is left out."""
    lines = [(n, line) for n, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    events: list[_Event] = []
    for number, line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            if number == lines[-1][0]:
                break
            raise ValueError(f"line {number} is not JSON") from None
        try:
            if (kind := _EVENTS.get(event["event"])) is not None:
                events.append(kind(**event))
        except ValidationError as error:
            raise ValueError(f"line {number} is not a valid event: {_complaint(error)}") from None
        except (KeyError, TypeError) as error:
            raise ValueError(f"line {number} is not a valid event: {error!r}") from None
    return events


def _replicas(value: int | list[int]) -> str:
    """One number if all stages have as many replicas, else one a stage, as in "2,1"."""
    counts = [value] if isinstance(value, int) else value
    return ",".join(str(count) for count in (counts if len(set(counts)) > 1 else counts[:1]))


def _plan(shape: _Result | _Switch) -> str:
    """In the papers' letters."""
    counts = {"S": shape.stages, "R": _replicas(shape.replicas), "M": shape.micro_batches}
    return " ".join(f"{key}={count}" for key, count in counts.items() if str(count) != "1") or "S=1"


def _unfinished(directory: Path, config: Mapping[str, Any]) -> list[_Result]:
    """What a directory without a result was to become: a run, or the contenders of a benchmark
    less those whose records lie beside it."""
    bench = config.get("bench")
    alone = [] if bench else [_unfinished_run(config)]
    results = []
    for contender in bench["contenders"] if bench else alone:
        identity = f"{directory.name}.{contender['label']}" if bench else directory.name
        if (directory.parent / identity / "result.json").exists():
            continue
        plan = {**config["plan"], **contender.get("plan", {})}
        result = _Result(
            schema="pipebench.result/1",
            id=identity,
            bench_id=directory.name if bench else None,
            name=config["name"],
            kind="bench" if bench else "train",
            system=contender["system"],
            label=contender["label"],
            seed=config["train"]["seed"],
            status="unfinished",
            evidence=_evidence(config.get("launch", {})),
            transport=config.get("launch", {}).get("transport", "distributed"),
            switch=contender.get("switch"),
            batch_size=contender.get("batch_size") or config["train"]["batch_size"],
            **_shape(plan),
        )
        results.append(result)
    return results


def _evidence(launch: Mapping[str, Any]) -> str:
    """The class of the times that a launch was to have."""
    emulated = launch.get("device") == "emulated" or launch.get("cluster") is not None
    return (Evidence.EMULATED if emulated else Evidence.MEASURED).label


def _unfinished_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """System and label of a training run, and what it was to switch to, as in a result."""
    system, switch = config["system"]["name"], config.get("switch")
    if switch is None:
        return {"system": system, "label": system}
    then = {"system": switch["system"]["name"], **_shape(switch["plan"])}
    both = f"{system} → {then['system']}"
    label = f"{both}@{switch.get('epoch', 'plateau')}"
    return {"system": both, "label": label, "switch": then}


def _shape(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan in short, as in a result."""
    return {
        "micro_batches": plan.get("micro_batches", 1),
        "stages": plan.get("stages", 1),
        "replicas": plan.get("replicas") or 1,
    }


def machine_line(machine: Mapping[str, Any]) -> str:
    """One line of what a record says of its machine; keys it does not know are named."""
    words = {"cores": "{} cores", "memory_gb": "{} GB memory"}
    words |= dict.fromkeys(("cpu", "accelerators", "system"), "{}")
    parts = []
    for key, value in machine.items():
        if value not in (None, "", []):
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            parts.append(words.get(key, key + " {}").format(shown))
    return ", ".join(parts) or "not recorded"
