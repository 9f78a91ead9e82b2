"""FLOPs, bytes and seconds of the roofline, against closed forms."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from runtimes.job import ModelSpec
from runtimes.model.stack import LayerStack, build_stack
from runtimes.planning import roofline
from runtimes.planning.device_specs import DEVICE_SPECS, DeviceSpec, device_spec
from runtimes.planning.profile import Profile
from runtimes.planning.roofline import Work, analytic_profile, layer_work

VIT_H = ModelSpec("vit_huge_patch14_224", {"num_classes": 1000})
D, L, TOKENS, PATCHES, PIXELS, CLASSES = 1280, 32, 257, 256, 3 * 14 * 14, 1000


def vit_h_flops() -> tuple[int, int]:
    """Forward and backward of one image, a multiplication and its addition being two.

    forward   a block: 12 d² weights meet every token, and each of t tokens every other one twice
              (scores, and their weighting of values) over d numbers
    backward  twice that (gradients of weights and of inputs), but the images need none; fused
              attention computes its scores again, 5 products for 2
    """
    attention = 2 * 2 * TOKENS**2 * D
    block, embed, head = 2 * 12 * D**2 * TOKENS, 2 * PIXELS * D * PATCHES, 2 * D * CLASSES
    forward = L * (block + attention) + embed + head
    return forward, 2 * L * block + L * attention * 5 // 2 + embed + 2 * head


def test_flops_of_vit_h14() -> None:
    stack = build_stack(VIT_H)
    profile = analytic_profile(VIT_H, stack, (3, 224, 224), (1,), device_spec("h200"))
    forward, backward = vit_h_flops()
    assert profile.provenance["flops_a_sample"] == {"forward": forward, "backward": backward}
    # The usual round figure is in multiplications with their additions.
    assert forward / 2 == pytest.approx(167e9, rel=0.01)


def linear(outputs: int = 5, inputs: int = 3) -> LayerStack:
    first, last = nn.Linear(inputs, outputs), nn.Linear(outputs, 2)
    return LayerStack.from_module(nn.Sequential(first, last))


@pytest.mark.parametrize("n", [1, 7])
def test_work_of_a_linear_layer(n: int) -> None:
    m, d = 5, 3
    forward, backward = layer_work(linear(m, d), 0, (d,), n, reached=True)
    assert forward == Work(2 * n * m * d, 4 * (n * d + m * d + m + n * m))
    # Two products, the bias's gradient as a sum over samples, and each gradient added to what
    # there is, which is read and written.
    products = 4 * (2 * n * m + n * d + m * d) + 4 * (n * d + m * d)
    added = 4 * (n * m + m) + 4 * 3 * (m * d + m)
    assert backward == Work(2 * 2 * n * m * d, products + added)
    _, without = layer_work(linear(m, d), 0, (d,), n, reached=False)
    assert without.flops == backward.flops // 2
    assert without.bytes == backward.bytes - 4 * (n * m + m * d + n * d)


def test_the_last_layer_has_the_loss() -> None:
    stack = linear()
    alone = LayerStack.from_module(nn.Sequential(nn.Linear(5, 2), nn.Identity()))
    with_loss = layer_work(stack, 1, (5,), 4)
    without = layer_work(alone, 0, (5,), 4)
    assert [a.flops for a in with_loss] == [b.flops for b in without]
    assert all(a.bytes > b.bytes for a, b in zip(with_loss, without, strict=True))


def test_views_move_nothing_and_bf16_half() -> None:
    stack = LayerStack.from_module(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    assert layer_work(stack, 0, (2, 2), 3, reached=False) == (Work(0, 0), Work(0, 0))
    wide = LayerStack.from_module(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)))
    forward, _ = layer_work(wide, 0, (64,), 128, precision="bf16")
    exact, _ = layer_work(wide, 0, (64,), 128)
    assert forward.flops == exact.flops
    # Half for the product, but numbers are also converted.
    converted = 6 * (128 * 64 + 64 * 64 + 64)
    assert forward.bytes == exact.bytes // 2 + converted


def test_the_larger_of_both_bounds() -> None:
    assert Work(100, 100).seconds(10, 20) == 10
    assert Work(100, 100).seconds(20, 4) == 25


def seconds(spec: DeviceSpec, **changes: Any) -> tuple[float, ...]:
    stack = linear(512, 512)
    profile = analytic_profile(ModelSpec("none"), stack, image(), (256,), spec, **changes)
    assert all(spread.median == spread.low for spread in profile.layers[0].forward_seconds.values())
    return (
        profile.layers[0].forward_seconds[256].median,
        profile.layers[0].backward_seconds[256].median,
        *profile.optimizer_seconds_per_byte.values(),
    )


def image() -> Any:
    return (512,)


def test_seconds_of_a_device() -> None:
    slow = DeviceSpec("slow", {"float32": 1e9, "tf32": 4e9}, 1e15, 1e9, "made up")
    forward, backward = 2 * 256 * 512 * 512, 2 * 256 * 512 * 512
    whole = seconds(slow, compute_efficiency=1.0)
    assert whole[:2] == pytest.approx((forward / 1e9, backward / 1e9))
    assert seconds(slow)[:2] == pytest.approx([2 * s for s in whole[:2]])
    assert seconds(slow, precision="tf32")[:2] == pytest.approx([s / 2 for s in whole[:2]])
    thin = DeviceSpec("thin", {"float32": 1e15}, 1e9, 1e9, "made up")
    moved = 4 * (256 * 512 + 512 * 512 + 512 + 256 * 512)
    found = seconds(thin, memory_efficiency=1.0)
    assert found[0] == pytest.approx(moved / 1e9)
    # Weights, gradients, and for the momentum a product, a sum, and the step; then the copy.
    assert found[2:4] == pytest.approx((3e-9, 8e-9))
    assert found[5] == pytest.approx(2e-9)
    assert seconds(thin)[0] == pytest.approx(found[0] / 0.8)


def test_what_is_assumed_is_told() -> None:
    spec = device_spec("a100-80gb")
    profile = analytic_profile(
        ModelSpec("none"), linear(512, 512), image(), (2, 4), spec, precision="bf16"
    )
    told = profile.provenance
    assert (told["compute_efficiency"], told["memory_efficiency"]) == (
        roofline.COMPUTE_EFFICIENCY,
        roofline.MEMORY_EFFICIENCY,
    )
    assert told["peak_flops_per_s"] == 312e12
    assert told["device_source"] == spec.source
    assert (profile.source, profile.links, profile.action_seconds) == ("analytic", None, {})
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@pytest.mark.parametrize("spec", DEVICE_SPECS.values(), ids=str)
def test_device_specs(spec: DeviceSpec) -> None:
    assert spec.source
    # Bytes that could be read in the time of a float32 FLOP, and how long memory takes to be read.
    assert 0.01 < spec.memory_bandwidth_bytes_per_s / spec.flops_per_s["float32"] < 0.2
    assert 0.02 < spec.memory_bytes / spec.memory_bandwidth_bytes_per_s < 0.05


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unknown device 'a100': choose one of a100-80gb, v100"):
        device_spec("a100")
    with pytest.raises(ValueError, match="v100-32gb has no tf32: choose one of float32, float64"):
        seconds(device_spec("v100-32gb"), precision="tf32")
    with pytest.raises(ValueError, match="memory efficiency is 1.5, but must lie in"):
        seconds(device_spec("h200"), memory_efficiency=1.5)
    with pytest.raises(ValueError, match="a batch size is 0"):
        analytic_profile(ModelSpec("none"), linear(), image(), (0,), device_spec("h200"))


def test_fused_attention_must_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = build_stack(VIT_H)
    counted, _ = layer_work(stack, 1, (TOKENS, D), 1)
    monkeypatch.setattr(roofline, "_FUSED", {})
    without, _ = layer_work(stack, 1, (TOKENS, D), 1)
    assert counted.flops - without.flops == 4 * TOKENS**2 * D
    assert torch.is_grad_enabled()
