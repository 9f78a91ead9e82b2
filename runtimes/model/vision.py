"""torchvision's AlexNet, VGG and ResNet as layers.

    AlexNet, VGG   "features.0", …, "classifier.0", …: a layer for each convolution or linear layer,
                   named after it, with all that follows up to the next (BatchNorm, ReLU, pooling,
                   dropout), so that what crosses a cut is pooled already
    ResNet         "stem", "layer1.0", …, "head": a layer for each residual block

The first layer of a classifier begins with the adaptive pooling and the flattening before it: of
small images the pooled map is the larger one (49 times, of a VGG at 32 × 32 pixels).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torchvision.models import VGG, AlexNet, ResNet, get_model
from torchvision.models.resnet import BasicBlock, Bottleneck

from runtimes.job import ModelSpec
from runtimes.model.layer import Layer, innermost_first, reset_parameters

__all__ = ["CLASSES", "NAMES", "RESERVED", "builder", "vision_layers"]

CLASSES = (AlexNet, VGG, ResNet)
#: Model name of torchvision → the class that takes its arguments.
NAMES: Mapping[str, type[nn.Module]] = {
    "alexnet": AlexNet,
    **{f"vgg{depth}{norm}": VGG for depth in (11, 13, 16, 19) for norm in ("", "_bn")},
    **{f"resnet{depth}": ResNet for depth in (18, 34, 50, 101, 152)},
}
#: Arguments that a spec may not set, and why.
RESERVED = {
    "weights": "weights come from the run's seed or a checkpoint",
    "progress": "nothing is downloaded",
    "init_weights": "weights come from the run's seed or a checkpoint",
}


def builder(spec: ModelSpec) -> Callable[[], nn.Module]:
    """Builds the model, one of NAMES, on the default device."""
    return partial(get_model, spec.name, weights=None, **spec.args)


class Pooled(nn.Module):
    """The first layer of a classifier, on pooled features: (n, C, H, W) → (n, width)."""

    def __init__(self, avgpool: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.avgpool = avgpool
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(torch.flatten(self.avgpool(x), 1))
        return out


class Stem(nn.Module):
    """(n, 3, H, W) images → (n, 64, H/4, W/4)."""

    def __init__(self, model: ResNet) -> None:
        super().__init__()
        self.conv1 = model.conv1
        self.bn1 = model.bn1
        self.relu = model.relu
        self.maxpool = model.maxpool

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return out


class Head(nn.Module):
    """(n, C, H, W) → (n, classes)."""

    def __init__(self, model: ResNet) -> None:
        super().__init__()
        self.avgpool = model.avgpool
        self.fc = model.fc

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return out


def vision_layers(
    model: AlexNet | VGG | ResNet, *, zero_init_residual: bool = False
) -> tuple[Layer, ...]:
    """The layers of a model on the meta device, whose modules they use.

    ``zero_init_residual``: what a ResNet was built with, which it does not keep.
    """
    if isinstance(model, ResNet):
        layers = _resnet_layers(model, zero_init_residual=zero_init_residual)
    else:
        layers = _plain_layers(model)
    owned = {name for layer in layers for name in layer.module.state_dict(prefix=layer.prefix)}
    unknown = sorted(set(model.state_dict()) - owned)
    if unknown:
        raise ValueError(
            f"the {type(model).__name__} has weights that are none of torchvision's: "
            f"{', '.join(unknown)}"
        )
    return layers


def _plain_layers(model: AlexNet | VGG) -> tuple[Layer, ...]:
    initialise = _initialise_vgg if isinstance(model, VGG) else reset_parameters
    layers = [
        Layer(f"features.{name}", "features.", nn.Sequential(block), initialise)
        for name, block in _blocks(model.features)
    ]
    (first, block), *rest = _blocks(model.classifier)
    pooled = Pooled(model.avgpool, nn.Sequential(block))
    layers.append(Layer(f"classifier.{first}", "", pooled, initialise))
    layers += [
        Layer(f"classifier.{name}", "classifier.", nn.Sequential(block), initialise)
        for name, block in rest
    ]
    return tuple(layers)


def _blocks(sequence: nn.Module) -> list[tuple[str, OrderedDict[str, nn.Module]]]:
    """(name of its convolution or linear layer, members by name) of each block; what comes before
    the first belongs to it."""
    blocks: list[tuple[str, OrderedDict[str, nn.Module]]] = []
    before: OrderedDict[str, nn.Module] = OrderedDict()
    for name, child in sequence.named_children():
        if isinstance(child, (nn.Conv2d, nn.Linear)):
            blocks.append((name, before))
            before = OrderedDict()
        (blocks[-1][1] if blocks else before)[name] = child
    return blocks


def _resnet_layers(model: ResNet, *, zero_init_residual: bool) -> tuple[Layer, ...]:
    initialise = partial(_initialise_resnet, zero_init_residual=zero_init_residual)
    pieces: list[tuple[str, str, nn.Module]] = [("stem", "", Stem(model))]
    for group in ("layer1", "layer2", "layer3", "layer4"):
        blocks = model.get_submodule(group).named_children()
        pieces += [(f"{group}.{number}", f"{group}.{number}.", block) for number, block in blocks]
    pieces.append(("head", "", Head(model)))
    return tuple(Layer(name, prefix, module, initialise) for name, prefix, module in pieces)


# -- initial values: those of the constructors, whose rules go by a module's class -----------------

_kaiming: Callable[[Tensor], Tensor] = partial(
    nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu"
)


def _initialise_vgg(module: nn.Module) -> None:
    reset_parameters(module)
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            _kaiming(part.weight)
        elif isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, 0, 0.01)
        if isinstance(part, (nn.Conv2d, nn.Linear)) and part.bias is not None:
            nn.init.zeros_(part.bias)


def _initialise_resnet(module: nn.Module, *, zero_init_residual: bool) -> None:
    reset_parameters(module)
    for _, part in innermost_first(module):
        if isinstance(part, nn.Conv2d):
            _kaiming(part.weight)
        elif zero_init_residual and isinstance(part, (BasicBlock, Bottleneck)):
            last = part.bn3 if isinstance(part, Bottleneck) else part.bn2
            nn.init.zeros_(last.weight)
