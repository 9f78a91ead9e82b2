"""The reference of elastic averaging against plain training, by hand, and against itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles.avgpipe import Averaged, Elastic, Ensemble, asynchronous, shares
from tests.oracles.avgpipe import synchronous as averaged
from tests.oracles.cases import (
    RATES,
    RECIPES,
    THREE,
    THREE_SCALARS,
    XS,
    Scale,
    TwoLogits,
    batches,
    error,
    scalar_start,
    scalars,
    vit,
    weights_of,
)
from tests.oracles.synchronous import Batch, Recipe, State, train

FORMS: list[Any] = ["centre-first", "symmetric"]


def start(build: Callable[[], nn.Module], pipelines: int) -> Ensemble:
    return Ensemble.of(State(weights_of(build)), pipelines)


def test_a_batch_is_cut_as_the_published_rule_says() -> None:
    (batch,) = batches([5])
    sizes = [[share and len(share.labels) for share in shares(batch, n)] for n in (1, 2, 3, 7)]
    assert sizes == [[5], [2, 3], [1, 2, 2], [None, None, 1, 1, 1, 1, 1]]
    joined = np.concatenate([share.indices for share in shares(batch, 3) if share is not None])
    assert joined.tolist() == batch.indices.tolist()


@pytest.mark.parametrize("name", RECIPES)
def test_one_copy_in_the_centre_first_form_is_plain_training(name: str) -> None:
    data, recipe = batches([6, 5, 1, 6]), RECIPES[name]
    plain = train(vit, weights_of(vit), recipe, data, RATES[:4])
    for every in (1, 3):
        elastic = Elastic(1, 1.0, every)
        ours = averaged(vit, start(vit, 1), recipe, elastic, [data], RATES[:4])
        assert ours.losses == pytest.approx(plain.losses, rel=1e-12)
        (end,) = ours.ends
        assert error(end.copies[0].weights, plain.updates[-1].weights) < 1e-12
        assert end.copies[0].optimizer.keys() == plain.optimizer.keys()
        last = plain.updates[3 if every == 1 else 2].weights
        assert error(end.weights, last) < 1e-12
    symmetric = averaged(
        vit, start(vit, 1), recipe, Elastic(1, 1.0, 1, "symmetric"), [data], RATES[:4]
    )
    assert error(symmetric.ends[0].copies[0].weights, plain.updates[-1].weights) > 1e-6


def test_without_averaging_every_copy_is_plain_training_on_its_share() -> None:
    data = batches([6, 7, 2, 6])
    ours = averaged(vit, start(vit, 3), RECIPES["adamw"], Elastic(3, 0.3, 99), [data], RATES[:4])
    (end,) = ours.ends
    assert error(end.weights, weights_of(vit)) == 0.0
    for pipeline, copy in enumerate(end.copies):
        cut = [shares(batch, 3)[pipeline] for batch in data]
        assert (cut[2] is None) == (pipeline == 0)
        state: Any = State(weights_of(vit))
        for step, (share, rate) in enumerate(zip(cut, RATES[:4], strict=True)):
            if share is not None:
                state = replace(state, step=step)
                (state,) = train(vit, state, RECIPES["adamw"], [share], [rate]).ends
        assert error(copy.weights, state.weights) < 1e-12


# ---- by hand: one weight, N copies -------------------------------------------------------------


def slope(w: float, xs: list[float]) -> float:
    """Of the mean of log(1 + exp(−w x))."""
    return float(np.mean([-x / (1 + np.exp(w * x)) for x in xs]))


def one_weight() -> nn.Module:
    return nn.Sequential(Scale(), TwoLogits())


def one_start(pipelines: int) -> Ensemble:
    return Ensemble.of(State({"0.weight": torch.tensor(0.8, dtype=torch.float64)}), pipelines)


def pairs() -> list[Batch]:
    """Three batches of two samples, one for each of two copies."""
    return [
        Batch(np.arange(i, i + 2), np.array(XS[i : i + 2])[:, None], np.zeros(2, dtype=np.int64))
        for i in (0, 2, 4)
    ]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_both_forms_by_hand(form: Any, every: int) -> None:
    alpha, rate, mu = 0.3, 0.5, 0.9
    c, x, momentum = 0.8, [0.8, 0.8], [0.0, 0.0]
    for t in range(3):
        for i in range(2):
            momentum[i] = mu * momentum[i] + slope(x[i], [XS[2 * t + i]])
            x[i] -= rate * momentum[i]
        if (t + 1) % every == 0:
            new = c + alpha * (x[0] - c + x[1] - c)
            pulled_to = new if form == "centre-first" else c
            x = [value - alpha * (value - pulled_to) for value in x]
            c = new
    recipe, elastic = Recipe(momentum=mu), Elastic(2, alpha, every, form)
    (end,) = averaged(one_weight, one_start(2), recipe, elastic, [pairs()], [rate] * 3).ends
    assert float(end.weights["0.weight"]) == pytest.approx(c, rel=1e-12)
    assert [float(s.weights["0.weight"]) for s in end.copies] == pytest.approx(x, rel=1e-12)
    found = [float(s.optimizer["0.weight"]["momentum_buffer"]) for s in end.copies]
    assert found == pytest.approx(momentum, rel=1e-12)
    assert float(end.mean["0.weight"]) == pytest.approx(sum(x) / 2, rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_pipeline_an_update_ahead_by_hand(form: Any) -> None:
    """Copy 1 comes twice before copy 0 does."""
    alpha, rate = 0.3, 0.5
    c, x = 0.8, [0.8, 0.8]
    turns = [(1, 0), (1, 1), (0, 0), (0, 1), (0, 2), (1, 2)]
    for i, t in turns:
        x[i] -= rate * slope(x[i], [XS[2 * t + i]])
        new = c + alpha * (x[i] - c)
        x[i] -= alpha * (x[i] - (new if form == "centre-first" else c))
        c = new
    elastic, plain = Elastic(2, alpha, 1, form), ((0, 2),)
    arguments: Any = (one_weight, one_start(2), Recipe(), elastic, plain, [pairs()], [rate] * 3)
    (end,) = asynchronous(*arguments, [[[1, 1, 0, 0, 0, 1]]]).ends
    assert float(end.weights["0.weight"]) == pytest.approx(c, rel=1e-12)
    assert [float(s.weights["0.weight"]) for s in end.copies] == pytest.approx(x, rel=1e-12)
    (end,) = asynchronous(*arguments, [[[0, 1, 1, 0, 0, 1]]]).ends
    assert abs(float(end.weights["0.weight"]) - c) > 1e-4


def test_stages_that_averaged_in_different_orders_by_hand() -> None:
    """Two stages of a weight each: stage 0 meets copy 0 first, stage 1 copy 1."""
    alpha, rate, (batch, *_) = 0.4, 0.5, pairs()
    c, x = [0.8, -0.6], [[0.8, -0.6], [0.8, -0.6]]
    for i in range(2):
        outer = slope(x[i][0] * x[i][1], [XS[i]])
        x[i] = [x[i][0] - rate * outer * x[i][1], x[i][1] - rate * outer * x[i][0]]
    for stage, order in enumerate([(0, 1), (1, 0)]):
        for i in order:
            c[stage] += alpha * (x[i][stage] - c[stage])
            x[i][stage] -= alpha * (x[i][stage] - c[stage])

    def build() -> nn.Module:
        return nn.Sequential(Scale(), Scale(), TwoLogits())

    weights = {
        f"{i}.weight": torch.tensor(value, dtype=torch.float64)
        for i, value in enumerate((0.8, -0.6))
    }
    (end,) = asynchronous(
        build,
        Ensemble.of(State(weights), 2),
        Recipe(),
        Elastic(2, alpha),
        ((0, 1), (1, 3)),
        [[batch]],
        [rate],
        [[[0, 1], [1, 0]]],
    ).ends
    assert [float(w) for w in end.weights.values()] == pytest.approx(c, rel=1e-12)
    for mine, theirs in zip(end.copies, x, strict=True):
        assert [float(w) for w in mine.weights.values()] == pytest.approx(theirs, rel=1e-12)


# ---- what must hold ----------------------------------------------------------------------------


def test_at_one_nth_the_centre_first_reference_is_the_mean_of_the_copies_before() -> None:
    """So after it their distances to the reference have shrunk by 1 − α, and their mean is c."""
    data = batches([6, 7, 6])
    (end,) = averaged(vit, start(vit, 3), Recipe(seed=5), Elastic(3, 1 / 3), [data], RATES[:3]).ends
    assert error(end.mean, end.weights) < 1e-12
    assert error(end.copies[0].weights, end.weights) > 1e-6


def test_the_symmetric_form_keeps_the_sum_of_copies_and_reference() -> None:
    """Copies are drawn to the reference as it is to them; only gradients move the sum."""
    data = batches([6, 7, 6])

    def total(elastic: Elastic) -> dict[str, Tensor]:
        (end,) = averaged(vit, start(vit, 2), Recipe(seed=5), elastic, [data[:1]], [0.1]).ends
        return {n: c + sum(copy.weights[n] for copy in end.copies) for n, c in end.weights.items()}

    free = total(Elastic(2, 0.4, 99))
    assert error(total(Elastic(2, 0.4, 1, "symmetric")), free) < 1e-12
    assert error(total(Elastic(2, 0.4)), free) > 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_the_period_is_counted_over_segments_and_states(form: Any) -> None:
    data, recipe, elastic = batches([6, 5, 1, 6, 6, 2]), RECIPES["adamw"], Elastic(2, 0.4, 4, form)
    one = averaged(vit, start(vit, 2), recipe, elastic, [data], RATES[:6])
    two = averaged(vit, start(vit, 2), recipe, elastic, [data[:3], data[3:]], RATES[:6])
    assert same(one.ends[-1], two.ends[-1])
    assert one.losses == two.losses
    rest = averaged(vit, two.ends[0], recipe, elastic, [data[3:]], RATES[3:6])
    assert same(rest.ends[-1], two.ends[-1])
    forgetful = replace(
        two.ends[0], copies=tuple(replace(c, optimizer={}) for c in two.ends[0].copies)
    )
    assert not same(
        averaged(vit, forgetful, recipe, elastic, [data[3:]], RATES[3:6]).ends[-1], two.ends[-1]
    )
    late = replace(two.ends[0], step=0)
    assert not same(
        averaged(vit, late, recipe, elastic, [data[3:]], RATES[3:6]).ends[-1], two.ends[-1]
    )


def same(one: Ensemble, other: Ensemble) -> bool:
    pairs = [(one, other), *zip(one.copies, other.copies, strict=True)]
    return all(error(mine.weights, theirs.weights) == 0.0 for mine, theirs in pairs)


@pytest.mark.parametrize("form", FORMS)
def test_one_copy_averages_alone_either_way(form: Any) -> None:
    data, recipe, elastic = batches([6, 5, 1, 6]), RECIPES["momentum"], Elastic(1, 0.9, 2, form)
    together = averaged(vit, start(vit, 1), recipe, elastic, [data], RATES[:4])
    alone = asynchronous(
        vit, start(vit, 1), recipe, elastic, THREE, [data], RATES[:4], [[[0, 0]] * 3]
    )
    assert same(together.ends[0], alone.ends[0])
    assert together.losses == alone.losses


def in_turn(order: Any) -> Averaged:
    return asynchronous(
        scalars,
        Ensemble.of(State(scalar_start()), 2),
        Recipe(),
        Elastic(2, 0.5),
        THREE_SCALARS,
        [[*pairs(), *pairs()]],
        RATES[:6],
        [order],
    )


def test_orders_that_cannot_have_been_are_refused() -> None:
    turns = [0, 1] * 6
    in_turn([turns] * 3)
    with pytest.raises(AssertionError, match="6 turns each"):
        in_turn([turns, turns, turns[:-1]])
    with pytest.raises(AssertionError, match="6 turns each"):
        in_turn([turns, turns, [*turns[:-1], 0]])
    crossed = [[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]]
    with pytest.raises(AssertionError, match="cannot have been"):
        in_turn([turns[4:] + stage for stage in crossed])


def test_a_stage_with_nothing_to_learn_does_not_wait_for_the_others() -> None:
    """A batch of one sample is the last copy's: the first averages twice at stage 0 at once."""
    data = [Batch(np.arange(n), np.ones((n, 1)), np.zeros(n, dtype=np.int64)) for n in (4, 1, 4)]
    weights, one_each = Ensemble.of(State(scalar_start()), 2), ((0, 1), (1, 2), (2, 4))
    arguments: Any = (scalars, weights, Recipe(), Elastic(2, 0.5), one_each, [data], RATES[:3])
    ahead, behind = [0, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 1]
    asynchronous(*arguments, [[ahead, behind, behind]])
    with pytest.raises(AssertionError, match="cannot have been"):
        asynchronous(*arguments, [[[0, 0, 0, 1, 1, 1], [1, 0, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0]]])


def test_losses_are_means_over_the_samples_each_under_its_copy() -> None:
    data, elastic = batches([5, 5]), Elastic(2, 0.4)
    ours = averaged(
        vit, start(vit, 2), Recipe(label_smoothing=0.1), elastic, [data[:1], data[1:]], [0.1, 0.1]
    )
    first, (batch, *_) = ours.ends[0], data[1:]
    total = 0.0
    for copy, share in zip(first.copies, shares(batch, 2), strict=True):
        assert share is not None
        (update,) = train(
            vit, replace(copy, step=1), Recipe(label_smoothing=0.1), [share], [0.0]
        ).updates
        total += update.loss * len(share.labels)
    assert ours.losses[1] == pytest.approx(total / 5, rel=1e-12)


def test_every_unit_is_normalised_by_itself_and_copies_keep_their_own_statistics() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4, bias=False), nn.BatchNorm1d(4))

    values = build().double().state_dict()
    running = {name: value for name, value in values.items() if ".running" in name or "num" in name}
    weights = {name: value for name, value in values.items() if name not in running}
    data = batches([8])
    (end,) = averaged(
        build,
        Ensemble.of(State(weights, running=running), 2),
        Recipe(),
        Elastic(2, 0.4),
        [data],
        [0.1],
        micro_batches=2,
    ).ends
    means = []
    for copy, share in zip(end.copies, shares(data[0], 2), strict=True):
        assert share is not None
        mean = running["2.running_mean"]
        for half in torch.from_numpy(share.images).split(2):
            mean = 0.9 * mean + 0.1 * F.linear(half.flatten(1), weights["1.weight"]).mean(0)
        torch.testing.assert_close(copy.running["2.running_mean"], mean)
        means.append(mean)
    torch.testing.assert_close(end.running["2.running_mean"], (means[0] + means[1]) / 2)
    assert int(end.running["2.num_batches_tracked"]) == int(running["2.num_batches_tracked"]) + 2
