"""Initial weights: by global layer whatever the cut, and distributed as the model's own are."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import (
    ParallelScalingBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import Tensor, nn

from runtimes.job import ModelSpec
from runtimes.model import layer as layer_module
from runtimes.model.stack import LayerStack, build_stack

SMALL: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 4,
    "num_classes": 30,
    "embed_dim": 48,
    "depth": 3,
    "num_heads": 3,
}


def spec(**arguments: Any) -> ModelSpec:
    return ModelSpec("VisionTransformer", {**SMALL, **arguments})


def assert_cuts_do_not_matter() -> None:
    stack = build_stack(spec())
    whole = stack.initial_weights(0, 5, seed=3)
    for bounds in ([0, 1, 2, 3, 4, 5], [0, 2, 5], [0, 4, 5]):
        torch.manual_seed(len(bounds))
        pieces: dict[str, Tensor] = {}
        for low, high in list(itertools.pairwise(bounds))[::-1]:
            pieces |= stack.initial_weights(low, high, seed=3)
        assert pieces.keys() == whole.keys()
        assert all(torch.equal(pieces[name], whole[name]) for name in whole)


def test_weights_do_not_depend_on_the_cut() -> None:
    assert_cuts_do_not_matter()


class PositionInTheStage:
    """Mutant: what a model seeded once, before its stage is built, would do."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, text: bytes) -> Any:
        self.calls += 1
        return ORIGINAL_SHA256(str(self.calls).encode())


ORIGINAL_SHA256 = layer_module.hashlib.sha256


def test_a_mutant_seeded_by_order_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_module.hashlib, "sha256", PositionInTheStage())
    with pytest.raises(AssertionError):
        assert_cuts_do_not_matter()


def test_layers_and_seeds_draw_different_values() -> None:
    stack = build_stack(spec())
    weights = stack.initial_weights(0, 5, seed=3)
    other = stack.initial_weights(1, 2, seed=4)
    name = "blocks.{}.attn.qkv.weight"
    assert not torch.equal(weights[name.format(0)], weights[name.format(1)])
    assert not torch.equal(weights[name.format(0)], other[name.format(0)])


def test_dtype_converts_the_float32_values_and_the_generator_is_left_alone() -> None:
    stack = build_stack(spec())
    state = torch.get_rng_state()
    single, double = (
        stack.initial_weights(0, 5, 0, "cpu", t) for t in (torch.float32, torch.double)
    )
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in single.items():
        assert double[name].dtype == torch.float64
        assert torch.equal(double[name], value.double())
        assert not value.requires_grad


def test_threads_may_initialise_their_stages_at_the_same_time() -> None:
    stack = build_stack(spec())
    found: dict[str, Tensor] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update(stack.initial_weights(i, i + 1, 3)))
        for i in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = stack.initial_weights(0, 5, 3)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Constants are equal; of random tensors mean and deviation are, within 6 standard errors."""
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        value, n = found[name], reference.numel()
        assert value.shape == reference.shape, name
        if reference.min() == reference.max():
            assert torch.equal(value, reference), name
            continue
        deviation = reference.std().item()
        assert abs(value.mean() - reference.mean()) < 6 * deviation * (2 / n) ** 0.5, name
        assert value.std().item() == pytest.approx(deviation, rel=6 / n**0.5), name
        assert value.abs().max() < 3 * reference.abs().max(), name


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"reg_tokens": 4, "init_values": 1e-5},
        {"weight_init": "jax"},
        {"weight_init": "jax_nlhb"},
        {"weight_init": "moco"},
        {"weight_init": "reset"},
        {"fix_init": True},
        {"global_pool": "map"},
        {"block_fn": ResPostBlock, "init_values": 1e-3},
        {"block_fn": ParallelScalingBlock, "qkv_bias": False},
        {"attn_layer": "diff"},
    ],
)
def test_a_vision_transformer_starts_as_timm_starts_it(arguments: dict[str, Any]) -> None:
    torch.manual_seed(7)
    model = VisionTransformer(**{**SMALL, **arguments})
    stack = build_stack(spec(**arguments))
    assert_alike(stack.initial_weights(0, 5, seed=0), dict(model.state_dict()))


def test_an_nn_sequential_starts_as_torch_starts_it() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3),
            nn.Sequential(nn.GroupNorm(4, 16), nn.Flatten(2)),
            nn.Linear(36, 40),
            nn.TransformerEncoderLayer(40, 4, 64, dropout=0.0, batch_first=True),
            nn.Linear(40, 3),
        )

    torch.manual_seed(7)
    reference = model()
    stack = LayerStack.from_module(model())
    assert_alike(stack.initial_weights(0, 5, seed=0), dict(reference.state_dict()))


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gain


class InitialisedGain(Gain):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 0.25)


def test_parameters_that_nobody_can_initialise_are_refused_by_name() -> None:
    stack = LayerStack.from_module(nn.Sequential(nn.Linear(2, 2), nn.Sequential(Gain())))
    assert len(stack.initial_weights(0, 1, seed=0)) == 2
    with pytest.raises(ValueError, match=r"'gain' of 1.0: give Gain a method reset_parameters"):
        stack.initial_weights(0, 2, seed=0)
    able = LayerStack.from_module(nn.Sequential(InitialisedGain()))
    assert able.initial_weights(0, 1, seed=0)["0.gain"].tolist() == [0.25, 0.25]


def test_buffers_of_a_model_on_the_meta_device_are_refused() -> None:
    layer = nn.Linear(2, 2, device="meta")
    layer.register_buffer("scale", torch.ones(2, device="meta"))
    stack = LayerStack.from_module(nn.Sequential(layer))
    with pytest.raises(ValueError, match="value of buffer 0.scale: build the model on a real"):
        stack.initial_weights(0, 1, seed=0)


def test_ranges_outside_the_model_are_refused() -> None:
    stack = build_stack(spec())
    for first, last in ((-1, 2), (2, 2), (3, 6)):
        with pytest.raises(ValueError, match="the model has layers 0 … 4"):
            stack.initial_weights(first, last, seed=0)
        with pytest.raises(ValueError, match="the model has layers 0 … 4"):
            stack.stage(first, last)
