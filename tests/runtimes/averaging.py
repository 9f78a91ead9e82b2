"""Runs of AvgPipe and their references: parallel pipelines whose copies are drawn together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from runtimes.avgpipe import AvgPipe
from runtimes.execution import inprocess, worker
from runtimes.execution.engine import Accuracy, Segment, SegmentReport
from runtimes.execution.inprocess import InProcess
from runtimes.execution.worker import Worker
from runtimes.plan import Plan
from runtimes.schedule.action import Action, Op
from tests.oracles import avgpipe as oracle
from tests.oracles.avgpipe import Averaged, Elastic, Ensemble
from tests.oracles.synchronous import State, evaluate
from tests.runtimes.transparency import (
    BATCH_NORM,
    EPOCH,
    LIMITS,
    MODELS,
    OPTIMIZERS,
    ArrayFeed,
    Case,
    differences,
    initial_weights,
    job_of,
    recipe_of,
    stack_of,
)

__all__ = [
    "VALIDATED",
    "VALIDATION",
    "VALIDATION_BATCH",
    "Orders",
    "Outcome",
    "Recorder",
    "Tied",
    "at_random",
    "copies_of",
    "engine_of",
    "faults",
    "kept",
    "last_first",
    "reference",
    "start_of",
    "train",
]

#: Evaluated after each segment; the last batch is smaller.
VALIDATION, VALIDATED, VALIDATION_BATCH = ArrayFeed(data=1, augmented=False), 11, 4
#: By segment, then stage: the pipelines of the averagings in their order.
Orders = list[list[list[int]]]


@dataclass(frozen=True)
class Tied(Case):
    """A case of ``pipelines``; the options are AvgPipe's.  The last batch of the default epoch is
    smaller than most numbers of pipelines."""

    system: str = "avgpipe"
    segments: tuple[tuple[int, ...], ...] = (EPOCH, EPOCH, (18, 18))
    model: str = "widths"
    pipelines: int = 2

    def __str__(self) -> str:
        return f"{super().__str__()} N{self.pipelines}"

    @property
    def plan(self) -> Plan:
        return replace(super().plan, pipelines=self.pipelines)

    @property
    def built(self) -> AvgPipe:
        return AvgPipe(**dict(self.options))

    @property
    def elastic(self) -> Elastic:
        """As the options say, and α = 1/N where they do not."""
        options = dict(self.options)
        alpha = options.get("alpha")
        return Elastic(
            self.pipelines,
            1 / self.pipelines if alpha is None else alpha,
            options.get("every", 1),
            options.get("form", "centre-first"),
        )

    @property
    def is_asynchronous(self) -> bool:
        return dict(self.options).get("averaging") == "asynchronous"

    def having(self, **options: Any) -> Tied:
        """With these options beside those there are."""
        return replace(self, options=tuple((dict(self.options) | options).items()))


class Recorder:
    """Called before each action: who averaged at each stage, whatever the worker says of it."""

    def __init__(self, stages: int) -> None:
        self.order: list[list[int]] = [[] for _ in range(stages)]

    def __call__(self, action: Action) -> None:
        if action.op is Op.AVERAGE:
            self.order[action.stage].append(action.pipeline)

    def taken(self) -> list[list[int]]:
        """The order since the last time."""
        order, self.order = self.order, [[] for _ in self.order]
        return order


@dataclass
class Outcome:
    """``losses`` by step; at the end of each segment the engine's state, the accuracies, and the
    orders seen and said: ``said`` is None where the worker had no order to report.  ``reports`` of
    all ranks, segment after segment."""

    losses: dict[int, float] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    accuracies: list[Accuracy] = field(default_factory=list)
    seen: Orders = field(default_factory=list)
    said: list[list[list[int] | None]] = field(default_factory=list)
    reports: list[SegmentReport] = field(default_factory=list)


def start_of(case: Tied) -> dict[str, Any]:
    """Without copies: each begins with the weights of the reference."""
    return {"weights": initial_weights(case.model), "optimizer": {}, "stash": {}}


def engine_of(case: Tied, before: Callable[[Action], None] | None = None) -> InProcess:
    job, feed = job_of(case), ArrayFeed(case.precision, case.epoch)
    return InProcess(
        job, job.tasks[0], stack_of(case.model), feed, system=case.built, before=before
    )


def train(case: Tied, *, resumed: bool = False) -> Outcome:
    """``resumed``: every segment by workers of its own, which take over the state."""
    recorder, outcome, first = Recorder(case.stages), Outcome(), 0
    engine = engine_of(case, recorder)
    engine.load(start_of(case))
    for segment in case.segments:
        if resumed and first:
            engine = engine_of(case, recorder)
            engine.load(outcome.states[-1])
        reports = engine.train(Segment(first, segment))
        outcome.reports += reports
        first += len(segment)
        for report in reports:
            for step, share in report.losses.items():
                outcome.losses[step] = outcome.losses.get(step, 0.0) + share
        outcome.seen.append(recorder.taken())
        leaders = [stage.ranks[0] for stage in case.plan.stages]
        outcome.said.append([reports[rank].averaged for rank in leaders])
        outcome.accuracies.append(engine.evaluate(VALIDATION, VALIDATED, VALIDATION_BATCH))
        outcome.states.append(kept(engine.state()))
    return outcome


def kept(state: Any) -> Any:
    """A copy of a state, which refers to live tensors."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: kept(value) for key, value in state.items()}
    return state


def copies_of(case: Tied, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """By pipeline: weights and optimizer state.  The only copy may be all that there is."""
    if "copies" not in state:
        assert case.pipelines == 1
        return [state]
    assert [*state["copies"]] == [str(pipeline) for pipeline in range(case.pipelines)]
    return [*state["copies"].values()]


@contextmanager
def _walked(run: Callable[[Sequence[Worker]], None]) -> Iterator[None]:
    """``run`` moves in-process workers as far as they get, in another order than usually: of a
    rank's streams the first in its list, and not the most urgent, goes on."""
    run_program = inprocess.run_program

    def both(workers: Sequence[Worker]) -> None:
        run(workers)
        run_program(workers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inprocess, "run_program", both)
        patch.setattr(worker, "in_turn", lambda heads, batches: heads)
        yield


def at_random(seed: int) -> AbstractContextManager[None]:
    """Workers move in an order drawn by lot, and prefer one pipeline for a while, so that
    pipelines get as far apart as they can."""
    dice = random.Random(seed)

    def run(workers: Sequence[Worker]) -> None:
        following = list(workers)
        moved = True
        while moved:
            if dice.random() < 0.1:
                dice.shuffle(following)
            for one in following:
                if dice.random() < 0.05:
                    dice.shuffle(one._heads)
            moved = any(one.advance() for one in following)

    return _walked(run)


def last_first() -> AbstractContextManager[None]:
    """The last pipeline goes on wherever it can, and the last stage."""

    def run(workers: Sequence[Worker]) -> None:
        for one in workers:
            one._heads.reverse()
        while any(one.advance() for one in reversed(workers)):
            pass

    return _walked(run)


# ---- references --------------------------------------------------------------------------------


def reference(case: Tied, orders: Orders | None = None) -> Averaged:
    """``orders``: of an asynchronous case.  Equal references of others are computed once."""
    if orders is not None:
        ranges = [(stage.first, stage.last) for stage in case.plan.stages]
        start, segments, rates, rest = _arguments(case)
        return oracle.asynchronous(*start, ranges, segments, rates, orders, **rest)
    settings = {key: v for key, v in case.options if key in ("alpha", "every", "form")}
    bare = replace(
        case, stages=1, replicas=None, recompute=False, cuts=(), options=tuple(settings.items())
    )
    return _synchronous(bare if case.model in BATCH_NORM else replace(bare, micro_batches=1))


@cache
def _synchronous(case: Tied) -> Averaged:
    start, segments, rates, rest = _arguments(case)
    return oracle.synchronous(*start, segments, rates, **rest)


def _arguments(case: Tied) -> tuple[Any, Any, list[float], dict[str, Any]]:
    spec, feed = OPTIMIZERS[case.optimizer], ArrayFeed(epoch_sizes=case.epoch)
    steps = range(len(case.sizes))
    rates = [spec.lr if step < len(case.epoch) else spec.lr * 0.5 for step in steps]
    following = iter(feed.batch(step) for step in steps)
    segments = [[next(following) for _ in segment] for segment in case.segments]
    values, buffers = initial_weights(case.model), dict(MODELS[case.model]().named_buffers())
    weights = {name: value for name, value in values.items() if name not in buffers}
    state = State(weights, running={name: values[name] for name in buffers})
    start = Ensemble.of(state, case.pipelines)
    rest = {"dtype": getattr(torch, case.precision), "micro_batches": case.micro_batches}
    return (MODELS[case.model], start, recipe_of(job_of(case)), case.elastic), segments, rates, rest


def faults(case: Tied, outcome: Outcome) -> list[str]:
    """What of ``outcome`` differs from the reference: nothing, if all is well."""
    limit, found = LIMITS[case.precision], []
    history = reference(case, outcome.seen if case.is_asynchronous else None)
    for step, loss in enumerate(history.losses):
        mine = outcome.losses.get(step)
        if mine is None or not abs(mine - loss) <= limit * loss:
            found.append(f"loss of step {step}: {mine}, but {loss}")
    ends = zip(outcome.states, outcome.accuracies, history.ends, strict=True)
    for number, (state, accuracy, end) in enumerate(ends):
        expected = {**end.weights, **end.running}
        wrong = [f"reference, {line}" for line in differences(state["weights"], expected, limit)]
        for pipeline, mine in enumerate(copies_of(case, state)):
            copy = end.copies[pipeline]
            parts = [
                ("weight", mine["weights"], {**copy.weights, **copy.running}),
                ("optimizer", _flat(mine["optimizer"]), _flat(copy.optimizer)),
            ]
            for what, ours, theirs in parts:
                lines = differences(ours, theirs, limit)
                wrong += [f"{what} of copy {pipeline}, {line}" for line in lines]
        mean = {**end.mean, **end.running}
        wrong += _wrongly_evaluated("reference", case, accuracy, expected)
        wrong += _wrongly_evaluated("mean", case, accuracy.mean or accuracy, mean)
        found += [f"after segment {number}: {line}" for line in wrong]
    return found


def _wrongly_evaluated(
    what: str, case: Tied, accuracy: Accuracy, weights: Mapping[str, Tensor]
) -> list[str]:
    images, labels = (array[:VALIDATED] for array in VALIDATION.arrays)
    correct, loss = evaluate(MODELS[case.model], weights, images, labels)
    seen = accuracy.correct, accuracy.samples
    if seen == (correct, VALIDATED) and abs(accuracy.loss_sum - loss) <= 1e-9 * loss:
        return []
    return [f"evaluation of the {what}: {accuracy}, but {correct} correct, loss {loss}"]


def _flat(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    return {
        f"{name}, {key}": torch.as_tensor(value)
        for name, values in state.items()
        for key, value in values.items()
    }
