"""torchvision's AlexNet, VGG and ResNet, cut into layers, are torchvision's."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models import get_model
from torchvision.models.resnet import BasicBlock

from runtimes.job import ModelSpec
from runtimes.model.batch_norm import average_copies, lone_samples
from runtimes.model.stack import LayerStack, build_stack
from runtimes.model.stage import Stage
from runtimes.model.vision import NAMES
from runtimes.plan import Plan
from tests.oracles.keyed_masks import Keys, replace_random_layers
from tests.runtimes.model.test_initial_weights import assert_alike
from tests.runtimes.transparency import MODELS, initial_weights, stack_of

SMALL = ("alexnet", "vgg", "resnet")
#: Learnable parameters with 1000 classes, of torchvision's documentation (``num_params``).
PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg11": 132_863_336,
    "vgg13_bn": 133_053_736,
    "vgg16": 138_357_544,
    "vgg19_bn": 143_678_248,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}
LAYERS = {"alexnet": 8, "vgg16": 16, "vgg19_bn": 19, "resnet18": 10, "resnet50": 18}


def batch_norm_of(name: str) -> Any:
    return "per-unit" if name.endswith("_bn") or name.startswith("resnet") else None


def spec(name: str, **arguments: Any) -> ModelSpec:
    return ModelSpec(name, arguments, batch_norm_of(name))


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_names_and_parameters_are_those_of_the_uncut_model(name: str) -> None:
    stack = build_stack(spec(name))
    with torch.device("meta"):
        state = get_model(name, weights=None).state_dict()
    assert sum(stack.parameter_counts) == PARAMETERS[name]
    assert stack.tensor_names(0, len(stack)) == state.keys()
    if name in LAYERS:
        assert len(stack) == LAYERS[name]


def test_every_name_is_there() -> None:
    vgg = {f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")}
    resnet = {f"resnet{depth}" for depth in (18, 34, 50, 101, 152)}
    assert NAMES.keys() == {"alexnet"} | vgg | resnet


def test_layers_are_named_after_their_weights_or_blocks() -> None:
    assert build_stack(spec("alexnet")).names == (
        "features.0", "features.3", "features.6", "features.8", "features.10",
        "classifier.1", "classifier.4", "classifier.6",
    )  # fmt: skip
    names = build_stack(spec("vgg11_bn")).names
    assert (names[0], names[1], names[-3:]) == (
        "features.0",
        "features.4",
        ("classifier.0", "classifier.3", "classifier.6"),
    )
    assert build_stack(spec("resnet18")).names == (
        "stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0", "layer3.1",
        "layer4.0", "layer4.1", "head",
    )  # fmt: skip


def test_a_cut_sends_what_is_pooled_and_not_yet_spread() -> None:
    shapes = build_stack(spec("vgg11", num_classes=10)).output_shapes((3, 32, 32))
    assert shapes[7:] == ((512, 1, 1), (4096,), (4096,), (10,))
    assert build_stack(spec("alexnet")).output_shapes((3, 224, 224))[:2] == (
        (64, 27, 27),
        (192, 13, 13),
    )


def run(pipeline: list[Stage], x: Tensor) -> Tensor:
    for stage in pipeline:
        x = stage(x)
    return x


def stages(stack: LayerStack, bounds: list[int], weights: dict[str, Tensor]) -> list[Stage]:
    made = [stack.stage(a, b, seed=6) for a, b in pairwise(bounds)]
    for stage in made:
        stage.materialise(weights)
    return made


@pytest.mark.parametrize("name", SMALL)
def test_every_cut_computes_what_torchvision_does(name: str) -> None:
    """In evaluation bitwise; in training, with the same masks, also gradients and statistics."""
    stack, weights = stack_of(name), initial_weights(name)
    model, keys = MODELS[name]().double(), Keys(seed=6)
    model.load_state_dict(weights)
    keys.step, keys.samples = 3, [5, 1, 7, 9]
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 1, 8, 8)))
    layers = len(stack)
    for bounds in ([0, layers], *([0, cut, layers] for cut in range(1, layers))):
        pipeline = stages(stack, bounds, weights)
        with torch.no_grad():
            found = run([stage.eval() for stage in pipeline], x)
            assert torch.equal(found, copy.deepcopy(model).eval()(x.clone())), bounds
        trained = copy.deepcopy(model).train()
        replace_random_layers(trained, keys)
        expected = trained(x.clone())
        expected.square().sum().backward()
        for stage in pipeline:
            stage.train().random.set(3, torch.tensor(keys.samples))
        found = run(pipeline, x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        found.square().sum().backward()
        for stage in pipeline:
            for key, parameter in stage.named_parameters():
                gradient = trained.get_parameter(stage.names[key]).grad
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
            for key, buffer in stage.named_buffers():
                assert torch.equal(buffer, trained.get_buffer(stage.names[key]))


def test_resnet18_itself() -> None:
    model = get_model("resnet18", weights=None, num_classes=5).double().train()
    stack = build_stack(spec("resnet18", num_classes=5))
    pipeline = stages(stack, [0, 3, 7, 10], dict(model.state_dict()))
    x = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    assert torch.equal(run(pipeline, x), model(x))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("resnet18", {"num_classes": 30}),
        ("resnet18", {"num_classes": 30, "zero_init_residual": True}),
    ],
)
def test_a_resnet_starts_as_torchvision_starts_it(name: str, arguments: dict[str, Any]) -> None:
    torch.manual_seed(7)
    model = get_model(name, weights=None, **arguments)
    stack = build_stack(spec(name, **arguments))
    assert_alike(stack.initial_weights(0, len(stack), seed=0), dict(model.state_dict()))


@pytest.mark.parametrize("name", ["vgg11_bn", "alexnet"])
def test_the_others_do_too(name: str) -> None:
    """Of each class's layers that are not the largest."""
    stack = build_stack(spec(name, num_classes=30))
    with torch.device("meta"):
        model = get_model(name, weights=None, num_classes=30)
    torch.manual_seed(7)
    features = copy.deepcopy(model.features[:9]).to_empty(device="cpu")
    last = copy.deepcopy(model.classifier[6]).to_empty(device="cpu")
    for part in (*features, last):
        if not isinstance(part, (nn.ReLU, nn.MaxPool2d)):
            part.reset_parameters()
        if name != "alexnet" and isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(part.bias)
    if name != "alexnet":
        nn.init.normal_(last.weight, 0, 0.01)
        nn.init.zeros_(last.bias)
    first = stack.initial_weights(0, 1, 0) | stack.initial_weights(1, 2, 0)
    expected = {f"features.{key}": value for key, value in features.state_dict().items()}
    assert_alike(first, {key: expected[key] for key in first})
    found = stack.initial_weights(len(stack) - 1, len(stack), 0)
    assert_alike(found, {f"classifier.6.{k}": v for k, v in last.state_dict().items()})


def test_additions_are_refused() -> None:
    model = MODELS["resnet"]()
    model.extra = BasicBlock(2, 2)
    with pytest.raises(ValueError, match="the ResNet has weights that are none of torchvision's"):
        LayerStack.from_module(model, "per-unit")


# -- running statistics ----------------------------------------------------------------------------


def test_replicas_average_their_statistics_and_keep_the_largest_count() -> None:
    copies = [
        {"mean": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)},
        {"mean": torch.tensor([3.0, 2.0]), "count": torch.tensor(5)},
    ]
    average_copies(copies)
    for copied in copies:
        assert copied["mean"].tolist() == [2.0, 2.0]
        assert copied["count"].item() == 5
        assert copied["count"].dtype == torch.int64


def test_where_a_replica_gets_a_single_sample() -> None:
    plan = Plan.even(6, 3, (1, 2, 3), micro_batches=2)
    assert lone_samples(plan, [12], rounds=False) == set()
    assert lone_samples(plan, [8], rounds=False) == {2}, "units of 4 in parts of 1, 1 and 2"
    assert lone_samples(plan, [12, 3], rounds=False) == {0, 1, 2}, "units of 1 and of 2"
    whole = Plan.even(6, 3, (1, 2, 3))
    assert lone_samples(whole, [12, 2], rounds=True) == set()
    assert lone_samples(whole, [12, 1], rounds=True) == {0, 1, 2}
