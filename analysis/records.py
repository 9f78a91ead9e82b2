"""Run records as tidy tables: what the tables and figures know of a results directory.

A results directory holds ``runs/<id>/`` (fresh) and ``reference/**/`` (committed, each from the
machine it names).  Only result.json, events.jsonl and config.toml are read.  A failed run is a
record like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.run_files import (
    Evaluation,
    Event,
    Launch,
    Result,
    Round,
    Step,
    Switch,
    read_directory,
)

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


@dataclass(frozen=True)
class Records:
    """All records, fresh ones first; then a system, its peer, the next system, as in tables.

    ``runs``: a row a run, or a contender of a benchmark; the others refer to its index, "run".
    ``source`` is "" for a fresh run, else the path below reference/ that holds it; ``evidence`` is
    the class of its times (ranks that share a process, ``transport`` "in-process", have none),
    ``launch`` who its rounds may be paired with, ``began`` Unix time, ``config`` a dict.
    ``rounds``: a row a timed round: ``samples`` trained in ``wall_s`` seconds of the slowest rank;
    ``compute_bound_s`` is the schedule's own lower bound, from slices measured in this round, and
    ``reference_s`` what a fixed piece of work took just before and after.
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


@dataclass(frozen=True)
class _Run:
    source: str
    result: Result
    events: Sequence[Event]
    config: Mapping[str, Any]

    def events_of(self, kind: type[Event]) -> list[dict[str, Any]]:
        return [event.model_dump() for event in self.events if isinstance(event, kind)]

    @property
    def began(self) -> float:
        """Unix time of the first launch; NaN if there was none."""
        return min(
            (event.t for event in self.events if isinstance(event, Launch)), default=math.nan
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
        Round.model_fields, ([item.model_dump() for item in run.result.rounds] for run in runs)
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
        _frame(Step.model_fields, (run.events_of(Step) for run in runs)),
        _frame(Evaluation.model_fields, (run.events_of(Evaluation) for run in runs)),
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
    results, events, config = read_directory(directory)
    return [_Run(source, result, events, config) for result in results]


def _replicas(value: int | list[int]) -> str:
    """One number if all stages have as many replicas, else one a stage, as in "2,1"."""
    counts = [value] if isinstance(value, int) else value
    return ",".join(str(count) for count in (counts if len(set(counts)) > 1 else counts[:1]))


def _plan(shape: Result | Switch) -> str:
    """In the papers' letters."""
    counts = {"S": shape.stages, "R": _replicas(shape.replicas), "M": shape.micro_batches}
    return " ".join(f"{key}={count}" for key, count in counts.items() if str(count) != "1") or "S=1"


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
