"""A training run: segments between drains; evaluations, checkpoints and the switch at drains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtimes.execution.checkpoint import load_state, save_state
from runtimes.execution.engine import Accuracy, Feed, Segment, SegmentReport, added
from runtimes.execution.events import EventLog
from runtimes.execution.optimizer import learning_rate
from runtimes.execution.starting import started
from runtimes.execution.switching import switch_reason
from runtimes.execution.team import Team
from runtimes.job import Job, Task
from runtimes.plan import Plan
from runtimes.systems import SYSTEMS, get_system
from runtimes.tracing import TRACE_FILE, write_trace

__all__ = ["DivergedError", "next_drain", "rank_entries", "run_training"]


class DivergedError(RuntimeError):
    """A loss is not finite any more."""


def rank_entries(
    plan: Plan, reports: Sequence[SegmentReport], *, timed: bool = True
) -> list[dict[str, Any]]:
    """The "ranks" of a segment or round event; ``timed``: with the parts of their wall time."""
    entries = []
    for rank, report in enumerate(reports):
        stage, replica = plan.place(rank)
        place = {"rank": rank, "stage": stage, "replica": replica}
        times = {"wall": report.wall_s} | report.breakdown if timed else {}
        live = {
            "live_versions": report.live_versions,
            "peak_in_flight": report.peak_in_flight,
        }
        entries.append(place | times | live)
    return entries


@dataclass(frozen=True)
class _Start:
    """Where a run begins, or goes on: ``step`` updates are done, ``state`` is None for none.

    ``accuracies``: of the evaluations so far; ``switched``: the switch has been made; ``again``: it
    goes on from a checkpoint of its own.
    """

    step: int
    state: Mapping[str, Any] | None
    accuracies: list[float]
    switched: bool
    again: bool = False


def _start(job: Job, run_dir: Path, log: EventLog) -> _Start:
    """From this run's latest checkpoint, or else the one of the run that it starts from.

    What was decided before is read from the record, so that a resumed run decides no differently.
    """
    found = load_state(run_dir)
    if found is None and job.start_from is not None:
        found = load_state(Path(job.start_from))
        if found is None:
            raise ValueError(f"there is no checkpoint in {job.start_from} to start from")
        return _Start(found[0], started(job, found[1]), accuracies=[], switched=False)
    if found is None:
        return _Start(0, None, [], False)
    past = [event for event in log.events() if event.get("step", 0) <= found[0]]
    accuracies = [event["accuracy"] for event in past if event["event"] == "evaluation"]
    switched = any(event["event"] == "switch" for event in past)
    return _Start(*found, accuracies, switched, again=True)


def run_training(
    build: Callable[[Task], Team],
    job: Job,
    run_dir: Path,
    feed: Feed,
    validation: Feed,
    note: Callable[[str], None],
) -> None:
    """Train from the latest checkpoint (or the start) to the last epoch; every process calls it.

    ``build`` makes the team of a task: of the job's, or of the one that it switches to.
    """
    log = EventLog(run_dir)
    per_epoch = len(feed.batch_sizes())
    start = _start(job, run_dir, log)
    epoch, rest = divmod(start.step, per_epoch)
    if rest:
        raise ValueError(
            f"the checkpoint's {start.step} updates are no whole number of epochs of {per_epoch}"
        )
    switch, accuracies = (None if start.switched else job.switch), start.accuracies
    task = job.switch.task if job.switch is not None and start.switched else job.tasks[0]
    team = build(task)
    if start.state is not None:
        team.load(start.state)
    traced = start.again  # Of the run's first segment.
    del start  # Its tensors are loaded.
    while epoch < job.epochs:
        first, epoch = epoch, next_drain(job, task, epoch)
        done = epoch * per_epoch
        sizes = feed.batch_sizes() * (epoch - first)
        segment = Segment(first * per_epoch, sizes)
        reports = team.train(segment)
        losses = _losses(reports, segment)
        _record(team, log, _segment_events(job, team, segment, per_epoch, losses, reports))
        if not traced:
            _trace(team, task, segment, run_dir)
            traced = True
        _check_finite(losses)
        if _due(job, epoch, job.evaluate_every):
            note("evaluation")
            event = _evaluate(team, job, validation) | {"step": done, "epoch": epoch - 1}
            _record(team, log, [event])
            _check_evaluation(event)
            accuracies.append(event["accuracy"])
        reason = switch_reason(switch, epoch, accuracies) if switch and epoch < job.epochs else None
        if switch is not None and reason is not None:
            note("switch")
            names = {"from": task.system, "to": switch.task.system}
            _record(team, log, [{"event": "switch", "step": done, **names, "reason": reason}])
            state, task, switch = team.hand_over(switch.task.plan), switch.task, None
            del team  # Its memory is free before the next one takes as much.
            team = build(task)
            team.load(state)
            del state
        if _due(job, epoch, job.checkpoint_every):
            note("checkpoint")
            _record(team, log, [{"event": "checkpoint", "step": done}])
            save_state(run_dir, done, team, log.lines)


def _trace(team: Team, task: Task, segment: Segment, run_dir: Path) -> None:
    words = f"updates {segment.first} … {segment.first + len(segment.batches) - 1}"
    timeline = team.timeline(task.label, segment, words)
    if timeline is not None:
        write_trace(run_dir / TRACE_FILE, [timeline])
    # The others would begin the next segment, and wait in it for process 0, which is still writing.
    team.gather(None)


def _due(job: Job, epoch: int, every: int) -> bool:
    return epoch % every == 0 or epoch == job.epochs


def next_drain(job: Job, task: Task, epoch: int) -> int:
    """How many epochs are done at the end of the segment that begins after ``epoch`` of them."""
    if task.system not in SYSTEMS or get_system(task.system, task.options).drain == "epoch":
        return epoch + 1
    switch = None if job.switch is None else job.switch.epoch
    for end in range(epoch + 1, job.epochs):
        if end % job.evaluate_every == 0 or end % job.checkpoint_every == 0 or end == switch:
            return end
    return job.epochs


def _record(team: Team, log: EventLog, events: Sequence[Mapping[str, Any]]) -> None:
    if team.process == 0:
        log.write(events)


def _losses(reports: Sequence[SegmentReport], segment: Segment) -> dict[int, float]:
    steps = range(segment.first, segment.first + len(segment.batches))
    return {step: sum(report.losses.get(step, 0.0) for report in reports) for step in steps}


def _check_finite(losses: Mapping[int, float]) -> None:
    for step, loss in losses.items():
        if not math.isfinite(loss):
            raise DivergedError(f"the loss of step {step} is {loss}: lower the learning rate")


def _pipeline_losses(
    reports: Sequence[SegmentReport], plan: Plan, step: int
) -> list[float | str | None]:
    """Of each pipeline; None for one that has no sample of the update's batch."""
    shares = [report.pipeline_losses.get(step, {}) for report in reports]
    found: list[float | str | None] = []
    for pipeline in range(plan.pipelines):
        mine = [share[pipeline] for share in shares if pipeline in share]
        found.append(_strict(sum(mine)) if mine else None)
    return found


def _tied(plan: Plan, reports: Sequence[SegmentReport]) -> dict[str, Any]:
    """What a segment event says of parallel pipelines that are tied to a reference."""
    squares = [report.squared_distances for report in reports if report.squared_distances]
    if not squares:
        return {}
    # Of the whole model, over its stages.
    distances = [_strict(math.sqrt(sum(of_one))) for of_one in zip(*squares, strict=True)]
    orders = [reports[stage.ranks[0]].averaged for stage in plan.stages]
    return {"distances": distances} | ({} if None in orders else {"averaged": orders})


def _segment_events(
    job: Job,
    team: Team,
    segment: Segment,
    per_epoch: int,
    losses: Mapping[int, float],
    reports: Sequence[SegmentReport],
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for step, size in enumerate(segment.batches, segment.first):
        rate = learning_rate(job.optimizer, job.learning_rate, step, per_epoch, job.epochs)
        event = {
            "event": "step",
            "step": step,
            "epoch": step // per_epoch,
            "loss": _strict(losses[step]),
            "lr": rate,
            "samples": size,
        }
        if team.plan.pipelines > 1:
            event["losses"] = _pipeline_losses(reports, team.plan, step)
        events.append(event)
    # Ranks that take turns in one process have no time worth a record.
    wall = {"wall_s": max(report.wall_s for report in reports)} if team.timed else {}
    events.append(
        {
            "event": "segment",
            "kind": "train",
            "first": segment.first,
            "last": segment.first + len(segment.batches),
            **wall,
            "samples": sum(segment.batches),
            **_tied(team.plan, reports),
            "ranks": rank_entries(team.plan, reports, timed=team.timed),
        }
    )
    return events


def _strict(loss: float) -> float | str:
    """JSON has no word for what is not finite: a record has it as text."""
    return loss if math.isfinite(loss) else str(loss)


def _evaluate(team: Team, job: Job, validation: Feed) -> dict[str, Any]:
    samples = sum(validation.batch_sizes())
    shares = team.evaluate(validation, samples, job.evaluation_batch_size)
    whole = added(shares)
    if whole.samples != samples:
        raise RuntimeError(f"evaluated {whole.samples} of {samples} samples")
    event = {"event": "evaluation", **_quality(whole), "samples": samples}
    return event if whole.mean is None else event | {"mean_of_copies": _quality(whole.mean)}


def _quality(found: Accuracy) -> dict[str, Any]:
    return {
        "accuracy": found.correct / found.samples,
        "loss": _strict(found.loss_sum / found.samples),
    }


def _check_evaluation(event: Mapping[str, Any]) -> None:
    if isinstance(event["loss"], str):
        raise DivergedError(
            f"the validation loss after {event['step']} updates is {event['loss']}: "
            "lower the learning rate"
        )
