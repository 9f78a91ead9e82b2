"""Elastic averaging against its equations, number by number."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from runtimes.execution.averaging import Averaging, mean_of
from runtimes.execution.versions import WeightVersions
from runtimes.system import Elastic

START = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
MOVES = (1.0, -3.0, 0.5, 2.0)


def copies_of(count: int) -> list[WeightVersions]:
    """Of one parameter, the same in all."""

    def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters}], lr=1.0, momentum=0.5)

    return [WeightVersions({"w": START.clone()}, sgd) for _ in range(count)]


def step(copy: WeightVersions, gradient: float) -> None:
    copy.step({"w": torch.full_like(START, gradient)})


def weights(copies: Sequence[WeightVersions]) -> list[Tensor]:
    return [copy.current["w"].detach().clone() for copy in copies]


@pytest.mark.parametrize("centre_first", [True, False])
@pytest.mark.parametrize(("count", "alpha"), [(1, 0.5), (2, 0.5), (3, 0.3), (4, 0.25)])
def test_all_at_once(count: int, alpha: float, centre_first: bool) -> None:
    """Whatever pipeline's AVERAGE comes first; those of the others change nothing more."""
    copies = copies_of(count)
    averaging, c = Averaging(Elastic(alpha, centre_first, joint=True), copies), START
    for update in range(3):
        for copy, move in zip(copies, MOVES, strict=False):
            step(copy, move)
        x = weights(copies)
        new = c + alpha * sum((each - c for each in x), torch.zeros_like(c))
        expected = [each - alpha * (each - (new if centre_first else c)) for each in x]
        for pipeline in reversed(range(count)):
            averaging.average(pipeline, update)
        c = new
        torch.testing.assert_close(averaging.reference["w"], c, rtol=0, atol=1e-14)
        torch.testing.assert_close(weights(copies), expected, rtol=0, atol=1e-14)
    assert averaging.order == []


@pytest.mark.parametrize("centre_first", [True, False])
def test_one_after_the_other(centre_first: bool) -> None:
    """A pipeline may be updates ahead; the order is kept, and begins anew with a segment."""
    copies, alpha, c = copies_of(3), 0.3, START
    averaging = Averaging(Elastic(alpha, centre_first, joint=False), copies)
    order, made = [1, 1, 0, 2, 0, 2, 2], [0, 0, 0]
    for pipeline in order:
        step(copies[pipeline], MOVES[pipeline])
        x = weights(copies)
        new = c + alpha * (x[pipeline] - c)
        x[pipeline] -= alpha * (x[pipeline] - (new if centre_first else c))
        averaging.average(pipeline, made[pipeline])
        made[pipeline], c = made[pipeline] + 1, new
        torch.testing.assert_close(averaging.reference["w"], c, rtol=0, atol=1e-14)
        torch.testing.assert_close(weights(copies), x, rtol=0, atol=1e-14)
    assert averaging.order == order
    averaging.start()
    assert averaging.order == []


@pytest.mark.parametrize("joint", [True, False])
def test_a_single_copy_drawn_whole_is_its_reference_to_the_bit(joint: bool) -> None:
    (copy,) = copies = copies_of(1)
    averaging = Averaging(Elastic(1.0, joint=joint), copies)
    step(copy, 1 / 3)
    (before,) = weights(copies)
    averaging.average(0, 0)
    assert torch.equal(copy.current["w"], before)
    assert torch.equal(averaging.reference["w"], before)


def test_what_the_optimizer_keeps_is_left_alone() -> None:
    copies = copies_of(2)
    averaging = Averaging(Elastic(0.5), copies)
    for copy, move in zip(copies, MOVES, strict=False):
        step(copy, move)
    momenta = [copy.optimizer_state()["w"]["momentum_buffer"] for copy in copies]
    averaging.average(0, 0)
    assert [float(momentum[0]) for momentum in momenta] == [1.0, -3.0]


def test_distances_and_the_mean() -> None:
    copies = copies_of(2)
    averaging = Averaging(Elastic(0.5), copies)
    step(copies[0], 2.0)
    assert averaging.squared_distances() == [12.0, 0.0]
    mean = mean_of([copy.current for copy in copies])
    assert torch.equal(mean["w"], START - 1)
    assert not mean["w"].requires_grad
    counts = mean_of([{"n": torch.tensor(3)}, {"n": torch.tensor(5)}, {"n": torch.tensor(4)}])
    assert int(counts["n"]) == 5


def test_weights_that_a_unit_in_flight_uses_are_never_overwritten() -> None:
    copies = copies_of(2)
    averaging = Averaging(Elastic(0.5), copies)
    copies[1].acquire(0)
    with pytest.raises(AssertionError, match="in flight"):
        averaging.average(0, 0)
