"""What the files of one run's directory say: parsed, checked, and filled in for a run without a
result.  A fault in a file is a ValueError of one line that names it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

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

__all__ = ["Evaluation", "Event", "Launch", "Result", "Round", "Step", "Switch", "read_directory"]

T = TypeVar("T")


class _Strict(BaseModel):
    """No value is turned into another type; a whole number is a float as well."""

    model_config = ConfigDict(strict=True, frozen=True)


class Round(_Strict):
    round: int
    position: int
    wall_s: float = Field(gt=0)
    samples: int
    compute_bound_s: float | None = None
    reference_s: float | None = None


def _number(loss: object) -> object:
    return float(loss) if loss in ("nan", "inf", "-inf") else loss


class Step(_Strict):
    step: int
    epoch: int
    loss: Annotated[float | None, BeforeValidator(_number)]
    """Strict JSON has no NaN: a loss that is not finite may be stored as null, or as text."""
    samples: int


class Evaluation(_Strict):
    step: int
    epoch: int
    accuracy: float


class Launch(_Strict):
    """Ranks were about to start, at Unix time ``t``."""

    t: float


class Switch(_Strict):
    """The system that a run ended with, and after how many updates it took over."""

    system: str
    stages: int
    replicas: int | list[int]
    micro_batches: int
    step: int | None = None


class Result(_Strict):
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
    switch: Switch | None = None
    batch_size: int
    micro_batches: int
    stages: int
    replicas: int | list[int]
    bench_id: str | None = None
    epochs: int | None = None
    final_loss: float | None = None
    accuracy: float | None = None
    rounds: list[Round] = []
    breakdown: dict[Annotated[int, Strict(False)], dict[str, float | None]] = {}


Event = Step | Evaluation | Launch
_EVENTS: dict[str, type[Event]] = {"step": Step, "evaluation": Evaluation, "launch": Launch}


def read_directory(
    directory: Path,
) -> tuple[Sequence[Result], Sequence[Event], Mapping[str, Any]]:
    """Its results (one, or of a benchmark without any those of its contenders), events, config."""
    events = _read(directory / "events.jsonl", _events) or ()
    config = _read(directory / "config.toml", _toml) or {}

    def finished(content: bytes) -> list[Result]:
        told = json.loads(content.decode())
        return [Result(**{"id": directory.name, "label": told.get("system"), **told})]

    results = _read(directory / "result.json", finished)
    if results is None:
        results = _read(
            directory / "config.toml", lambda content: _unfinished(directory, _toml(content))
        )
    return results or [], events, config


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


def _events(content: bytes) -> list[Event]:
    """What a file of events says; a last line that a crash cut short is left out."""
    lines = [(n, line) for n, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    events: list[Event] = []
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


def _unfinished(directory: Path, config: Mapping[str, Any]) -> list[Result]:
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
        result = Result(
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
