"""Weights & Biases as a sink of a run's record.

The launcher feeds it from events.jsonl outside timed regions; ranks know nothing of it.  A run of
ours is one W&B run of the same id, and a W&B step is the number of updates done (for a contender
of a benchmark, of rounds begun), so steps only rise.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.errors import one_line
from experiments.store import RunDirectory
from experiments.summary import FINISHED
from runtimes.execution.trace import PARTS

__all__ = ["Row", "Tracker", "rows"]

Event = Mapping[str, Any]
Mode = Literal["offline", "online", "off"]

INIT_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 120

# W&B starts one process for all runs of ours; runs that end side by side share it.
_service = threading.Lock()
_open_runs = 0


@dataclass(frozen=True)
class Row:
    """One point of the history."""

    step: int
    values: Mapping[str, float]


def rows(events: Sequence[Event]) -> list[Row]:
    """The history that these events make: rising steps, everything of one step in one row."""
    merged: dict[int, dict[str, float]] = {}
    for event in events:
        step, values = _point(event)
        if values:
            merged.setdefault(step, {}).update(values)
    return [Row(step, merged[step]) for step in sorted(merged)]


def _point(event: Event) -> tuple[int, dict[str, float]]:
    """(W&B step, values) of an event; no values if it is none of the history."""
    kind = event["event"]
    if kind == "step":
        # Steps count from 0; a loss that is not finite is recorded as text.
        loss = float(event["loss"])
        values = {"train/loss": loss, "train/lr": event["lr"], "epoch": event["epoch"]}
        return event["step"] + 1, values | _each("train/loss", event.get("losses", ()))
    if kind == "segment" and event["kind"] == "train":
        distances = _each("train/distance_to_reference", event.get("distances", ()))
        if "wall_s" not in event:  # Ranks that take turns in one process have no speed.
            return event["last"], distances
        throughput = {"train/images_per_s": event["samples"] / event["wall_s"]}
        return event["last"], distances | throughput | _times("time", event["ranks"])
    if kind == "evaluation":
        # Of the reference, where there are copies.
        return event["step"], _quality("validation", event) | (
            _quality("validation/mean_of_copies", event["mean_of_copies"])
            if "mean_of_copies" in event
            else {}
        )
    if kind == "round":
        label = event["task"]
        values = {f"bench/images_per_s/{label}": event["samples"] / event["wall_s"]}
        return event["round"], values | _times(f"bench/time/{label}", event["ranks"])
    return 0, {}


def _quality(prefix: str, found: Event) -> dict[str, float]:
    return {f"{prefix}/accuracy": found["accuracy"], f"{prefix}/loss": float(found["loss"])}


def _each(prefix: str, values: Sequence[float | str | None]) -> dict[str, float]:
    """Of each pipeline; None for one that had no sample."""
    return {
        f"{prefix}/p{pipeline}": float(value)
        for pipeline, value in enumerate(values)
        if value is not None
    }


def _times(prefix: str, ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each part of the wall time, as the mean over ranks."""
    return {
        f"{prefix}/{part}": sum(rank.get(part, 0.0) for rank in ranks) / len(ranks)
        for part in PARTS
        if ranks
    }


class Tracker:
    """Copies the events of one run directory into W&B, each exactly once.

    Offline, every launch writes the whole history anew, into a directory below RUN_DIR/wandb that
    takes the place of what an earlier launch left: a W&B file cannot be continued after a kill.
    Online, the W&B run is resumed and only later steps are sent; as what was sent cannot be taken
    back, steps that a resumed run would do again are not sent before the run has ended for good.
    No method raises an Exception: what W&B refuses becomes one line, by default in RUN_DIR/log.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        run_id: str,
        name: str,
        mode: Mode,
        project: str = "pipebench",
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._directory = RunDirectory(run_dir)
        self._config, self._id, self._name = dict(config), run_id, name
        self._mode, self._project = mode, project
        self._warn = warn or self._log_line
        self._run: Any = None
        self._next_step = 0
        self._ended = mode == "off"

    def feed(self) -> None:
        """Send what is durable: the events that the latest checkpoint vouches for."""
        with self._tolerant():
            if not self._complete():
                self._send(self._durable(), last_row=False)

    def finish(self, status: str) -> None:
        """Send the rest and a summary, and close the W&B run; nothing to do if that was done."""
        with self._tolerant():
            if self._complete():
                return
            final = self._mode == "offline" or status in FINISHED
            events = self._directory.events()
            self._send(events if final else self._durable(), last_row=final)
            run = self._started()
            run.summary.update(_summary(events, status))
            with _service:
                run.finish(exit_code=0 if status in ("ok", "skipped_hardware") else 1)
            self._close()
            self._directory.write_json("wandb/complete.json", self._fingerprint())
            self._ended = True

    def _send(self, events: Sequence[Event], *, last_row: bool) -> None:
        """``last_row``: also the row of the highest step, which more events may yet join."""
        history = rows(events)
        for row in history if last_row else history[:-1]:
            run = self._started()
            if row.step >= self._next_step:
                run.log(dict(row.values), step=row.step, commit=True)
                self._next_step = row.step + 1

    def _durable(self) -> list[dict[str, Any]]:
        latest = self._directory.read_json("checkpoint/latest.json")
        return self._directory.events()[: latest["events"]] if latest else []

    def _started(self) -> Any:
        global _open_runs
        if self._run is None:
            folder = self._directory.path / "wandb"
            if self._mode == "offline":
                _remove_offline(folder, self._id)
            folder.mkdir(exist_ok=True)
            with _service, _quiet(folder, offline=self._mode == "offline"):
                import wandb

                wanted: dict[str, Any] = {
                    "mode": self._mode,
                    "console": "off",
                    "silent": True,
                    "disable_git": True,
                    "disable_code": True,
                    "save_code": False,
                    "x_disable_meta": True,
                    "x_disable_stats": True,
                    "x_disable_machine_info": True,
                    "x_save_requirements": False,
                    "reinit": "create_new",
                    "init_timeout": INIT_TIMEOUT_S,
                    "finish_timeout": FINISH_TIMEOUT_S,
                    "finish_timeout_raises": True,
                }
                # Some are younger than the oldest W&B that serves.
                known = {k: v for k, v in wanted.items() if k in wandb.Settings.model_fields}
                self._run = wandb.init(
                    project=self._project,
                    id=self._id,
                    name=self._name,
                    config=self._config,
                    dir=str(self._directory.path),
                    resume="allow",
                    settings=wandb.Settings(**known),
                )
                _open_runs += 1
                self._next_step = self._run.step
        return self._run

    def _close(self) -> None:
        """Let W&B's process end with the last run that needs it."""
        global _open_runs
        self._run = None
        with _service:
            _open_runs -= 1
            if not _open_runs:
                import wandb

                wandb.teardown()

    def _fingerprint(self) -> dict[str, str]:
        events = self._directory.path / "events.jsonl"
        content = events.read_bytes() if events.exists() else b""
        return {"mode": self._mode, "events_sha256": hashlib.sha256(content).hexdigest()}

    def _complete(self) -> bool:
        """Whether W&B has all of events.jsonl already, perhaps from an earlier process."""
        if not self._ended:
            self._ended = self._directory.read_json("wandb/complete.json") == self._fingerprint()
        return self._ended

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # The record is whole without W&B, whatever ails it.
            self._ended = True
            with contextlib.suppress(Exception):
                self._warn(f"W&B does not have this run: {one_line(error) or type(error).__name__}")
            if self._run is not None:
                with contextlib.suppress(Exception):
                    self._close()

    def _log_line(self, text: str) -> None:
        with (self._directory.path / "log").open("a") as log:
            log.write(f"warning: {text}\n")


def _summary(events: Sequence[Event], status: str) -> dict[str, Any]:
    """How the run ended; W&B itself keeps the last value of each key of the history."""
    steps = [event for event in events if event["event"] == "step"]
    accuracies = [event["accuracy"] for event in events if event["event"] == "evaluation"]
    errors = [event.get("error") for event in events if event["event"] == "end"]
    found = {
        "status": status,
        "error": errors[-1] if errors else None,
        "steps": len(steps),
        "final_loss": float(steps[-1]["loss"]) if steps else None,
        "accuracy": accuracies[-1] if accuracies else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _remove_offline(folder: Path, run_id: str) -> None:
    """Remove the directories of this W&B run that were never synced: the next one has it all."""
    ours = re.compile(rf"offline-run-\d{{8}}_\d{{6}}-{re.escape(run_id)}")
    for path in folder.glob("offline-run-*"):
        if ours.fullmatch(path.name) and not any(path.glob("*.synced")):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _quiet(folder: Path, *, offline: bool) -> Iterator[None]:
    """Settings that W&B takes only from the environment, and no question to the terminal."""
    changed = {"WANDB_CACHE_DIR": str(folder / "cache")}
    if offline:
        # Reports of W&B's own errors would look up a host.
        changed["WANDB_ERROR_REPORTING"] = "false"
    before = {name: os.environ.get(name) for name in changed}
    keyboard = sys.stdin
    os.environ.update(changed)
    try:
        with open(os.devnull) as nothing:
            sys.stdin = nothing
            yield
    finally:
        sys.stdin = keyboard
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
