"""Stages cut from a stack compute what the uncut model computes, under its names."""

from __future__ import annotations

import copy
import itertools
import resource
import time
from typing import Any

import numpy as np
import pytest
import torch
from timm.layers import DropPath
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call

from runtimes.job import ModelSpec
from runtimes.model.randomness import NoDropout
from runtimes.model.stack import LayerStack, build_stack
from runtimes.model.stage import Stage
from tests.oracles.keyed_masks import Keys, replace_random_layers

SMALL: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 4,
    "in_chans": 1,
    "num_classes": 5,
    "embed_dim": 16,
    "depth": 3,
    "num_heads": 2,
    "mlp_ratio": 2.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "class token": {},
    "average": {"global_pool": "avg"},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "registers": {"reg_tokens": 3},
    "registers, average": {"reg_tokens": 2, "global_pool": "avg"},
    "patch positions only": {"reg_tokens": 2, "no_embed_class": True},
    "no positions": {"pos_embed": "none", "pos_drop_rate": 0.5},
    "norm before": {"pre_norm": True},
    "norm after pooling": {"fc_norm": True},
    "average with prefix": {"global_pool": "avg", "pool_include_prefix": True},
    "maximum": {"global_pool": "max"},
    "average and maximum": {"global_pool": "avgmax"},
    "no pooling": {"global_pool": ""},
    "attention pooling": {"global_pool": "map"},
    "self-attention pooling": {"global_pool": "prr"},
    "no final norm": {"final_norm": False},
    "no classes": {"num_classes": 0},
    "scales and norms": {"init_values": 0.3, "qk_norm": True, "scale_attn_norm": True},
    "post-norm": {"block_fn": ResPostBlock, "init_values": 0.3},
    "parallel": {"block_fn": ParallelScalingBlock},
    "differential attention": {"attn_layer": "diff"},
    "rectangle": {"img_size": (8, 12), "in_chans": 3},
}
DROPS = {
    "pos_drop_rate": 0.2,
    "attn_drop_rate": 0.3,
    "proj_drop_rate": 0.2,
    "drop_path_rate": 0.5,
    "drop_rate": 0.2,
}


def vit(**arguments: Any) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(**{**SMALL, **arguments}).double()
    with torch.no_grad():  # zero biases and tiny tokens would hide a forgotten or swapped one
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def images(model: VisionTransformer, samples: int = 3) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(samples, model.in_chans, *model.patch_embed.img_size, dtype=torch.float64)


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.Dropout(0.4),
        nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Dropout(0.3), DropPath(0.4)),
        nn.LayerNorm(6),
        nn.Linear(6, 3),
    ).double()


def cuts(layers: int) -> list[list[int]]:
    """Bounds of stages: uncut, cut at each place alone, and at all places."""
    single = [[0, place, layers] for place in range(1, layers)]
    return [[0, layers], *single, list(range(layers + 1))]


def stages(stack: LayerStack, bounds: list[int], model: nn.Module, seed: int = 0) -> list[Stage]:
    made = [stack.stage(low, high, seed) for low, high in itertools.pairwise(bounds)]
    for stage in made:
        stage.materialise(model.state_dict())
    return made


def run(pipeline: list[Stage], x: Tensor) -> Tensor:
    for stage in pipeline:
        x = stage(x)
    return x


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_cut_equals_timm(variant: str) -> None:
    model = vit(**VARIANTS[variant]).eval()
    stack = LayerStack.from_module(model)
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        for bounds in cuts(len(stack)):
            pipeline = stages(stack, bounds, model)
            found = run([stage.eval() for stage in pipeline], x)
            assert torch.equal(found, expected), bounds


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_are_those_of_the_original_state_dict(variant: str) -> None:
    model = vit(**VARIANTS[variant])
    stack = LayerStack.from_module(model)
    assert stack.names == ("embed", "blocks.0", "blocks.1", "blocks.2", "head")
    for bounds in cuts(len(stack)):
        pipeline = [stack.stage(a, b) for a, b in itertools.pairwise(bounds)]
        names = [name for stage in pipeline for name in stage.names.values()]
        assert sorted(names) == sorted(model.state_dict())
        for stage in pipeline:
            assert sorted(stage.names) == sorted(stage.state_dict())
            assert all(parameter.is_meta for parameter in stage.parameters())


def test_output_shapes_are_those_of_every_layer() -> None:
    stack = LayerStack.from_module(vit(reg_tokens=2, **DROPS))
    tokens = [(7, 16)] * 4
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert stack.output_shapes((1, 8, 8), dtype) == (*tokens, (5,))
    assert LayerStack.from_module(sequential()).output_shapes((4, 4)) == (
        *[(16,), (8,), (8,), (6,), (6,)],
        (3,),
    )
    embedding = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    assert LayerStack.from_module(embedding).output_shapes((6,), torch.int64) == ((6, 4), (6, 2))


def test_parameters_are_counted_by_layer() -> None:
    model = vit()
    counts = LayerStack.from_module(model).parameter_counts
    assert sum(counts) == sum(parameter.numel() for parameter in model.parameters())
    assert counts[1] == sum(parameter.numel() for parameter in model.blocks[0].parameters())


@pytest.mark.parametrize(
    ("arguments", "tolerance"),
    [
        ({"reg_tokens": 1}, 1e-12),
        ({"block_fn": ParallelScalingBlock}, 1e-12),
        ({"attn_layer": "diff"}, 1e-6),  # timm computes its lambda in float32
    ],
)
def test_training_equals_a_reference_with_masks_by_qualified_name(
    arguments: dict[str, Any], tolerance: float
) -> None:
    """Also shows that attention dropout is used: the reference has it in the attention map."""
    model = vit(**DROPS, **arguments)
    stack = LayerStack.from_module(model)
    samples, x = np.array([5, 2, 9, 40, 41]), images(model, 5)
    keys = Keys(seed=2**32 + 3)
    keys.step, keys.samples = 6, samples.tolist()
    reference = copy.deepcopy(model).train()
    replace_random_layers(reference, keys)
    expected = reference(x)
    expected.square().sum().backward()
    for bounds in ([0, 5], [0, 1, 4, 5], [0, 1, 2, 3, 4, 5]):
        pipeline = stages(stack, bounds, model, keys.seed)
        for piece in (slice(0, 2), slice(2, 5)):
            for stage in pipeline:
                stage.random.set(6, samples[piece])
            found = run(pipeline, x[piece])
            torch.testing.assert_close(found, expected[piece], rtol=tolerance, atol=tolerance)
            found.square().sum().backward()
        for stage in pipeline:
            for name, parameter in stage.named_parameters():
                gradient = reference.get_parameter(stage.names[name]).grad
                torch.testing.assert_close(
                    parameter.grad, gradient, rtol=1e3 * tolerance, atol=tolerance
                )


def test_an_nn_sequential_is_keyed_by_its_names_too() -> None:
    model = sequential()
    stack = LayerStack.from_module(model)
    assert stack.names == tuple("012345")
    keys = Keys(seed=1)
    keys.step, keys.samples = 2, [3, 4, 8]
    reference = copy.deepcopy(model)
    replace_random_layers(reference, keys)
    x = torch.randn(3, 4, 4, dtype=torch.float64)
    pipeline = stages(stack, [0, 2, 3, 6], model, seed=1)
    for stage in pipeline:
        stage.random.set(2, torch.tensor(keys.samples))
    torch.testing.assert_close(run(pipeline, x), reference(x), rtol=1e-12, atol=1e-12)
    sorted_names = sorted(name for stage in pipeline for name in stage.names.values())
    assert sorted_names == sorted(model.state_dict())


def test_fused_attention_is_off_only_where_attention_dropout_is_on() -> None:
    with_dropout, without = vit(attn_drop_rate=0.1), vit(proj_drop_rate=0.1)
    for model, fused in ((with_dropout, False), (without, True)):
        block = LayerStack.from_module(model).stage(1, 2).layers[0]
        assert block.attn.fused_attn is fused
        assert model.blocks[0].attn.fused_attn
    assert isinstance(block.attn.attn_drop, NoDropout)


def test_dropout_of_probability_zero_costs_nothing() -> None:
    stack = LayerStack.from_module(nn.Sequential(nn.Dropout(0.0), DropPath(0.0), nn.Linear(2, 2)))
    kinds = [type(layer) for layer in stack.stage(0, 3).layers]
    assert kinds == [NoDropout, NoDropout, nn.Linear]


def test_a_part_shares_modules_and_key_and_runs_functionally() -> None:
    model = vit(**DROPS)
    stage = LayerStack.from_module(model).stage(1, 5, seed=4)
    weights = model.state_dict()
    stage.random.set(0, np.arange(3))
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    whole = functional_call(stage, {key: weights[name] for key, name in stage.names.items()}, x)
    for first, middle, last in ((1, 3, 5), (1, 2, 5)):
        low, high = stage.part(first, middle), stage.part(middle, last)
        assert low.random is stage.random
        assert low.layers[0] is stage.layers[0]
        assert (low.first, low.last, high.first, high.last) == (first, middle, middle, last)
        y = x
        for part in (low, high):
            values = {key: weights[name] for key, name in part.names.items()}
            y = functional_call(part, values, (y,))
        assert torch.equal(y, whole)
    assert all(parameter.is_meta for parameter in stage.parameters())
    with pytest.raises(ValueError, match=r"\[0, 2\) are no part of a stage of \[1, 5\)"):
        stage.part(0, 2)


def test_stages_own_their_modules() -> None:
    model = vit()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stack = LayerStack.from_module(model)
    first, second = stack.stage(0, 5), stack.stage(0, 5)
    weights = stack.initial_weights(0, 5, seed=0)
    first.materialise(weights)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert all(parameter.is_meta for parameter in second.parameters())
    assert weights["blocks.0.attn.qkv.weight"].count_nonzero() > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_shared_or_frozen_inside_a_layer_stays_so() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    inner[2].weight = inner[0].weight
    inner[2].bias.requires_grad_(False)
    model = nn.Sequential(inner, nn.Linear(3, 2))
    stack = LayerStack.from_module(model)
    stage = stack.stage(0, 2)
    assert "0.2.weight" not in stage.names.values()
    weights = stack.initial_weights(0, 2, seed=0)
    stage.materialise(weights)
    tied = stage.layers[0]
    assert tied[0].weight is tied[2].weight
    assert not tied[2].bias.requires_grad
    model.load_state_dict(weights, strict=False)
    x = torch.randn(4, 3)
    assert torch.equal(stage(x), model(x))
    assert stack.parameter_counts == (9 + 3 + 3, 8)


def test_buffers_are_constants_of_the_model() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("factor", torch.tensor([2.0, 3.0]))
            self.register_buffer("order", torch.tensor([1, 0]), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, self.order]) * self.factor

    model = nn.Sequential(Scaled(), nn.ReLU())
    stack = LayerStack.from_module(model)
    weights = stack.initial_weights(0, 1, seed=0, dtype=torch.float64)
    assert weights["0.factor"].tolist() == [2.0, 3.0]
    assert weights["0.factor"].dtype == torch.float64
    assert weights["0.order"].dtype == torch.int64
    stage = stack.stage(0, 2)
    stage.materialise(weights)
    model.double().load_state_dict(weights, strict=False)
    x = torch.randn(3, 2, dtype=torch.float64)
    assert torch.equal(stage(x), model(x))


def test_missing_and_misshapen_weights_are_refused() -> None:
    model = vit()
    stage = LayerStack.from_module(model).stage(4, 5)
    weights = dict(model.state_dict())
    with pytest.raises(ValueError, match=r"shape \(7,\), not \(5,\)"):
        stage.materialise({**weights, "head.bias": torch.zeros(7)})
    del weights["norm.weight"]
    with pytest.raises(ValueError, match=r"\[4, 5\) need weights that are not given: norm.weight"):
        stage.materialise(weights)
    assert all(parameter.is_meta for parameter in stage.parameters())


def test_a_stack_is_built_from_a_spec_on_the_meta_device() -> None:
    state = torch.get_rng_state()
    stack = build_stack(ModelSpec("VisionTransformer", {**SMALL, "img_size": [8, 8]}))
    assert len(stack) == 5
    named = build_stack(ModelSpec("vit_tiny_patch16_224", {"num_classes": 7, "img_size": 32}))
    assert named.output_shapes((3, 32, 32))[-1] == (7,)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_block_of_vit_huge_is_cut_without_building_the_model() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    # Without num_classes timm's default weights, which have no head, decide on none.
    stack = build_stack(ModelSpec("vit_huge_patch14_224", {"num_classes": 1000}))
    assert len(stack) == 34
    assert sum(stack.parameter_counts) == 632_045_800
    assert stack.output_shapes((3, 224, 224)) == (*[(257, 1280)] * 33, (1000,))
    stage = stack.stage(20, 21)
    stage.materialise(stack.initial_weights(20, 21, seed=0))
    with torch.no_grad():
        assert stage(torch.randn(1, 257, 1280)).isfinite().all()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 600  # MiB; the model has 2411, this block 75
    assert time.monotonic() - started < 60
