"""One config, one run: done before, resumed, or run, and recorded whatever comes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from experiments.config import Config
from experiments.data import prepare as prepare_data
from experiments.emulation import PIXEL, check_emulation
from experiments.environment import environment
from experiments.errors import UserError, one_line
from experiments.identity import run_id
from experiments.launcher import launch, launch_spec, rank_command
from experiments.loading import load
from experiments.origin import origin_of
from experiments.outcome import Outcome
from experiments.preflight import check_checkpoint, check_launch, disk_bytes, missing_hardware
from experiments.progress import EventTail, Progress, describe
from experiments.resolve import Layers, job_of, layers_of, optimizer_of, tasks_of, warnings_of
from experiments.store import Lock, RunDirectory, Store
from experiments.summary import FINISHED, contender_events, last_status, record_ids, summarise
from runtimes.job import DataSpec, Job, Task

if TYPE_CHECKING:
    from experiments.tracking import Tracker

__all__ = ["Prepared", "RunResult", "execute", "intent", "prepare", "recompute"]

RunResult = dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A config that can be run here, or, if ``missing`` says why, cannot."""

    config: Config
    id: str
    layers: Layers
    tasks: tuple[Task, ...]
    missing: str | None


def prepare(config: Config) -> Prepared:
    """All that can be said before anything is written; UserError for what no machine can run."""
    layers = layers_of(config)
    tasks = tasks_of(config, layers)
    check_emulation(config, tasks, optimizer_of(config))
    return Prepared(config, run_id(config), layers, tasks, missing_hardware(config, tasks))


def _finished(prepared: Prepared, run: RunDirectory) -> bool:
    status = last_status(run.events())
    # What was skipped for want of hardware is not done once the hardware is there.
    return status in FINISHED and (status != "skipped_hardware" or prepared.missing is not None)


def intent(prepared: Prepared, store: Store, *, fresh: bool) -> str:
    """What :func:`execute` would do, in a few words; writes nothing."""
    run = store.run(prepared.id)
    if not fresh and _finished(prepared, run):
        return f"done: {last_status(run.events())}"
    if prepared.missing is not None:
        return f"skip: {prepared.missing}"
    manifest = None if fresh else check_checkpoint(run)
    if manifest is not None:
        return f"resume from update {manifest.step}"
    origin = origin_of(prepared.config, store, prepared.tasks[0])
    return "run" if origin is None else f"start from update {origin.step} of {origin.path.name}"


def execute(
    prepared: Prepared,
    store: Store,
    *,
    fresh: bool = False,
    stop: threading.Event | None = None,
    progress: Progress | None = None,
) -> list[RunResult]:
    """Run the config unless that was done; its result, or those of a benchmark's contenders.

    An unfinished or failed run goes on from its last checkpoint; ``fresh`` archives it and starts
    over.  Raises UserError if it cannot be started; what happens after that is in the result.
    """
    progress = progress or Progress()
    config, run = prepared.config, store.run(prepared.id)
    assert (config.sweep, config.waits_for) == (None, None), "not yet one run, with all its values"
    store.check()
    with progress.of(config.title), store.lock(prepared.id) as lock:
        if fresh:
            store.archive(prepared.id)
        trackers = {
            record: _tracker(config, run, record, progress) for record in record_ids(config, run.id)
        }
        progress.warn(warnings_of(config, prepared.tasks))
        if _finished(prepared, run):
            progress.say(f"{config.title}: done before, in {run.path}")
            results = _records(config, run, _known_environment(config, run), force=False)
        elif prepared.missing is not None:
            results = _skip(prepared, run)
        else:
            # Only a run that is not timed is followed while it runs, and only where one can look.
            live = trackers.get(run.id) if config.tracking.mode == "online" else None
            launching = _Launching(lock, stop or threading.Event(), progress, live)
            results = _attempt(prepared, store, run, launching)
        for result in results:
            trackers[result["id"]].finish(result["status"])
    _tell(config, results, progress)
    return results


@dataclass(frozen=True)
class _Launching:
    """Whom a launch has to do with: ``live`` is a tracker to feed while ranks run."""

    lock: Lock
    stop: threading.Event
    progress: Progress
    live: Tracker | None


def _tell(config: Config, results: list[RunResult], progress: Progress) -> None:
    first = results[0]
    why = f": {first['error']}" if first["error"] else ""
    progress.say(f"{config.title}: {first['status']}{why}")


def _known_environment(config: Config, run: RunDirectory) -> Mapping[str, Any]:
    return run.read_json("env.json") or environment(config.evidence)


def _skip(prepared: Prepared, run: RunDirectory) -> list[RunResult]:
    found = environment(prepared.config.evidence)
    _describe(prepared.config, run, found)
    # Appended: an earlier attempt, with more free memory, may have got somewhere.
    run.append(Outcome("skipped_hardware", prepared.missing).to_event(time.time()))
    return _records(prepared.config, run, found)


def _document(config: Config) -> dict[str, Any]:
    """The resolved config as plain data, which loads as the same config."""
    return config.model_dump(mode="json", exclude_none=True, exclude={"scales"})


def _describe(config: Config, run: RunDirectory, found: Mapping[str, Any]) -> None:
    """The part of a run directory that is known beforehand."""
    run.create()
    run.write("config.toml", tomli_w.dumps(_document(config)))
    run.write_json("env.json", found)


def _attempt(
    prepared: Prepared,
    store: Store,
    run: RunDirectory,
    launching: _Launching,
) -> list[RunResult]:
    config, progress = prepared.config, launching.progress
    check_launch(config)
    manifest = check_checkpoint(run)
    # A run that has a checkpoint of its own does not need the other's any more.
    origin = origin_of(config, store, prepared.tasks[0]) if manifest is None else None
    store.check(disk_bytes(config, prepared.layers))
    job = job_of(
        config,
        prepared.tasks,
        _data(config, store.root / "data"),
        None if origin is None else str(origin.path),
    )

    found = environment(config.evidence)
    _describe(config, run, found)
    earlier = [event["attempt"] for event in run.events() if event["event"] == "launch"]
    run.cut_events(0 if manifest is None else manifest.events)
    run.forget_attempt(resumed=manifest is not None)
    run.write_json("job.json", job.to_json())
    start = {
        "event": "launch",
        "t": time.time(),
        "attempt": max(earlier, default=0) + 1,
        "resumed_from": None if manifest is None else manifest.step,
    }
    if origin is not None:
        start["started_from"] = {"run": origin.path.name, "step": origin.step}
    run.append(start)
    # A row from now on, whatever happens to this process.
    _records(config, run, found)
    how = "starting" if manifest is None else f"resuming from update {manifest.step}"
    where = " in one process" if job.transport == "in-process" else ""
    ranks = f"{job.world_size} ranks{where}"
    progress.update(config.title, f"{how}, {ranks}, log in {run.path / 'log'}")
    outcome = launch(
        run.path,
        launch_spec(config.launch, rank_command(run.path), job.processes, prepared.id),
        keep_open=(launching.lock.descriptor,),
        stop=launching.stop,
        watch=_watch(config, run, job, launching),
    )
    run.append(outcome.to_event(time.time()))
    return _records(config, run, found)


def _data(config: Config, cache: Path) -> DataSpec:
    data = config.data
    side, channels = data.image_size, data.channels
    if config.launch.device == "emulated":
        channels, side, _ = PIXEL
    try:
        return prepare_data(
            data.set,
            image_size=side,
            cache=cache,
            root=None if data.root is None else Path(data.root).expanduser().absolute(),
            train_samples=data.sizes.train,
            validation_samples=data.sizes.validation,
            held_out=data.sizes.held_out,
            seed=data.seed,
            download=data.download,
            channels=channels,
            classes=data.classes,
        )
    except ValueError as error:
        raise UserError(f"{config.name}: {one_line(error)}") from None


def _watch(
    config: Config, run: RunDirectory, job: Job, launching: _Launching
) -> Callable[[], None]:
    """Tells of new events while ranks run."""
    tail = EventTail(run.path / "events.jsonl")
    rounds = 0 if job.bench is None else job.bench.rounds

    def watch() -> None:
        for event in tail.read():
            text = describe(event, epochs=job.epochs, rounds=rounds)
            if text is not None:
                launching.progress.update(config.title, text)
            if event["event"] == "checkpoint" and launching.live is not None:
                launching.live.feed()

    return watch


def _records(
    config: Config, run: RunDirectory, found: Mapping[str, Any], *, force: bool = True
) -> list[RunResult]:
    """Write (or, not by ``force``, read what is there of) the results that the events give."""
    events = run.events()
    results = []
    for record, contender in record_ids(config, run.id).items():
        directory = RunDirectory(run.path.with_name(record))
        known = None if force else directory.read_json("result.json")
        # A launcher that is killed between event and result leaves the older result.
        if known is None or known["status"] != last_status(events):
            part = events
            if config.bench is not None:
                _describe(config, directory, found)
                part = contender_events(events, contender.label)
                directory.write_events(part)
            known = summarise(config, record, found, part)
            directory.write_json("result.json", known)
        results.append(known)
    return results


def recompute(run: RunDirectory) -> RunResult:
    """result.json of a record, made anew from the other files of its directory."""
    config = load(str(run.path / "config.toml"))
    result = summarise(config, run.id, _known_environment(config, run), run.events())
    run.write_json("result.json", result)
    return result


def _tracker(config: Config, run: RunDirectory, record: str, progress: Progress) -> Tracker:
    """The W&B run of a record: fed from its events, outside of what is timed."""
    from experiments.tracking import Tracker

    label = "" if config.bench is None else f"/{record_ids(config, run.id)[record].label}"
    return Tracker(
        run.path.with_name(record),
        _document(config),
        run_id=record,
        name=config.title + label,
        mode=config.tracking.mode,
        warn=lambda text: progress.say(f"{config.title}{label}: {text}"),
    )
