"""The comparison with the reference notices the faults that such systems have had.

Each mutant is a small change to a real function; that the function was called shows that the
mutant still bites where the engine works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtimes import pipedream_2bw
from runtimes.execution import endpoint, inprocess, updates
from runtimes.execution.optimizer import learning_rate
from runtimes.execution.updates import StageUpdates
from runtimes.execution.versions import WeightVersions
from runtimes.execution.worker import Worker
from runtimes.model.keyed import RandomKey
from runtimes.schedule import Batches, Compute, Order, Program
from runtimes.schedule.action import Action, Op
from runtimes.system import System
from tests.oracles import synchronous
from tests.processes import run_ranks
from tests.runtimes.transparency import (
    EPOCH,
    MODELS,
    SAMPLES,
    SGD,
    ArrayFeed,
    Case,
    engine_of,
    faults,
    initial_weights,
    train_in_process,
)
from tests.runtimes.transparency_ranks import Share, merged, train_cases

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


def backward_on_the_latest(backward: Original, self: Worker, action: Action) -> None:
    """No stash: what the backward reads of the weights is what they have become meanwhile."""
    assert action.version is not None
    used, latest = self.copies[0].versions[action.version], self.copies[0].versions.current
    kept = {name: parameter.detach().clone() for name, parameter in used.items()}
    _overwrite(used, latest)
    backward(self, action)
    _overwrite(used, kept)


def _overwrite(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Unseen by autograd, which would refuse the backward of units in flight."""
    written = tuple(parameters.values())
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(written):
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


def stash_outlives_the_drain(drained: Original, self: WeightVersions, carried: int = 0) -> None:
    """Units count from 0 again, but the oldest version there is is not the latest one."""
    self._retain = 1
    drained(self, min(1, self.latest))


def mean_of_means(loss: Original, self: Worker, flight: Any, outputs: Tensor) -> Any:
    """Each replica's loss is the mean of its samples, and gradients are averaged over replicas:
    right as long as all hold equally many."""
    share: Tensor = loss(self, flight, outputs)
    batch = self.program.batches.sizes[flight.step - self.first_step]
    return share * batch / (len(flight.samples) * self.stage.replicas)


def steps_the_stash(copy: Original, self: WeightVersions, old: Any) -> Any:
    """The set whose gradients were just taken is stepped as it is, not made equal to the latest."""
    return self._free.pop() if self._free else copy(self, old)


def decays_the_stash(take: Original, self: WeightVersions, version: int) -> Any:
    """Weight decay of the weights that the gradients were made with."""
    stash = {name: parameter.detach().clone() for name, parameter in self[version].items()}
    gradients = take(self, version)
    for name, gradient in gradients.items():
        gradient += SGD.weight_decay * (stash[name] - self.current[name].detach())
    return gradients


def rate_of_the_update(set_rate: Original, self: StageUpdates, action: Action) -> None:
    """As if a stage's updates counted the batches, where they count its rounds."""
    set_rate(self, action)
    spec, kind, step = self.job.optimizer, self.job.learning_rate, self.first_step + action.unit
    for group in self.versions.optimizer.param_groups:
        group["lr"] = learning_rate(spec, kind, step, self.steps_per_epoch, self.job.epochs)


def averages_over_all_replicas(take: Original, self: StageUpdates, action: Action) -> Any:
    """Also where the last round of a segment has a batch for some of them only."""
    waited, units = take(self, action), self.program.units(0, self.stage, action.unit)
    for gradient in self._taken[action.unit].values():
        gradient *= len(units) / self.replicas
    return waited


def second_batch_on_the_first_update(
    double_buffered: Original, batches: Batches, stages: int, *, carried: int, norm: bool
) -> Order:
    """Batch 1 waits for W(1), where batches 0 and 1 are both computed on W(0)."""
    order = double_buffered(batches, stages, carried=carried, norm=norm)
    second = batches.units_of_batch(0, 1)

    def mutated(*place: int) -> Iterator[Compute]:
        early: list[Compute] = []
        stepped = False
        for step in order(*place):
            mine = step.op in (Op.F, Op.B) and step.unit in second
            if not carried and (mine or (step.op == Op.REDUCE and step.unit == 1)):
                step = step._replace(version=1)
            if mine and not carried and not stepped:
                early.append(step)
                continue
            yield step
            if step.op == Op.STEP and not stepped:
                stepped = True
                yield from early

    return mutated


def forgets_the_version_before(
    program: Original, self: System, plan: Any, sizes: Any, **rest: Any
) -> Any:
    """Every segment of 2BW begins as the first."""
    return program(self, plan, sizes, **rest | {"carried": 0})


def norm_of_the_stage(finish_norm: Original, self: Any, action: Action) -> Any:
    finish_norm(self, action)
    return self.box.squares[action.pipeline, action.unit][self.box.plan.rank(action.stage, 0)]


GPIPE = Case("gpipe", 2, 5)
DP = Case("dp", 1, 1, (3,), cuts=(2,))
ASHPIPE = Case("ashpipe", 3, model="widths")
UNEVEN = Case("ashpipe", 2, replicas=(2, 4), model="widths", cuts=(2, 6))
#: Rounds of two batches at the second stage, and of one in the end; the rate falls within it.
PIPEDREAM = Case(
    "pipedream", 2, replicas=(1, 2), model="widths", segments=((*EPOCH, EPOCH[0], EPOCH[1]),)
)
TWO_BUFFERS = Case("pipedream_2bw", 2, 3, model="widths")
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
    (backward_on_the_latest, Worker, "_backward", ASHPIPE),
    (stash_outlives_the_drain, WeightVersions, "drained", ASHPIPE),
    (steps_the_stash, WeightVersions, "_copy", ASHPIPE),
    (decays_the_stash, WeightVersions, "take", ASHPIPE),
    (averages_replicas, inprocess.Mailbox, "complete", UNEVEN),
    (mean_of_means, Worker, "_loss", UNEVEN),
    (steps_before_reduced, inprocess._End, "ready", UNEVEN),
    (rate_of_the_update, StageUpdates, "_set_rate", PIPEDREAM),
    (averages_over_all_replicas, StageUpdates, "_take", PIPEDREAM),
    (second_batch_on_the_first_update, pipedream_2bw, "double_buffered", TWO_BUFFERS),
    (forgets_the_version_before, System, "program", TWO_BUFFERS),
    (norm_of_the_stage, inprocess._End, "finish_norm", replace(TWO_BUFFERS, clip=1.0)),
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
    ("mutant", "owner", "name", "case"),
    MUTANTS,
    ids=[f"{mutant.__name__}-{case.system}" for mutant, *_, case in MUTANTS],
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
        for reduction in self._reductions.pop((action.pipeline, action.unit), ()):
            waits.append(reduction.work.wait())

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(endpoint.GroupEndpoint, "finish_reduce", without_the_sum)
        return train_cases(rank, world_size, [case]), len(waits)


@pytest.mark.parametrize(
    "case", [replace(DP, replicas=(2,)), replace(UNEVEN, replicas=(1, 2))], ids=str
)
def test_a_step_before_the_reduce_ended_is_caught_in_processes(case: Case) -> None:
    plan = case.plan
    ranks = run_ranks(plan.world_size, _train_before_reduced, case)
    found = faults(case, merged([shares[0] for shares, _ in ranks]))
    for rank, (_, waits) in enumerate(ranks):
        if plan.stages[plan.place(rank)[0]].replicas > 1:
            assert waits
            assert any(line.startswith(f"gradient of step 4 on rank {rank}") for line in found)
