"""A model cut into stages, each a function of its own weights and of the stage before.

Layers are counted as the models have them: of a VisionTransformer the embedding, each block and the
head (with the norm and the pooling before it), of an nn.Sequential its children, of a ResNet the
stem, each block and the head, of an AlexNet or VGG each convolution and each linear layer with what
follows it (and, of the first linear layer, what comes before it).

A stage's replicas share a unit, or take units in turn.  Nothing depends on that but BatchNorm,
which normalises each share by itself, and keeps running statistics for each replica:

    running[s][r] after the unit's forward    on drains    the mean over r (of counts the largest)
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call

from tests.oracles.keyed_masks import Keys, replace_random_layers
from tests.oracles.synchronous import Batch, Recipe, Weights

__all__ = ["Leaves", "Stages"]

Leaves = Sequence[Mapping[str, Tensor]]
Layer = Callable[[Tensor], Tensor]


class _Layers(nn.Module):
    """Runs a range of the layers; a module, so that functional_call can exchange the weights."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.model = model
        self.layers = tuple(layers)

    def forward(self, x: Tensor, low: int, high: int) -> Tensor:
        for layer in self.layers[low:high]:
            x = layer(x)
        return x


def _layers(model: nn.Module) -> tuple[list[Layer], Callable[[str], int]]:
    """The layers of ``model``, and which of them a parameter belongs to by its name."""
    if isinstance(model, nn.Sequential):
        places = {name: place for place, (name, _) in enumerate(model.named_children())}
        return list(model), lambda name: places[name.split(".")[0]]
    if type(model).__name__ == "ResNet":
        return _resnet_layers(model)
    if type(model).__name__ in {"AlexNet", "VGG"}:
        return _plain_layers(model)
    assert isinstance(model, VisionTransformer)
    vit = model

    def embed(x: Tensor) -> Tensor:
        out: Tensor = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(x))))
        return out

    def head(x: Tensor) -> Tensor:
        out: Tensor = vit.forward_head(vit.norm(x))
        return out

    def place(name: str) -> int:
        words = name.split(".")
        if words[0] == "blocks":
            return 1 + int(words[1])
        return 1 + len(vit.blocks) if words[0] in {"norm", "fc_norm", "attn_pool", "head"} else 0

    return [embed, *vit.blocks, head], place


def _resnet_layers(model: Any) -> tuple[list[Layer], Callable[[str], int]]:
    def stem(x: Tensor) -> Tensor:
        out: Tensor = model.maxpool(model.relu(model.bn1(model.conv1(x))))
        return out

    def head(x: Tensor) -> Tensor:
        out: Tensor = model.fc(model.avgpool(x).flatten(1))
        return out

    groups = [getattr(model, f"layer{number}") for number in (1, 2, 3, 4)]
    blocks = [block for group in groups for block in group]

    def place(name: str) -> int:
        words = name.split(".")
        if not words[0].startswith("layer"):
            return 1 + len(blocks) if words[0] == "fc" else 0
        before = groups[: int(words[0].removeprefix("layer")) - 1]
        return 1 + sum(map(len, before)) + int(words[1])

    return [stem, *blocks, head], place


def _plain_layers(model: Any) -> tuple[list[Layer], Callable[[str], int]]:
    starts = {}
    for part, kind in (("features", nn.Conv2d), ("classifier", nn.Linear)):
        found = [i for i, module in enumerate(getattr(model, part)) if isinstance(module, kind)]
        starts[part] = [0, *found[1:]]
    convolutions, linears = starts["features"], starts["classifier"]
    features = [model.features[a:b] for a, b in pairwise([*convolutions, len(model.features)])]
    first, *rest = [model.classifier[a:b] for a, b in pairwise([*linears, len(model.classifier)])]

    def pooled(x: Tensor) -> Tensor:
        out: Tensor = first(model.avgpool(x).flatten(1))
        return out

    def place(name: str) -> int:
        part, number, _ = name.split(".")
        inside = bisect(starts[part], int(number)) - 1
        return inside + (len(features) if part == "classifier" else 0)

    return [*features, pooled, *rest], place


class Stages:
    """``ranges``: (first layer, last layer + 1) of each stage; they cover the model in order.

    ``replicas``: how many copies of each stage share a unit, or with ``turns`` take them in turn.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        ranges: Sequence[tuple[int, int]],
        recipe: Recipe,
        dtype: torch.dtype,
        replicas: Sequence[int] | None = None,
        *,
        turns: bool = False,
    ) -> None:
        self.ranges, self.recipe, self.dtype = tuple(ranges), recipe, dtype
        self.keys = Keys(recipe.seed)
        model = build().to(dtype).train()
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        owned = {id(buffer) for module in norms for buffer in module.buffers()}
        assert {id(buffer) for buffer in model.buffers()} == owned, "buffers that nobody updates"
        self.replicas, self.turns = tuple(replicas or [1] * len(ranges)), turns
        assert len(self.replicas) == len(ranges)
        replace_random_layers(model, self.keys)
        layers, place = _layers(model)
        ends = [0, *(high for _, high in ranges)]
        assert [low for low, _ in ranges] == ends[:-1], ranges
        assert ends[-1] == len(layers), (ranges, len(layers))
        with torch.no_grad():  # weights that no version gave would show
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        self.names = tuple(
            tuple(n for n, _ in model.named_parameters() if low <= place(n) < high)
            for low, high in ranges
        )
        statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
        #: By stage, then replica.
        self.running: list[list[dict[str, Tensor]]] = [
            [
                {n: b.clone() for n, b in statistics.items() if low <= place(n) < high}
                for _ in range(copies)
            ]
            for (low, high), copies in zip(ranges, self.replicas, strict=True)
        ]
        #: An nn.Linear multiplies by a view of its weight.
        self.linear = {
            f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)
        }
        self._stack = _Layers(model, layers)

    def __len__(self) -> int:
        return len(self.ranges)

    def split(self, weights: Weights) -> list[dict[str, Tensor]]:
        """Copies of ``weights`` by stage; every parameter of the model, and nothing else."""
        assert set(weights) == {name for names in self.names for name in names}
        return [
            {name: weights[name].detach().to(self.dtype).clone() for name in names}
            for names in self.names
        ]

    def begin(self, batch: Batch, step: int) -> Tensor:
        """The images (B, ...) of ``batch``, whose masks hold from now on."""
        self.keys.step, self.keys.samples = step, [int(index) for index in batch.indices]
        return torch.from_numpy(batch.images).to(self.dtype).clone()

    def take_over(self, running: Weights) -> None:
        """Every replica has these running statistics from now on."""
        for copies in self.running:
            for copy in copies:
                for name in copy:
                    copy[name] = running[name].to(copy[name], copy=True)

    def averaged(self) -> dict[str, Tensor]:
        """Of every stage the mean over its replicas, which they take over."""
        merged = {}
        for copies in self.running:
            for name, first in copies[0].items():
                values = torch.stack([copy[name] for copy in copies])
                merged[name] = values.mean(0) if first.is_floating_point() else values.max(0)[0]
        self.take_over(merged)
        return merged

    def call(
        self, stage: int, weights: Mapping[str, Tensor], x: Tensor, replica: int = 0
    ) -> Tensor:
        low, high = self.ranges[stage]
        tensors = {**weights, **self.running[stage][replica]}
        named: dict[str, Any] = {f"model.{name}": value for name, value in tensors.items()}
        assert len(weights) == len(self.names[stage])
        out: Tensor = functional_call(self._stack, named, (x, low, high))
        return out

    def loss(self, logits: Tensor, batch: Batch, samples: int) -> Tensor:
        """Sum over the samples of ``batch`` of cross entropy, divided by ``samples``."""
        summed = F.cross_entropy(
            logits,
            torch.from_numpy(batch.labels),
            reduction="sum",
            label_smoothing=self.recipe.label_smoothing,
        )
        return summed / samples

    def shares(self, stage: int, samples: int, unit: int) -> list[tuple[int, int, int]]:
        """(replica, first sample, last sample + 1) of those that compute ``unit`` at a stage."""
        copies = self.replicas[stage]
        if self.turns:
            return [(unit % copies, 0, samples)]
        found, low = [], 0
        for replica in range(copies):
            high = low + (samples + replica) // copies
            if high > low:
                found.append((replica, low, high))
            low = high
        return found

    def gradients(
        self, versions: Leaves, batch: Batch, step: int, samples: int | None = None, unit: int = 0
    ) -> tuple[float, list[dict[str, Tensor]]]:
        """Loss and gradients by stage of one unit: forward and backward on ``versions[stage]``.

        ``samples``: what the sum of losses is divided by, the samples of the unit if left out;
        ``unit``: its number since the last drain, for replicas that take turns.
        """
        leaves = [{n: w.detach().requires_grad_() for n, w in ws.items()} for ws in versions]
        x = self.begin(batch, step)
        ids = self.keys.samples
        for stage, weights in enumerate(leaves):
            pieces = []
            for replica, low, high in self.shares(stage, len(ids), unit):
                self.keys.samples = ids[low:high]
                pieces.append(self.call(stage, weights, x[low:high], replica))
            x = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        loss = self.loss(x, batch, samples or len(batch.labels))
        flat = [weight for weights in leaves for weight in weights.values()]
        found = iter(torch.autograd.grad(loss, flat))
        return loss.item(), [{name: next(found) for name in weights} for weights in leaves]
