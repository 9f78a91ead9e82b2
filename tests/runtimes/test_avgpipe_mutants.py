"""The comparison with elastic averaging's reference notices what could be wrong with it.

Each mutant is a small change to a real function; that it was called shows that it still bites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtimes.avgpipe import AvgPipe
from runtimes.execution import inprocess
from runtimes.execution.averaging import Averaging
from runtimes.execution.copies import Copies
from runtimes.execution.updates import StageUpdates
from runtimes.execution.versions import WeightVersions
from runtimes.execution.worker import Worker
from runtimes.model.keyed import RandomKey
from runtimes.schedule.action import Action, Op
from runtimes.schedule.joining import Joining
from runtimes.schedule.orders import Compute
from runtimes.system import FlushSystem, System
from tests.runtimes.averaging import Tied, faults, last_first, train

Original = Callable[..., Any]

TOGETHER = Tied(stages=2, micro_batches=2, pipelines=3).having(alpha=0.3)
SYMMETRIC = TOGETHER.having(form="symmetric")
ONE_BY_ONE = TOGETHER.having(averaging="asynchronous")
ALL_ELSE = SYMMETRIC.having(averaging="asynchronous")
#: Five updates in two segments, drawn after the fourth.
RARELY = replace(TOGETHER, segments=((18, 18, 1), (18, 18))).having(every=4)
ADAMW = replace(TOGETHER, optimizer="adamw")
CLIPPED = replace(TOGETHER, clip=0.3)
#: Only the last pipeline has a sample of every other batch.
LONE = Tied(micro_batches=2, pipelines=3, epoch=(9, 1), segments=((9, 1, 9, 1),)).having(every=2)


# ---- the averaging itself ----------------------------------------------------------------------


def tied(
    self: Averaging,
    copies: Sequence[WeightVersions],
    rule: Callable[[Tensor, list[Tensor]], Tensor],
) -> None:
    """``rule`` changes the copies' tensors of a name in place and returns the new reference."""
    with torch.no_grad():
        for name, centre in self.reference.items():
            centre.copy_(rule(centre.clone(), [copy.idle()[name] for copy in copies]))


def copies_are_drawn_to_the_other_centre(tie: Original, self: Averaging, copies: Any) -> None:
    """The old one in the centre-first form, the new one in the symmetric."""
    elastic = self.elastic
    self.elastic = replace(elastic, centre_first=not elastic.centre_first)
    tie(self, copies)
    self.elastic = elastic


def centre_is_drawn_to_copies_that_moved(tie: Original, self: Averaging, copies: Any) -> None:
    """Copies first, by the old centre; the centre then sees the new ones."""

    def rule(centre: Tensor, weights: list[Tensor]) -> Tensor:
        for weight in weights:
            weight.lerp_(centre, self.elastic.alpha)
        return centre + self.elastic.alpha * sum(weight - centre for weight in weights)

    tied(self, copies, rule)


def copies_are_drawn_to_a_centre_that_moves(tie: Original, self: Averaging, copies: Any) -> None:
    """Together, but one after the other."""

    def rule(centre: Tensor, weights: list[Tensor]) -> Tensor:
        for weight in weights:
            centre = centre + self.elastic.alpha * (weight - centre)
            weight.lerp_(centre, self.elastic.alpha)
        return centre

    tied(self, copies, rule)


def momentum_is_averaged(tie: Original, self: Averaging, copies: Any) -> None:
    tie(self, copies)
    states = [copy.optimizer_state() for copy in copies]
    for name, first in states[0].items():
        for key in first:
            values = [state[name][key] for state in states if name in state]
            if key != "step" and len(values) == len(states):
                mean = torch.stack(values).mean(0)
                for value in values:
                    value.copy_(mean)


def copies_are_not_drawn(tie: Original, self: Averaging, copies: Any) -> None:
    weights = [[p.detach().clone() for p in copy.current.values()] for copy in copies]
    tie(self, copies)
    with torch.no_grad():
        for copy, values in zip(copies, weights, strict=True):
            for parameter, value in zip(copy.current.values(), values, strict=True):
                parameter.copy_(value)


def centre_is_not_drawn(tie: Original, self: Averaging, copies: Any) -> None:
    before = {name: tensor.clone() for name, tensor in self.reference.items()}
    tie(self, copies)
    self.load(before)


def one_averaging_is_lost(average: Original, self: Averaging, *turn: Any) -> None:
    """Two read the reference at once, and the one who writes first has drawn it in vain."""
    before = {name: tensor.clone() for name, tensor in self.reference.items()}
    average(self, *turn)
    if len(self.order) == 2:
        self.load(before)


def one_averaging_is_left_out(average: Original, self: Averaging, *turn: Any) -> None:
    if len(self.order) == 1:
        self.order.append(turn[0])
    else:
        average(self, *turn)


def said_in_another_order(average: Original, self: Averaging, *turn: Any) -> None:
    average(self, *turn)
    self.order.sort()


# ---- when, and of what -------------------------------------------------------------------------


def averages_before_the_step(order: Original, self: AvgPipe, *words: Any, **more: Any) -> Any:
    """As in Zhang et al. 2015: of the weights that the gradients were computed on."""
    proper = order(self, *words, **more)

    def mutated(*place: int) -> Iterator[Compute]:
        steps: list[Compute] = []
        for compute in proper(*place):
            if compute.op is Op.STEP:
                steps.append(compute)
                continue
            if compute.op is not Op.AVERAGE:
                yield from steps
                steps = []
            yield compute
        yield from steps

    return mutated


def weights_of_before_are_averaged(tie: Original, self: Averaging, copies: Any) -> None:
    """The same of all copies at once, whose steps are taken back for the time being."""
    steps = [
        {name: p.detach() - copy.before.get(name, p.detach()) for name, p in copy.current.items()}
        for copy in copies
    ]
    with torch.no_grad():
        for copy, step in zip(copies, steps, strict=True):
            for name, parameter in copy.current.items():
                parameter -= step[name]
        tie(self, copies)
        for copy, step in zip(copies, steps, strict=True):
            for name, parameter in copy.current.items():
                parameter += step[name]


def period_begins_at_every_drain(program: Original, self: System, *words: Any, **more: Any) -> Any:
    return program(self, *words, **{**more, "phase": 0})


def waits_for_the_step_of_this_update_alone(ready: Original, self: Joining, action: Action) -> bool:
    return all(
        last >= action.unit or not self._program.steps(pipeline, self._stage, action.unit)
        for pipeline, last in self._made.items()
    )


def waits_for_nobody(ready: Original, self: Joining, action: Action) -> bool:
    return True


def reference_is_a_copy(evaluated: Original, self: Copies, *, mean: bool = False) -> Any:
    return evaluated(self, mean=mean) if mean else self[0].current


def mean_is_the_reference(evaluated: Original, self: Copies, *, mean: bool = False) -> Any:
    return evaluated(self)


def copies_begin_again(load: Original, self: Copies, state: Mapping[str, Any], **more: Any) -> None:
    load(self, {key: value for key, value in state.items() if key != "copies"}, **more)


# ---- learning ----------------------------------------------------------------------------------


def loss_is_divided_by_the_whole_batch(loss: Original, self: Worker, flight: Any, x: Tensor) -> Any:
    batches, index = self.program.batches, flight.step - self.first_step
    low, high = 0, batches.sizes[index]
    share = batches.share_of_batch(flight.pipeline, index)
    return loss(self, flight, x) * share / (high - low)


#: By stage, whose copies of a run are the only ones that step while a test runs.
_moments: dict[int, dict[str, dict[str, Any]]] = {}


def one_optimizer_for_all_copies(step: Original, self: StageUpdates, action: Action) -> Any:
    """Every copy goes on with the moments that the last one left behind."""
    shared = _moments.setdefault(self.stage, {})
    for name, parameter in self.versions.current.items():
        if name in shared:
            self.versions.optimizer.state[parameter].update(
                {key: torch.as_tensor(value).clone() for key, value in shared[name].items()}
            )
    waited = step(self, action)
    shared.update(self.versions.optimizer_state())
    return waited


def norm_is_of_all_pipelines(finish_norm: Original, self: Any, action: Action) -> Any:
    """Of those that have made theirs by now."""
    return sum(
        (
            torch.stack([*shares.values()]).sum()
            for (_, update), shares in self.box.squares.items()
            if update == action.unit
        ),
        torch.zeros((), dtype=torch.float64),
    )


def masks_are_of_the_pipeline(set_key: Original, self: RandomKey, step: int, samples: Any) -> None:
    """Keyed by where a sample stands in its unit, so that pipelines drop alike."""
    set_key(self, step, samples * 0 + range(len(samples)))


#: Mutant, what it changes, a case in which it must be noticed, and in which line.
MUTANTS: list[tuple[Original, Any, str, Tied, str]] = [
    (copies_are_drawn_to_the_other_centre, Averaging, "_tie", TOGETHER, "weight of copy 1"),
    (copies_are_drawn_to_the_other_centre, Averaging, "_tie", SYMMETRIC, "weight of copy 1"),
    (copies_are_drawn_to_the_other_centre, Averaging, "_tie", ONE_BY_ONE, "weight of copy 1"),
    (copies_are_drawn_to_the_other_centre, Averaging, "_tie", ALL_ELSE, "weight of copy 1"),
    (centre_is_drawn_to_copies_that_moved, Averaging, "_tie", TOGETHER, "reference"),
    (centre_is_drawn_to_copies_that_moved, Averaging, "_tie", SYMMETRIC, "reference"),
    (centre_is_drawn_to_copies_that_moved, Averaging, "_tie", ONE_BY_ONE, "reference"),
    (copies_are_drawn_to_a_centre_that_moves, Averaging, "_tie", TOGETHER, "reference"),
    (momentum_is_averaged, Averaging, "_tie", TOGETHER, "optimizer of copy 0"),
    (momentum_is_averaged, Averaging, "_tie", ADAMW, "optimizer of copy 0"),
    (copies_are_not_drawn, Averaging, "_tie", TOGETHER, "weight of copy 0"),
    (centre_is_not_drawn, Averaging, "_tie", TOGETHER, "reference"),
    (one_averaging_is_lost, Averaging, "average", ONE_BY_ONE, "reference"),
    (one_averaging_is_lost, Averaging, "average", ALL_ELSE, "reference"),
    (one_averaging_is_left_out, Averaging, "average", ONE_BY_ONE, "weight of copy 1"),
    (averages_before_the_step, FlushSystem, "compute_order", ONE_BY_ONE, "weight of copy 0"),
    (period_begins_at_every_drain, System, "program", RARELY, "after segment 1: reference"),
    (reference_is_a_copy, Copies, "evaluated", TOGETHER, "evaluation of the reference"),
    (mean_is_the_reference, Copies, "evaluated", TOGETHER, "evaluation of the mean"),
    (loss_is_divided_by_the_whole_batch, Worker, "_loss", TOGETHER, "weight of copy 2"),
    (one_optimizer_for_all_copies, StageUpdates, "step", TOGETHER, "optimizer of copy 1"),
    (one_optimizer_for_all_copies, StageUpdates, "step", ADAMW, "optimizer of copy 1"),
    (norm_is_of_all_pipelines, inprocess._End, "finish_norm", CLIPPED, "weight of copy 2"),
    (masks_are_of_the_pipeline, RandomKey, "set", TOGETHER, "weight of copy 1"),
]  # fmt: skip


def plant(patch: pytest.MonkeyPatch, mutant: Original, owner: Any, name: str) -> list[str]:
    """Put ``mutant`` in front of owner.name; returns a list that every call lengthens."""
    original, calls = getattr(owner, name), []
    _moments.clear()

    def mutated(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return mutant(original, *args, **kwargs)

    patch.setattr(owner, name, mutated)
    return calls


@pytest.mark.parametrize(
    ("mutant", "owner", "name", "case", "line"),
    MUTANTS,
    ids=[f"{mutant.__name__}-{number}" for number, (mutant, *_) in enumerate(MUTANTS)],
)
def test_a_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    mutant: Original,
    owner: Any,
    name: str,
    case: Tied,
    line: str,
) -> None:
    assert not faults(case, train(case))
    calls = plant(monkeypatch, mutant, owner, name)
    found = faults(case, train(case))
    assert calls
    assert any(line in fault for fault in found), found[:5]


def test_copies_that_begin_again_when_a_run_is_resumed_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not faults(RARELY, train(RARELY, resumed=True))
    assert plant(monkeypatch, copies_begin_again, Copies, "load") == []
    assert any("weight of copy" in line for line in faults(RARELY, train(RARELY, resumed=True)))


def test_an_order_that_is_not_the_one_observed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with last_first():
        plain = train(ONE_BY_ONE)
    assert plain.said == plain.seen
    plant(monkeypatch, said_in_another_order, Averaging, "average")
    with last_first():
        assert (outcome := train(ONE_BY_ONE)).said != outcome.seen


@pytest.mark.parametrize("mutant", [waits_for_the_step_of_this_update_alone, waits_for_nobody])
def test_a_pipeline_that_is_not_waited_for_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutant: Original
) -> None:
    """Its step is not in the average, and comes on top of what the average made of it."""
    with last_first():
        assert not faults(LONE, train(LONE))
        calls = plant(monkeypatch, mutant, Joining, "ready")
        found = faults(LONE, train(LONE))
    assert calls
    assert any("weight of copy" in line for line in found)


def test_averaging_before_the_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all copies; one by one it is a matter of the order, above."""

    def remembering(step: Original, self: Any, gradients: Any) -> None:
        self.before = {name: p.detach().clone() for name, p in self.current.items()}
        step(self, gradients)

    assert plant(monkeypatch, remembering, WeightVersions, "step") == []
    assert not faults(TOGETHER, train(TOGETHER))
    plant(monkeypatch, weights_of_before_are_averaged, Averaging, "_tie")
    found = faults(TOGETHER, train(TOGETHER))
    assert any("after segment 0: reference" in line for line in found)


def test_waiting_for_a_step_that_comes_after_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, averages_before_the_step, FlushSystem, "compute_order")
    with pytest.raises(RuntimeError, match="deadlock"):
        train(TOGETHER)
