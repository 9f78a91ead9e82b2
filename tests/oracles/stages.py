"""A model cut into stages, each a function of its own weights and of the stage before.

Layers are counted as the models have them: of a VisionTransformer the embedding, each block and the
head (with the norm and the pooling before it), of an nn.Sequential its children.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


class Stages:
    """``ranges``: (first layer, last layer + 1) of each stage; they cover the model in order."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        ranges: Sequence[tuple[int, int]],
        recipe: Recipe,
        dtype: torch.dtype,
    ) -> None:
        self.ranges, self.recipe, self.dtype = tuple(ranges), recipe, dtype
        self.keys = Keys(recipe.seed)
        model = build().to(dtype).train()
        assert not list(model.buffers()), "running statistics belong to no version of the weights"
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

    def call(self, stage: int, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        low, high = self.ranges[stage]
        named: dict[str, Any] = {f"model.{name}": value for name, value in weights.items()}
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

    def gradients(
        self, versions: Leaves, batch: Batch, step: int, samples: int | None = None
    ) -> tuple[float, list[dict[str, Tensor]]]:
        """Loss and gradients by stage of one unit: forward and backward on ``versions[stage]``.

        ``samples``: what the sum of losses is divided by, the samples of the unit if left out.
        """
        leaves = [{n: w.detach().requires_grad_() for n, w in ws.items()} for ws in versions]
        x = self.begin(batch, step)
        for stage, weights in enumerate(leaves):
            x = self.call(stage, weights, x)
        loss = self.loss(x, batch, samples or len(batch.labels))
        flat = [weight for weights in leaves for weight in weights.values()]
        found = iter(torch.autograd.grad(loss, flat))
        return loss.item(), [{name: next(found) for name in weights} for weights in leaves]
