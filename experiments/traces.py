"""Traces of runs on the command line: where a run's lies, and what is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.errors import UserError, did_you_mean, one_line
from experiments.identity import bench_of
from experiments.reports import columns
from experiments.store import Store, writing
from runtimes.timeline import Timeline
from runtimes.tracing import TRACE_FILE, read_trace, write_trace

__all__ = ["Found", "copy_trace", "find_trace", "timelines_of", "trace_text", "traces_document"]


@dataclass(frozen=True)
class Found:
    """``file`` holds what was asked for: all of it, or, with ``label``, one contender."""

    file: Path
    label: str | None = None

    @property
    def name(self) -> str:
        """Of the run, or the file, in short."""
        name = self.file.parent.name if self.file.name == TRACE_FILE else self.file.stem
        return name if self.label is None else f"{name}.{self.label}"


def find_trace(given: str, store: Store) -> Found:
    """The trace of a run, or of a benchmark's contender, by id or directory, or a trace's own file;
    UserError if there is none."""
    named = Path(given).expanduser()
    path = store.run(given).path if named.name == given else named.absolute()
    # A file in the working directory has a mere name too.
    if not path.exists() and named.is_file():
        path = named.absolute()
    if path.is_file():
        return Found(path)
    if (path / TRACE_FILE).is_file():
        return Found(path / TRACE_FILE)
    bench = bench_of(path.name)
    if bench is not None and (path.with_name(bench) / TRACE_FILE).is_file():
        return Found(path.with_name(bench) / TRACE_FILE, path.name.removeprefix(f"{bench}."))
    known = [file.parent.name for file in store.root.glob(f"runs/*/{TRACE_FILE}")]
    if not path.is_dir():
        raise UserError(
            f"there is no run {given!r} in {path.parent}, and no such file"
            f"{did_you_mean(given, known)}"
        )
    raise UserError(
        f"run {path.name} has no trace: ranks in one process, torch's own systems and unfinished "
        f"runs leave none{did_you_mean(given, known)}"
    )


def timelines_of(found: Found) -> tuple[Timeline, ...]:
    """What was asked for; UserError if the file is broken, or without that contender."""
    try:
        timelines = read_trace(found.file)
    except (OSError, ValueError) as error:
        raise UserError(one_line(error)) from None
    if found.label is None:
        return timelines
    chosen = tuple(timeline for timeline in timelines if timeline.label == found.label)
    if not chosen:
        labels = [timeline.label for timeline in timelines]
        raise UserError(
            f"{found.file} has no contender {found.label!r}{did_you_mean(found.label, labels)}"
        )
    return chosen


def copy_trace(timelines: Sequence[Timeline], to: Path) -> None:
    with writing(to):
        write_trace(to, timelines)


def traces_document(file: Path, timelines: Sequence[Timeline]) -> dict[str, Any]:
    """What is in a trace: times in seconds, shares of the time 0 … 1."""
    return {
        "schema": "pipebench.traces/1",
        "file": str(file),
        "timelines": [_summary(timeline) for timeline in timelines],
    }


def _summary(timeline: Timeline) -> dict[str, Any]:
    plan, held = timeline.plan, len(timeline.batches.sizes)
    shares = timeline.idle_shares()
    return {
        "label": timeline.label,
        "evidence": timeline.evidence,
        "segment": timeline.segment,
        "first_update": timeline.first,
        "batches": held,
        "segment_batches": held if timeline.cut is None else timeline.cut.batches,
        "makespan_seconds": timeline.makespan_seconds,
        "ranks": [
            {
                "rank": rank,
                "stage": plan.place(rank)[0],
                "replica": plan.place(rank)[1],
                "actions": len(timeline.ranks[rank]),
                "idle_share": shares[rank],
            }
            for rank in range(plan.world_size)
        ],
    }


def trace_text(document: Mapping[str, Any]) -> str:
    """The document as a table, below the name of the file."""
    rows = [["system", "evidence", "of", "batches", "actions", "makespan", "idle, rank by rank"]]
    for told in document["timelines"]:
        held, there = told["batches"], told["segment_batches"]
        rows.append(
            [
                told["label"],
                told["evidence"],
                told["segment"],
                str(held) if held == there else f"first {held} of {there}",
                str(sum(rank["actions"] for rank in told["ranks"])),
                f"{told['makespan_seconds']:.4g} s",
                " ".join(f"{rank['idle_share']:.1%}" for rank in told["ranks"]),
            ]
        )
    return f"{document['file']}\n{columns(rows)}"
