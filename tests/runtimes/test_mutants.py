"""The comparison with the reference notices the faults that such systems have had.

Each mutant is a small change to a real function; that the function was called shows that the
mutant still bites where the engine works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtimes.execution import distributed, inprocess, updates
from runtimes.execution.updates import StageUpdates
from runtimes.execution.worker import Worker
from runtimes.model.keyed import RandomKey
from runtimes.schedule import Program
from runtimes.schedule.action import Action, Op
from runtimes.system import System
from tests.oracles import synchronous
from tests.processes import run_ranks
from tests.runtimes.transparency import (
    EPOCH,
    MODELS,
    SAMPLES,
    ArrayFeed,
    Case,
    Outcome,
    engine_of,
    faults,
    initial_weights,
    train_in_process,
)
from tests.runtimes.transparency_ranks import Share, train_cases

Original = Callable[..., Any]


def divided_twice(step: Original, self: StageUpdates, action: Action) -> Any:
    """The loss is a sum over the batch's samples already; now ÷ M once more."""
    assert action.version is not None
    with torch.no_grad():
        for parameter in self.versions[action.version - 1].values():
            if parameter.grad is not None:
                parameter.grad /= self.program.batches.micro_batches
    return step(self, action)


def drops_partial_batch(
    program: Original, self: System, plan: Any, sizes: Sequence[int], **rest: Any
) -> Any:
    return program(self, plan, tuple(size for size in sizes if size == EPOCH[0]), **rest)


def steps_before_reduced(ready: Original, self: Any, action: Action) -> Any:
    return action.op == Op.STEP or ready(self, action)


def labels_of_another_batch(
    loss: Original, self: Worker, flight: Any, outputs: Tensor, *rest: Any
) -> Any:
    """As if the last stage's loader ran one batch behind the first stage's."""
    others = self.active_feed.indices((flight.step + 1) % 2)[: len(flight.samples)]
    if len(others) < len(flight.samples):
        return loss(self, flight, outputs, *rest)
    return loss(self, replace(flight, samples=others), outputs, *rest)


def averages_replicas(complete: Original, self: inprocess.Mailbox, key: Any) -> None:
    """The mean recipe: wrong as soon as replicas hold unequal numbers of samples."""
    shares = dict(self.open[key])
    complete(self, key)
    for share in shares.values():
        for tensor in share:
            tensor /= len(shares)


def masks_by_place(set_key: Original, self: RandomKey, step: int, samples: Any) -> None:
    """Randomness keyed by the sample's place in the unit, as a generator's would be."""
    set_key(self, step, np.arange(len(samples)))


def masks_of_recomputation(recompute: Original, self: Worker, action: Action) -> Any:
    """Randomness that is not restored for recomputation."""
    self.module.random.seed += 1
    try:
        return recompute(self, action)
    finally:
        self.module.random.seed -= 1


def rate_of_next_step(rate: Original, spec: Any, kind: Any, step: int, *rest: Any) -> Any:
    return rate(spec, kind, step + 1, *rest)


GPIPE = Case("gpipe", 2, 5)
DP = Case("dp", 1, 1, (3,), cuts=(2,))
#: Mutant, what it changes, and a case in which it must be noticed.
MUTANTS: list[tuple[Original, Any, str, Case]] = [
    (divided_twice, StageUpdates, "step", GPIPE),
    (drops_partial_batch, System, "program", GPIPE),
    (steps_before_reduced, inprocess._End, "ready", DP),
    (labels_of_another_batch, Worker, "_loss", GPIPE),
    (averages_replicas, inprocess.Mailbox, "complete", DP),
    (masks_by_place, RandomKey, "set", GPIPE),
    (masks_of_recomputation, Worker, "_recompute", replace(GPIPE, recompute=True)),
    (rate_of_next_step, updates, "learning_rate", GPIPE),
]


def plant(monkeypatch: pytest.MonkeyPatch, mutant: Original, owner: Any, name: str) -> list[str]:
    """Put ``mutant`` in front of owner.name; returns a list that every call lengthens."""
    original, calls = getattr(owner, name), []

    def mutated(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return mutant(original, *args, **kwargs)

    monkeypatch.setattr(owner, name, mutated)
    return calls


@pytest.mark.parametrize(
    ("mutant", "owner", "name", "case"), MUTANTS, ids=[mutant.__name__ for mutant, *_ in MUTANTS]
)
def test_a_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutant: Original, owner: Any, name: str, case: Case
) -> None:
    assert not faults(case, train_in_process(case))
    calls = plant(monkeypatch, mutant, owner, name)
    found = faults(case, train_in_process(case))
    assert calls
    assert any(line.startswith("weight after step 4") for line in found), found


def test_an_evaluation_without_its_last_partial_batch_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def whole_batches(program: Original, plan: Any, samples: int, batch_size: int) -> Program:
        return program(plan, samples // batch_size * batch_size, batch_size)

    validation = ArrayFeed(data=1, augmented=False)
    engine, weights = engine_of(GPIPE), initial_weights(GPIPE.model)
    expected = synchronous.evaluate(MODELS[GPIPE.model], weights, *validation.arrays)
    whole = engine.evaluate(validation, SAMPLES, 8)
    assert (whole.correct, whole.loss_sum) == pytest.approx(expected)
    calls = plant(monkeypatch, whole_batches, inprocess, "evaluation_program")
    partial = engine.evaluate(validation, SAMPLES, 8)
    assert calls
    assert (partial.correct, partial.loss_sum) != pytest.approx(expected)


def _train_before_reduced(rank: int, world_size: int, case: Case) -> tuple[list[Share], int]:
    waits = []

    def without_the_sum(self: Any, action: Action) -> None:
        """The step is taken on gradients to which no sum has been copied yet."""
        for work, _, _ in self._reductions.pop(action.unit, ()):
            waits.append(work.wait())

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(distributed._End, "finish_reduce", without_the_sum)
        return train_cases(rank, world_size, [case]), len(waits)


def test_a_step_before_the_reduce_ended_is_caught_in_processes() -> None:
    case = replace(DP, replicas=(2,))
    for shares, waits in run_ranks(2, _train_before_reduced, case):
        outcome = Outcome(optimizer=shares[0].optimizer)
        outcome.gradients = {step: [seen] for step, seen in shares[0].gradients.items()}
        outcome.weights = shares[0].weights
        assert waits
        assert any(line.startswith("gradient of step 4") for line in faults(case, outcome))
