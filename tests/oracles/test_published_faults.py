"""What the published code's faults change, and what they do not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracles.asynchronous import ashpipe
from tests.oracles.cases import (
    ETAS,
    MOMENTUM,
    RATES,
    RECIPES,
    THREE,
    TWO_SCALARS,
    XS,
    assert_same,
    batches,
    differ,
    error,
    scalar_batches,
    scalar_start,
    scalars,
    vit,
    weights_of,
)
from tests.oracles.published_faults import (
    adam_does_not_train,
    batch_norm_updated_twice,
    drop_last_validation,
    masks_drawn_anew,
    stash_kept_over_drain,
)
from tests.oracles.synchronous import Recipe, evaluate


def linears() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 4)
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_the_kept_stash_spoils_the_segments_after_the_first(recompute: bool) -> None:
    data = batches([4] * 6)
    arguments: Any = (vit, weights_of(vit), MOMENTUM, THREE, [data[:3], data[3:]], RATES[:6])
    right, wrong = ashpipe(*arguments), stash_kept_over_drain(*arguments, recompute=recompute)
    for k in range(3):
        assert error(wrong.updates[k].weights, right.updates[k].weights) < 1e-12
    assert wrong.updates[3].loss == pytest.approx(right.updates[3].loss, rel=1e-12)
    assert error(wrong.updates[3].gradients, right.updates[3].gradients) > 1e-6
    # The last stage has one version, and the gradient it sends is right.
    assert (
        error(
            *(
                {n: g for n, g in h.updates[3].gradients.items() if n[:4] == "head"}
                for h in (right, wrong)
            )
        )
        < 1e-12
    )


def test_the_kept_stash_spares_linear_layers_unless_recomputed() -> None:
    data = batches([4] * 6)
    ranges = ((0, 2), (2, 4), (4, 5))
    arguments: Any = (
        linears,
        weights_of(linears),
        MOMENTUM,
        ranges,
        [data[:3], data[3:]],
        RATES[:6],
    )
    right = ashpipe(*arguments)
    assert_same(stash_kept_over_drain(*arguments), right, 1e-12)
    assert differ(stash_kept_over_drain(*arguments, recompute=True), right)


def test_the_kept_stash_by_hand() -> None:
    """Two stages, z = x (a b) c; the first unit after the drain goes back over the b before."""
    data = scalar_batches()
    arguments: Any = (scalars, scalar_start(), Recipe(), TWO_SCALARS, [data[:2], data[2:3]])
    before = ashpipe(scalars, scalar_start(), Recipe(), TWO_SCALARS, [data[:2]], ETAS[:2])
    old, new = ([float(u.weights[f"{i}.weight"]) for i in range(3)] for u in before.updates)
    (a1, b1, _), (a2, b2, c2) = old, new
    x = XS[2]
    slope = -1 / (1 + math.exp(x * a2 * b2 * c2))
    saved = stash_kept_over_drain(*arguments, ETAS[:3])
    # x a is an activation, the forward's; c is the last stage's only version.
    expected = [slope * x * b1 * c2, slope * x * a2 * c2, slope * x * a2 * b2]
    found = [float(saved.updates[2].gradients[f"{i}.weight"]) for i in range(3)]
    assert found == pytest.approx(expected, rel=1e-12)
    anew = stash_kept_over_drain(*arguments, ETAS[:3], recompute=True)
    expected = [slope * x * b1 * c2, slope * x * a1 * c2, slope * x * a2 * b2]
    found = [float(anew.updates[2].gradients[f"{i}.weight"]) for i in range(3)]
    assert found == pytest.approx(expected, rel=1e-12)


def test_masks_drawn_anew_spoil_the_gradients_of_recomputed_stages() -> None:
    data = batches([4] * 4)
    arguments: Any = (vit, weights_of(vit), MOMENTUM, THREE, [data[:3], data[3:]], RATES[:4])
    right, wrong = ashpipe(*arguments), masks_drawn_anew(*arguments)
    one, other = right.updates[0], wrong.updates[0]
    assert one.loss == pytest.approx(other.loss, rel=1e-12), "the forward is right"
    last = {name for name in one.gradients if name.startswith(("norm", "head"))}
    for name, gradient in one.gradients.items():
        same = torch.allclose(other.gradients[name], gradient, rtol=1e-10, atol=1e-12)
        # A key's bias has no gradient but rounding.
        assert same == (name in last) or name.endswith("qkv.bias"), name
    assert differ(wrong, right)


def test_without_dropout_a_recomputation_needs_no_random_state() -> None:
    data = batches([4] * 4)
    arguments: Any = (
        linears,
        weights_of(linears),
        MOMENTUM,
        ((0, 2), (2, 4), (4, 5)),
        [data[:3], data[3:]],
        RATES[:4],
    )
    assert_same(masks_drawn_anew(*arguments), ashpipe(*arguments), 1e-12)


@pytest.mark.parametrize("momentum", [0.1, 0.3])
def test_batch_norm_moves_twice_in_a_recomputation(momentum: float) -> None:
    """r ← (1 − m) r + m b, twice."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(6, 3, generator=generator, dtype=torch.float64) for _ in range(4)]
    means = {False: torch.zeros(3, dtype=torch.float64), True: torch.zeros(3, dtype=torch.float64)}
    for batch in data:
        for twice, moved in ((False, momentum), (True, 1 - (1 - momentum) ** 2)):
            means[twice] = (1 - moved) * means[twice] + moved * batch.mean(0)
    for twice, mean in means.items():
        layer = batch_norm_updated_twice(data, momentum, recompute=twice)
        torch.testing.assert_close(layer.running_mean, mean, rtol=1e-12, atol=0)


def test_the_published_adam_trains_the_last_stage_alone() -> None:
    data, recipe, start = batches([4] * 4), RECIPES["adamw"], weights_of(vit)
    arguments: Any = (vit, start, recipe, THREE, [data[:3], data[3:]], RATES[:4])
    wrong, right = adam_does_not_train(*arguments), ashpipe(*arguments)
    moved = {n for n, w in wrong.updates[-1].weights.items() if not torch.equal(w, start[n])}
    assert moved == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert all(not torch.equal(w, start[n]) for n, w in right.updates[-1].weights.items())
    assert wrong.updates[0].loss == right.updates[0].loss


def test_the_published_validation_sees_whole_batches_only() -> None:
    (data,), start = batches([7]), weights_of(vit)
    hits, loss, seen = drop_last_validation(vit, start, data.images, data.labels, 3)
    assert seen == 6
    assert (hits, loss) == evaluate(vit, start, data.images[:6], data.labels[:6])
    assert loss < evaluate(vit, start, data.images, data.labels)[1]
    assert drop_last_validation(vit, start, data.images, data.labels, 7)[2] == 7
