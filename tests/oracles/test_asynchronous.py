"""The asynchronous references against plain training and against each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.oracles.asynchronous import ashpipe, pipedream, pipedream_2bw
from tests.oracles.cases import (
    MOMENTUM,
    RATES,
    RECIPES,
    THREE,
    VIT,
    WHOLE,
    System,
    assert_same,
    batches,
    differ,
    error,
    per_stage,
    vit,
    weights_of,
)
from tests.oracles.stages import Stages
from tests.oracles.synchronous import History, Recipe, State, train, vision_transformer


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("system", [ashpipe, pipedream])
def test_one_stage_is_plain_training(system: System, name: str) -> None:
    data, recipe = batches([6, 5, 1, 6]), RECIPES[name]
    plain = train(vit, weights_of(vit), recipe, data, RATES[:4])
    segments = [data[:3], data[3:]]
    ours = system(vit, weights_of(vit), per_stage(recipe), WHOLE, segments, RATES[:4])
    assert_same(ours, plain)
    assert [end.step for end in ours.ends] == [3, 4]


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "clipped"])
@pytest.mark.parametrize("system", [ashpipe, pipedream])
def test_a_drain_after_every_unit_is_plain_training(system: System, name: str) -> None:
    """The cut computes what the whole model does, with the masks of the whole run's units."""
    data, recipe = batches([6, 5, 1, 6]), RECIPES[name]
    plain = train(vit, weights_of(vit), recipe, data, RATES[:4])
    segments = [[batch] for batch in data]
    assert_same(system(vit, weights_of(vit), recipe, THREE, segments, RATES[:4]), plain)
    undrained = system(vit, weights_of(vit), recipe, THREE, [data], RATES[:4])
    assert differ(undrained, plain)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("ranges", [WHOLE, THREE])
def test_2bw_is_plain_training_with_the_gradients_of_the_weights_before(
    ranges: Any, name: str
) -> None:
    """Written with torch's optimizers and one model for each of the two versions."""
    recipe, data = replace(RECIPES[name], label_smoothing=0.1), batches([6, 5, 1, 6])
    plain = {**VIT, **{key: 0.0 for key in VIT if key.endswith("drop_rate")}}
    plain |= {"drop_path_rate": 0.0}

    def build() -> nn.Module:
        return vision_transformer(**plain)

    ours = pipedream_2bw(
        build, weights_of(build), recipe, ranges, [data], RATES[:4], micro_batches=4
    )
    latest, before = build().double(), build().double()
    latest.load_state_dict(weights_of(build))
    common: Any = {"lr": 1.0, "weight_decay": recipe.weight_decay}
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(latest.parameters(), betas=recipe.betas, eps=recipe.eps, **common)
        if recipe.optimizer == "adamw"
        else torch.optim.SGD(
            latest.parameters(), momentum=recipe.momentum, nesterov=recipe.nesterov, **common
        )
    )
    before.load_state_dict(latest.state_dict())
    for t, (batch, rate, update) in enumerate(zip(data, RATES[:4], ours.updates, strict=True)):
        loss = F.cross_entropy(
            before(torch.from_numpy(batch.images)),
            torch.from_numpy(batch.labels),
            label_smoothing=0.1,
        )
        gradients = torch.autograd.grad(loss, list(before.parameters()))
        for parameter, gradient in zip(latest.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()  # for one sample some are views of others
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(latest.parameters(), recipe.clip)
        before.load_state_dict(latest.state_dict())
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        assert update.loss == pytest.approx(loss.item(), rel=1e-10)
        assert error(update.weights, dict(latest.named_parameters())) < 1e-10, t
    assert [update.versions[0] for update in ours.updates] == [0, 0, 1, 2]


def test_micro_batches_do_not_matter_but_for_rounding() -> None:
    data = batches([6, 1, 5, 6])
    whole, *cut = (
        pipedream_2bw(vit, weights_of(vit), MOMENTUM, THREE, [data], RATES[:4], micro_batches=m)
        for m in (1, 3, 4, 7)
    )
    for other in cut:
        assert_same(other, whole)


# ---- against each other ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["momentum", "adamw", "clipped"])
def test_without_replicas_pipedream_is_ashpipe(name: str) -> None:
    data = batches([6, 5, 1, 6, 6, 2])
    arguments: Any = (vit, weights_of(vit), per_stage(RECIPES[name]), THREE)
    one, other = (
        system(*arguments, [data[:4], data[4:]], RATES[:6]) for system in (ashpipe, pipedream)
    )
    for mine, theirs in zip(one.updates, other.updates, strict=True):
        assert mine.loss == theirs.loss
        assert mine.versions == theirs.versions
        assert all(torch.equal(mine.weights[n], w) for n, w in theirs.weights.items())


@pytest.mark.parametrize("system", [ashpipe, pipedream])
def test_the_last_stage_is_never_late(system: System) -> None:
    data = batches([4, 4, 4, 4])
    history = system(vit, weights_of(vit), MOMENTUM, THREE, [data[:3], data[3:]], RATES[:4])
    assert [update.versions[-1] for update in history.updates] == [0, 1, 2, 0]


@pytest.mark.parametrize("system", [ashpipe, pipedream, pipedream_2bw])
def test_training_goes_on_from_a_state_as_if_undisturbed(system: System) -> None:
    data, recipe = batches([6, 5, 1, 6, 6, 2]), RECIPES["adamw"]
    whole = system(vit, weights_of(vit), recipe, THREE, [data[:3], data[3:]], RATES[:6])
    first = system(vit, weights_of(vit), recipe, THREE, [data[:3]], RATES[:3])
    assert first.ends[0].step == 3
    second = system(vit, first.ends[0], recipe, THREE, [data[3:]], RATES[3:6])
    both = History(first.updates + second.updates, second.ends)
    assert_same(both, whole, 0.0)
    forgotten = replace(first.ends[0], optimizer={})
    assert differ(system(vit, forgotten, recipe, THREE, [data[3:]], RATES[3:6]), whole)
    if system is pipedream_2bw:
        forgotten = replace(first.ends[0], kept=None)
        assert differ(system(vit, forgotten, recipe, THREE, [data[3:]], RATES[3:6]), whole)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_switch_between_plain_training_and_a_pipeline(name: str) -> None:
    data, recipe = batches([6, 5, 1, 6, 6, 2]), RECIPES[name]
    plain = train(vit, weights_of(vit), recipe, data[:3], RATES[:3])
    drained = ashpipe(vit, weights_of(vit), recipe, THREE, [[b] for b in data[:3]], RATES[:3])
    switched, other = (
        ashpipe(vit, start.ends[-1], recipe, THREE, [data[3:]], RATES[3:6])
        for start in (plain, drained)
    )
    assert_same(switched, other)
    back = train(vit, other.ends[-1], recipe, data, RATES[:6])
    pipe = ashpipe(vit, other.ends[-1], recipe, WHOLE, [data], RATES[:6])
    assert_same(pipe, back)
    assert back.ends[-1].step == 12


# ---- clipping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("system", [ashpipe, pipedream])
def test_clipping_by_stage(system: System) -> None:
    data, recipe = batches([6]), Recipe(seed=5)
    free = system(vit, weights_of(vit), recipe, THREE, [data], RATES[:1]).updates[0]
    limit = 0.3
    bound = replace(recipe, clip=limit, clip_by="stage")
    clipped = system(vit, weights_of(vit), bound, THREE, [data], RATES[:1]).updates[0]
    factors = set()
    for names in Stages(vit, THREE, recipe, torch.float64).names:
        norm = math.sqrt(sum(float(free.gradients[name].square().sum()) for name in names))
        factor = min(1.0, limit / (norm + 1e-6))
        factors.add(factor)
        for name in names:
            torch.testing.assert_close(clipped.gradients[name], factor * free.gradients[name])
    assert len(factors) > 1
    with pytest.raises(ValueError, match="clip_by must be 'stage'"):
        system(vit, weights_of(vit), replace(bound, clip_by="global"), THREE, [data], RATES[:1])


def test_a_limit_above_the_norm_changes_nothing() -> None:
    data, loose = batches([6, 6]), replace(MOMENTUM, clip=1e6)
    for system, recipe in [(ashpipe, per_stage(loose)), (pipedream_2bw, loose)]:
        free = system(vit, weights_of(vit), MOMENTUM, THREE, [data], RATES[:2])
        assert_same(system(vit, weights_of(vit), recipe, THREE, [data], RATES[:2]), free, 0.0)


def test_global_clipping_of_plain_training() -> None:
    data = batches([6])
    free = train(vit, weights_of(vit), Recipe(), data, RATES[:1]).updates[0]
    clipped = train(vit, weights_of(vit), Recipe(clip=0.25), data, RATES[:1]).updates[0]
    norm = math.sqrt(sum(float(g.square().sum()) for g in free.gradients.values()))
    assert norm > 0.25
    shrunk = {name: g * 0.25 / (norm + 1e-6) for name, g in free.gradients.items()}
    assert error(clipped.gradients, shrunk) < 1e-12
    with pytest.raises(ValueError, match="clip_by must be 'global'"):
        train(vit, weights_of(vit), Recipe(clip=0.25, clip_by="stage"), data, RATES[:1])


def test_a_state_holds_weights_that_nobody_changes() -> None:
    data, start = batches([4, 4]), weights_of(vit)
    copies = {name: value.clone() for name, value in start.items()}
    state = State(start)
    for system in (ashpipe, pipedream, pipedream_2bw):
        system(vit, state, RECIPES["adamw"], THREE, [data], RATES[:2])
    train(vit, state, RECIPES["adamw"], data, RATES[:2])
    assert all(torch.equal(value, copies[name]) for name, value in start.items())
