"""What each process of the distributed transparency tests runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.engine import Accuracy, Segment
from runtimes.schedule.action import Action
from tests.runtimes.transparency import (
    SAMPLES,
    ArrayFeed,
    Case,
    Outcome,
    initial_weights,
    job_of,
    stack_of,
)

__all__ = ["VALIDATION_BATCH", "Share", "merged", "train_case", "train_cases"]

VALIDATION_BATCH = 8


@dataclass
class Share:
    """One rank's share of what came of a case; steps as in Outcome."""

    losses: dict[int, float]
    gradients: dict[int, dict[str, Tensor]]
    weights: dict[int, dict[str, Tensor]]
    optimizer: dict[str, dict[str, Any]]
    #: Before the first segment and after each.
    accuracies: list[Accuracy]


def merged(shares: Sequence[Share]) -> Outcome:
    outcome = Outcome()
    for share in shares:
        for step, loss in share.losses.items():
            outcome.losses[step] = outcome.losses.get(step, 0.0) + loss
        for step, gradients in share.gradients.items():
            outcome.gradients.setdefault(step, []).append(gradients)
        for step, weights in share.weights.items():
            outcome.weights.setdefault(step, {}).update(weights)
        outcome.optimizer |= share.optimizer
    return outcome


def train_cases(rank: int, world_size: int, cases: Sequence[Case]) -> list[Share]:
    """Many cases one after the other in the same processes, as a benchmark does."""
    return [train_case(rank, case) for case in cases]


def train_case(rank: int, case: Case, before: Callable[[Action], None] | None = None) -> Share:
    """``before``: called with each action, as of the worker."""
    job = job_of(case)
    engine = DistributedEngine(
        job,
        job.tasks[0],
        stack_of(case.model),
        ArrayFeed(case.precision, case.epoch),
        rank,
        before=before,
        keep_gradients=True,
    )
    engine.load({"weights": initial_weights(case.model), "optimizer": {}})
    validation = ArrayFeed(case.precision, data=1, augmented=False)
    share = Share({}, {}, {}, {}, [engine.evaluate(validation, SAMPLES, VALIDATION_BATCH)])
    first = 0
    for segment in case.segments:
        share.losses |= engine.train(Segment(first, segment)).losses
        first += len(segment)
        share.gradients[first - 1] = engine.last_gradients
        weights = engine.state()["weights"].items()
        share.weights[first - 1] = {name: weight.clone() for name, weight in weights}
        share.accuracies.append(engine.evaluate(validation, SAMPLES, VALIDATION_BATCH))
    share.optimizer = engine.state()["optimizer"]
    return share
