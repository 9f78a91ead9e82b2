"""Parallel pipelines over processes equal the reference: a subset in which every two values meet.

Asynchronously every rank comes by an order of its own, which the reference is told.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.engine import Accuracy, Segment
from runtimes.schedule.action import Action, Op
from tests.pairwise import pairwise
from tests.processes import run_ranks
from tests.runtimes.averaging import (
    VALIDATED,
    VALIDATION,
    VALIDATION_BATCH,
    Outcome,
    Recorder,
    Tied,
    faults,
    kept,
    start_of,
)
from tests.runtimes.transparency import EPOCH, ArrayFeed, job_of, stack_of

MOST_CASES = 40
#: Replicas of each stage, on 1 … 4 ranks.
REPLICAS = [(1,), (2,), (1, 1), (1, 2), (2, 2), (1, 1, 1), (1, 1, 1, 1)]
FACTORS: dict[str, list[Any]] = {
    "replicas": REPLICAS,
    "pipelines": [1, 2, 3],
    "averaging": ["synchronous", "asynchronous"],
    "form": ["centre-first", "symmetric"],
    "every": [1, 4],
    "part": [1.0, 0.9],
    "advance": [0, 1],
    "optimizer": ["sgd", "adamw"],
    "recompute": [False, True],
    "clip": [None, 0.5],
}
#: Before a computation, at most; so that ranks and pipelines get out of step.
DAWDLE_S = 0.002


@dataclass
class Share:
    """One rank's share of an Outcome."""

    losses: dict[int, float] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    accuracies: list[Accuracy] = field(default_factory=list)
    seen: list[list[list[int]]] = field(default_factory=list)
    said: list[list[int] | None] = field(default_factory=list)


class _Dawdling(Recorder):
    """Each rank at times of its own."""

    def __init__(self, stages: int, rank: int) -> None:
        super().__init__(stages)
        self.dice = random.Random(rank)

    def __call__(self, action: Action) -> None:
        super().__call__(action)
        if action.op in (Op.F, Op.B) and self.dice.random() < 0.3:
            time.sleep(self.dice.random() * DAWDLE_S)


def train_tied(rank: int, world_size: int, cases: Sequence[Tied]) -> list[Share]:
    return [_train(rank, case) for case in cases]


def _train(rank: int, case: Tied) -> Share:
    job, share, recorder, first = job_of(case), Share(), _Dawdling(case.stages, rank), 0
    feed = ArrayFeed(case.precision, case.epoch)
    engine = DistributedEngine(
        job, job.tasks[0], stack_of(case.model), feed, rank, system=case.built, before=recorder
    )
    engine.load(start_of(case))
    for segment in case.segments:
        report = engine.train(Segment(first, segment))
        first += len(segment)
        share.losses |= report.losses
        share.said.append(report.averaged)
        share.seen.append(recorder.taken())
        share.accuracies.append(engine.evaluate(VALIDATION, VALIDATED, VALIDATION_BATCH))
        share.states.append(kept(engine.state()))
    engine.close()
    return share


def merged(case: Tied, shares: Sequence[Share]) -> Outcome:
    outcome = Outcome()
    for share in shares:
        for step, loss in share.losses.items():
            outcome.losses[step] = outcome.losses.get(step, 0.0) + loss
    leaders = [shares[stage.ranks[0]] for stage in case.plan.stages]
    for number in range(len(case.segments)):
        outcome.states.append(_state([share.states[number] for share in shares]))
        outcome.accuracies.append(_total([share.accuracies[number] for share in shares]))
        outcome.said.append([share.said[number] for share in leaders])
        outcome.seen.append([own.seen[number][stage] for stage, own in enumerate(leaders)])
    return outcome


def _state(shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is a tensor or an optimizer's state to a parameter stands on one rank only."""
    together: dict[str, Any] = {}
    for share in shares:
        for key, value in share.items():
            inner = isinstance(value, dict) and key in together
            together[key] = _state([together[key], value]) if inner else value
    return together


def _total(parts: Sequence[Accuracy]) -> Accuracy:
    means = [part.mean for part in parts if part.mean is not None]
    return Accuracy(
        sum(part.correct for part in parts),
        sum(part.loss_sum for part in parts),
        sum(part.samples for part in parts),
        _total(means) if means else None,
    )


@cache
def cases_of_all_pairs() -> tuple[Tied, ...]:
    def allowed(settings: dict[str, Any]) -> bool:
        return settings["averaging"] == "synchronous" or max(settings["replicas"]) == 1

    return tuple(_case(**settings) for settings in pairwise(FACTORS, allowed))


def _case(
    replicas: tuple[int, ...],
    pipelines: int,
    part: float,
    optimizer: str,
    recompute: bool,
    clip: float | None,
    **options: Any,
) -> Tied:
    case = Tied(
        stages=len(replicas),
        micro_batches=2,
        replicas=replicas,
        recompute=recompute,
        optimizer=optimizer,
        clip=clip,
        segments=(EPOCH, (18,)),
        pipelines=pipelines,
    )
    return case.having(alpha=part / pipelines, **options)


def test_the_subset_is_small_and_holds_every_rank_count() -> None:
    cases = cases_of_all_pairs()
    assert len(REPLICAS) * 3 <= len(cases) <= MOST_CASES, len(cases)
    assert {case.plan.world_size for case in cases} == {1, 2, 3, 4}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_in_processes_of_their_own(world_size: int) -> None:
    cases = [case for case in cases_of_all_pairs() if case.plan.world_size == world_size]
    ranks = run_ranks(world_size, train_tied, cases, timeout_s=110)
    for number, case in enumerate(cases):
        outcome = merged(case, [rank[number] for rank in ranks])
        assert not faults(case, outcome), str(case)
        if case.is_asynchronous and outcome.accuracies[0].mean is not None:
            assert outcome.said == outcome.seen
