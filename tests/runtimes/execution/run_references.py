"""What a training run of any systems, one after the other, must come to: references in a chain,
each of which starts from the state that the one before left behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtimes.job import Job, Task
from runtimes.model.stack import build_stack
from tests.oracles import asynchronous, synchronous
from tests.oracles.synchronous import Batch, History, State
from tests.runtimes.execution.runs import MODEL, feeds, losses, state_of
from tests.runtimes.transparency import differences, recipe_of

__all__ = ["Phase", "phases_of", "unlike_its_references", "unlike_plain_training"]


@dataclass(frozen=True)
class Phase:
    """A system, and how many epochs each of its segments lasts."""

    task: Task
    segments: tuple[int, ...]


def phases_of(job: Job) -> tuple[Phase, ...]:
    """Of a run that drains after every epoch, with a switch after a given one, if any."""
    if job.switch is None:
        return (Phase(job.tasks[0], (1,) * job.epochs),)
    first = job.switch.epoch
    assert first is not None
    rest = job.epochs - first
    return Phase(job.tasks[0], (1,) * first), Phase(job.switch.task, (1,) * rest)


def unlike_its_references(
    run_dir: Path, data: Path, job: Job, limit: float, phases: Sequence[Phase] | None = None
) -> list[str]:
    """What of a run's losses and last state, relative to its size, differs by more than ``limit``
    from the references; ``job``: what all phases share."""
    histories = list(_histories(job, data, phases or phases_of(job)))
    theirs = [loss for history in histories for loss in history.losses]
    found = [
        f"loss of step {step}: {our}, but {their}"
        for step, (our, their) in enumerate(zip(losses(run_dir), theirs, strict=True))
        if not abs(our - their) <= limit * their
    ]
    return found + differences(state_of(run_dir), _flat(histories[-1].ends[-1]), limit)


def unlike_plain_training(run_dir: Path, data: Path, job: Job, limit: float) -> list[str]:
    """The same of synchronous systems, all of which train as one process would."""
    plain = Phase(replace(job.tasks[0], system="dp"), (job.epochs,))
    return unlike_its_references(run_dir, data, job, limit, [plain])


def _histories(job: Job, data: Path, phases: Sequence[Phase]) -> Iterator[History]:
    stack = build_stack(MODEL)
    weights = stack.initial_weights(0, len(stack), job.seed, dtype=torch.float64)
    state, epoch = State(weights), 0
    per_epoch = len(feeds(job, data)[0].batch_sizes())
    for phase in phases:
        segments, rates = [], []
        for epochs in phase.segments:
            steps = range(epoch * per_epoch, (epoch + epochs) * per_epoch)
            segments.append(_batches(job, data, steps))
            rates += [_rate(job, step, per_epoch) for step in steps]
            epoch += epochs
        history = _history(job, phase.task, state, segments, rates)
        state = history.ends[-1]
        yield history


def _batches(job: Job, data: Path, steps: range) -> list[Batch]:
    feed, found = feeds(job, data)[0], []
    for step in steps:
        indices = feed.indices(step)
        images = feed.images(indices, step).numpy()
        found.append(Batch(indices, images, feed.labels(indices).numpy()))
    return found


def _rate(job: Job, step: int, per_epoch: int) -> float:
    schedule = job.learning_rate
    passed = sum(step >= milestone * per_epoch for milestone in schedule.milestones)
    return job.optimizer.lr * schedule.gamma**passed


def _history(
    job: Job,
    task: Task,
    state: State,
    segments: list[list[Batch]],
    rates: list[float],
) -> History:
    plan, recipe = task.plan, recipe_of(job)

    def build() -> Any:
        return synchronous.vision_transformer(**MODEL.args)

    ranges = [(stage.first, stage.last) for stage in plan.stages]
    if task.system == "ashpipe":
        return asynchronous.ashpipe(build, state, recipe, ranges, segments, rates)
    if task.system == "pipedream_2bw":
        units = plan.micro_batches
        return asynchronous.pipedream_2bw(
            build, state, recipe, ranges, segments, rates, micro_batches=units
        )
    if task.system == "pipedream":
        replicas = [stage.replicas for stage in plan.stages]
        options = {key: value for key, value in task.options.items() if key != "drain"}
        return asynchronous.pipedream(
            build, state, recipe, ranges, segments, rates, replicas=replicas, **options
        )
    batches = [batch for segment in segments for batch in segment]
    return synchronous.train(build, state, recipe, batches, rates)


def _flat(state: State) -> dict[str, Tensor]:
    """By the names of :func:`state_of`."""
    moments = {
        f"{name}, {key}": torch.as_tensor(value)
        for name, values in state.optimizer.items()
        for key, value in values.items()
    }
    kept: Mapping[str, Tensor] = state.kept or {}
    return {**state.weights, **moments, **{f"{name}, stash": w for name, w in kept.items()}}
