"""A cut model computes what the whole one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.oracles.asynchronous import ashpipe, pipedream
from tests.oracles.cases import (
    MOMENTUM,
    RATES,
    RECIPES,
    VIT,
    assert_same,
    batches,
    error,
    vit,
    weights_of,
)
from tests.oracles.published_faults import stash_kept_over_drain
from tests.oracles.stages import Stages
from tests.oracles.synchronous import Recipe, train, vision_transformer


def in_place() -> nn.Module:
    return nn.Sequential(
        nn.ELU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, 6),
        nn.ELU(inplace=True),
        nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3)),
        nn.Dropout(0.2, inplace=True),
        nn.Linear(5, 4),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"reg_tokens": 2, "global_pool": "avg", "qk_norm": True, "init_values": 0.5},
        {"class_token": False, "global_pool": "avg", "fc_norm": True},
        {"global_pool": "map", "pre_norm": True},
    ],
    ids=["class token", "registers", "norm after pooling", "attention pooling"],
)
def test_the_stages_in_a_row_are_the_model(arguments: dict[str, Any]) -> None:
    def build() -> nn.Module:
        return vision_transformer(**VIT, **arguments)

    (data,), recipe = batches([5]), RECIPES["sgd"]
    expected = train(build, weights_of(build), recipe, [data], [0.1]).updates[0]
    stages = Stages(build, [(i, i + 1) for i in range(4)], recipe, torch.float64)
    loss, found = stages.gradients(stages.split(weights_of(build)), data, 0)
    assert loss == pytest.approx(expected.loss, rel=1e-12)
    assert [len(names) > 0 for names in stages.names] == [True] * 4
    assert error({n: g for stage in found for n, g in stage.items()}, expected.gradients) < 1e-10


@pytest.mark.parametrize("cut", range(1, 7))
def test_layers_may_work_in_place(cut: int) -> None:
    data, ranges = batches([4, 4]), ((0, cut), (cut, 7))
    arguments: Any = (in_place, weights_of(in_place), MOMENTUM)
    plain = train(*arguments, data, RATES[:2])
    for system in (ashpipe, pipedream, stash_kept_over_drain):
        assert_same(system(*arguments, ranges, [data[:1], data[1:]], RATES[:2]), plain, 1e-12)


def test_ranges_must_cover_the_layers_in_order() -> None:
    for ranges in ([(0, 2), (3, 4)], [(0, 3)], [(1, 4)]):
        with pytest.raises(AssertionError):
            Stages(vit, ranges, Recipe(), torch.float64)
