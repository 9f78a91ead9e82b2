"""What cannot be cut without changing results is refused, in one line that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import DropBlock2d, DropPath, PatchDropout
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from runtimes.job import ModelSpec
from runtimes.model.stack import LayerStack, build_stack

SMALL: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "num_heads": 2, "depth": 2}


def vit(**arguments: Any) -> VisionTransformer:
    return VisionTransformer(**SMALL, **arguments)


class MyTransformer(VisionTransformer):
    pass


class MySequential(nn.Sequential):
    pass


class MyDropout(nn.Dropout):
    pass


@pytest.mark.parametrize(
    "model",
    [MyTransformer(**SMALL), MySequential(nn.Linear(2, 2)), nn.Linear(2, 2)],
    ids=lambda model: type(model).__name__,
)
def test_other_model_classes(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=rf"class {type(model).__name__} .*use timm's Vision"):
        LayerStack.from_module(model)


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout1d(0.1),
        nn.Dropout2d(0.1),
        nn.Dropout3d(0.1),
        nn.AlphaDropout(0.1),
        nn.FeatureAlphaDropout(0.1),
        MyDropout(0.1),
        nn.RReLU(),
        nn.FractionalMaxPool2d(2, output_ratio=0.5),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.LSTM(2, 2, num_layers=2, dropout=0.1),
        PatchDropout(0.1),
        DropBlock2d(0.1),
        StochasticDepth(0.1, "row"),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_randomness(module: nn.Module) -> None:
    kind = type(module).__name__
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), module))
    with pytest.raises(ValueError, match=rf"1\.1 is a {kind}, whose randomness cannot be keyed"):
        LayerStack.from_module(model)


def test_randomness_that_is_off_is_accepted() -> None:
    LayerStack.from_module(
        nn.Sequential(nn.Dropout2d(0.0), nn.MultiheadAttention(4, 2), nn.LSTM(2, 2))
    )


class DropsByItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, self.training)


class AttendsByItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if self.training else 0.0)


class AddsNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("module", [DropsByItself(), AttendsByItself(), AddsNoise()])
def test_randomness_inside_a_forward(module: nn.Module) -> None:
    stack = LayerStack.from_module(nn.Sequential(nn.Identity(), module))
    with pytest.raises(ValueError, match="layer '1' draws random numbers by itself"):
        stack.output_shapes((2, 4))


def test_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4)))
    with pytest.raises(ValueError, match=r"1\.0 is a BatchNorm2d.*use nn.LayerNorm"):
        LayerStack.from_module(model)
    with pytest.raises(ValueError, match=r"0 is a InstanceNorm2d with running statistics"):
        LayerStack.from_module(nn.Sequential(nn.InstanceNorm2d(4, track_running_stats=True)))
    LayerStack.from_module(nn.Sequential(nn.InstanceNorm2d(4)))


class MyBatchNorm(nn.BatchNorm1d):
    pass


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.SyncBatchNorm(4), "0 is a SyncBatchNorm, which does not run per unit"),
        (MyBatchNorm(4), "0 is a MyBatchNorm, which does not run per unit"),
        (nn.BatchNorm1d(4, momentum=None), "momentum None, a mean over all units.*set a momentum"),
        (nn.BatchNorm1d(4, track_running_stats=False), "set track_running_stats = True"),
        (nn.Linear(4, 4), 'model.batch_norm is "per-unit", but the model has no BatchNorm'),
    ],
    ids=["sync", "subclass", "cumulative", "untracked", "none"],
)
def test_batch_norms_that_cannot_run_per_unit(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerStack.from_module(nn.Sequential(module), "per-unit")


def test_a_batch_norm_that_is_called_twice_would_count_a_unit_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(x))

    stack = LayerStack.from_module(nn.Sequential(Twice()), "per-unit")
    with pytest.raises(ValueError, match=r"0\.norm is called 2 times .*count a unit as often"):
        stack.output_shapes((2,))


def test_batch_norms_that_cannot_normalise_a_single_sample_are_known() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2), nn.BatchNorm2d(2), nn.Flatten(),
        nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)),
    )  # fmt: skip
    stack = LayerStack.from_module(model, "per-unit")
    assert stack.lone_norms((1, 4, 4)) == (None, None, None, "3", None, None, "6.1")


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_buffers_that_change() -> None:
    stack = LayerStack.from_module(nn.Sequential(Counts()))
    with pytest.raises(ValueError, match="layer '0' changes its buffer 'calls'"):
        stack.output_shapes((2,))


def shared_module() -> nn.Module:
    shared = nn.Linear(2, 2)
    return nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Tanh(), nn.Sequential(shared))


def same_child_twice() -> nn.Module:
    shared = nn.Linear(2, 2)
    return nn.Sequential(shared, nn.Tanh(), shared)


def shared_parameter() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    return model


def shared_buffer() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    constant = torch.ones(2)
    for layer in model:
        layer.register_buffer("constant", constant)
    return model


def shared_in_vit() -> nn.Module:
    model = vit(num_classes=3)
    model.blocks[1].mlp.fc1 = model.blocks[0].mlp.fc1
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (shared_module, "'0' and '2' share a module: 0.0 is 2.0"),
        (same_child_twice, "'0' and '2' share a module: 0 is 2"),
        (shared_parameter, "'0' and '2' share a parameter: 0.weight is 2.weight"),
        (shared_buffer, "'0' and '1' share a buffer: 0.constant is 1.constant"),
        (shared_in_vit, "'blocks.1' share a module: blocks.0.mlp.fc1 is blocks.1.mlp.fc1"),
    ],
)
def test_sharing_across_layers(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerStack.from_module(build())


def test_a_random_layer_used_twice_would_repeat_its_mask() -> None:
    drop = nn.Dropout(0.1)
    with pytest.raises(ValueError, match=r"0\.0 is 0\.2: the Dropout would draw one mask"):
        LayerStack.from_module(nn.Sequential(nn.Sequential(drop, nn.ReLU(), drop)))

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = DropPath(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.drop(x))

    stack = LayerStack.from_module(nn.Sequential(Twice()))
    with pytest.raises(ValueError, match=r"0\.drop is called 2 times"):
        stack.output_shapes((2,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dynamic_img_size": True}, "dynamic_img_size=False"),
        ({"patch_drop_rate": 0.5}, "patch_drop is a PatchDropout.*patch_drop_rate=0"),
    ],
)
def test_vision_transformers_without_fixed_shapes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerStack.from_module(vit(**arguments))


def test_vision_transformers_with_additions() -> None:
    model = vit()
    model.set_grad_checkpointing()
    with pytest.raises(ValueError, match="recompute"):
        LayerStack.from_module(model)
    model = vit()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="none of timm's: extra.bias, extra.weight"):
        LayerStack.from_module(model)


def test_tensors_outside_the_state_dict() -> None:
    layer = nn.Linear(2, 2)
    layer.offset = torch.ones(2)
    with pytest.raises(ValueError, match=r"1\.offset is a plain tensor.*register_buffer"):
        LayerStack.from_module(nn.Sequential(nn.ReLU(), layer))
    with pytest.raises(ValueError, match="has no shape yet"):
        LayerStack.from_module(nn.Sequential(nn.LazyLinear(2)))


def test_layers_that_do_not_fit() -> None:
    stack = LayerStack.from_module(nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=r"layer '1' cannot take samples of shape \(3,\)"):
        stack.output_shapes((4,))
    with pytest.raises(ValueError, match=r"layer 'embed' cannot take samples of shape \(3, 9, 9\)"):
        LayerStack.from_module(vit()).output_shapes((3, 9, 9))
    with pytest.raises(ValueError, match="layer '0' made a tuple of 3 samples"):
        LayerStack.from_module(nn.Sequential(nn.LSTM(2, 2))).output_shapes((5, 2))
    with pytest.raises(ValueError, match=r"layer '0' made shape \(6,\) of 3 samples"):
        LayerStack.from_module(nn.Sequential(nn.Flatten(0))).output_shapes((2,))
    with pytest.raises(ValueError, match="at least one layer"):
        LayerStack.from_module(nn.Sequential())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vit_hugh_patch14_224", {}, "unknown model 'vit_hugh_patch14_224': did you mean vit_huge"),
        ("qqqqqq", {}, "unknown model 'qqqqqq': use VisionTransformer"),
        ("resnet26", {}, "class ResNet cannot be cut"),
        ("resnet19", {}, "unknown model 'resnet19': did you mean resnet1"),
        ("vgg11_bn", {}, r'features\.1 is a BatchNorm2d.*set model.batch_norm = "per-unit"'),
        ("alexnet", {"num_clases": 3}, "torchvision cannot build.*did you mean 'num_classes'"),
        ("alexnet", {"weights": "DEFAULT"}, "'weights'.*seed or a checkpoint"),
        ("resnet18", {"pretrained": True}, "'pretrained'.*seed or a checkpoint"),
        ("vgg11", {"init_weights": False}, "'init_weights'.*seed or a checkpoint"),
        ("VisionTransformer", {"embed_dimm": 8}, "did you mean 'embed_dim' for 'embed_dimm'"),
        ("vit_tiny_patch16_224", {"depht": 8}, "did you mean 'depth' for 'depht'"),
        ("VisionTransformer", {"embed_dim": 10, "num_heads": 3}, "timm cannot build"),
        ("vit_tiny_patch16_224", {"pretrained": True}, "'pretrained'.*seed or a checkpoint"),
        ("VisionTransformer", {"dtype": "float64"}, "'dtype'.*precision decides"),
        ("hf-hub:timm/vit_tiny_patch16_224", {}, "unknown model"),
    ],
)
def test_specs(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_stack(ModelSpec(name, arguments))


def test_every_vit_of_timm_is_named_exactly() -> None:
    """A name timm lists is never called unknown, with a pretrained tag or without."""
    for name in ("vit_base_patch16_224.augreg_in1k", "vit_huge_patch14_224"):
        assert timm.is_model(name)
    stack = build_stack(ModelSpec("vit_tiny_patch16_224.augreg_in21k", {"num_classes": 3}))
    assert stack.output_shapes((3, 224, 224))[-1] == (3,)
