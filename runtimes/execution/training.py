"""A training run: segments between drains, with evaluations and checkpoints at the drains."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from runtimes.execution.checkpoint import load_state, save_state
from runtimes.execution.engine import Accuracy, Engine, Feed, Segment, SegmentReport
from runtimes.execution.events import EventLog
from runtimes.execution.optimizer import learning_rate
from runtimes.job import Job
from runtimes.plan import Plan

__all__ = ["DivergedError", "gather", "rank_entries", "run_training"]


class DivergedError(RuntimeError):
    """A loss is not finite any more."""


def gather(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks; a collective, outside timed regions."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def rank_entries(plan: Plan, reports: list[SegmentReport]) -> list[dict[str, Any]]:
    """The "ranks" of a segment or round event."""
    entries = []
    for rank, report in enumerate(reports):
        stage, replica = plan.place(rank)
        place = {"rank": rank, "stage": stage, "replica": replica}
        live = {
            "live_versions": report.live_versions,
            "peak_in_flight": report.peak_in_flight,
        }
        entries.append(place | {"wall": report.wall_s} | report.breakdown | live)
    return entries


def run_training(
    engine: Engine,
    job: Job,
    run_dir: Path,
    feed: Feed,
    validation: Feed,
    note: Callable[[str], None],
) -> None:
    """Train from the latest checkpoint (or step 0) to the last epoch; every rank calls it."""
    log = EventLog(run_dir)
    first = 0
    found = load_state(run_dir)
    if found is not None:
        first, state = found
        engine.load(state, first)
    per_epoch = len(feed.batch_sizes(0))
    for epoch in range(first // per_epoch, job.epochs):
        sizes = feed.batch_sizes(epoch)
        begin = epoch * per_epoch
        reports = gather(engine.train(Segment(begin, sizes)))
        last = epoch + 1 == job.epochs
        done = begin + len(sizes)
        losses = _losses(reports, begin, len(sizes))
        events = _segment_events(job, epoch, begin, sizes, losses, reports)
        if dist.get_rank() == 0:
            log.write(events)
        _check_finite(losses)
        if last or (epoch + 1) % job.evaluate_every == 0:
            note("evaluation")
            event = _evaluate(engine, job, validation) | {"step": done, "epoch": epoch}
            if dist.get_rank() == 0:
                log.write([event])
            if isinstance(event["loss"], str):
                raise DivergedError(
                    f"the validation loss after {done} updates is {event['loss']}: "
                    "lower the learning rate"
                )
        if last or (epoch + 1) % job.checkpoint_every == 0:
            note("checkpoint")
            if dist.get_rank() == 0:
                log.write([{"event": "checkpoint", "step": done}])
            save_state(run_dir, done, engine.state(), log.lines)


def _losses(reports: list[SegmentReport], first: int, count: int) -> dict[int, float]:
    steps = range(first, first + count)
    return {step: sum(report.losses.get(step, 0.0) for report in reports) for step in steps}


def _check_finite(losses: dict[int, float]) -> None:
    for step, loss in losses.items():
        if not math.isfinite(loss):
            raise DivergedError(f"the loss of step {step} is {loss}: lower the learning rate")


def _segment_events(
    job: Job,
    epoch: int,
    first: int,
    sizes: tuple[int, ...],
    losses: dict[int, float],
    reports: list[SegmentReport],
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for index, size in enumerate(sizes):
        step = first + index
        rate = learning_rate(job.optimizer, job.learning_rate, step, len(sizes), job.epochs)
        events.append(
            {
                "event": "step",
                "step": step,
                "epoch": epoch,
                "loss": _strict(losses[step]),
                "lr": rate,
                "samples": size,
            }
        )
    events.append(
        {
            "event": "segment",
            "kind": "train",
            "first": first,
            "last": first + len(sizes),
            "wall_s": max(report.wall_s for report in reports),
            "samples": sum(sizes),
            "ranks": rank_entries(job.tasks[0].plan, reports),
        }
    )
    return events


def _strict(loss: float) -> float | str:
    """JSON has no word for what is not finite: a record has it as text."""
    return loss if math.isfinite(loss) else str(loss)


def _evaluate(engine: Engine, job: Job, validation: Feed) -> dict[str, Any]:
    samples = sum(validation.batch_sizes(0))
    shares: list[Accuracy] = gather(engine.evaluate(validation, samples, job.evaluation_batch_size))
    counted = sum(share.samples for share in shares)
    if counted != samples:
        raise RuntimeError(f"evaluated {counted} of {samples} samples")
    return {
        "event": "evaluation",
        "accuracy": sum(share.correct for share in shares) / samples,
        "loss": _strict(sum(share.loss_sum for share in shares) / samples),
        "samples": samples,
    }
