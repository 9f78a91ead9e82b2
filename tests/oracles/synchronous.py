"""Synchronous training as a reference: the whole model, one process, one plain backward a batch.

    loss = sum over the batch's samples of cross entropy / samples in the batch

It shares no code with what it is to judge: torch, timm and numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from tests.oracles.keyed_masks import Keys, replace_random_layers

__all__ = ["Batch", "History", "Recipe", "Update", "evaluate", "train", "vision_transformer"]

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """``indices`` (B,) positions in the data set, ``images`` (B, ...), ``labels`` (B,)."""

    indices: np.ndarray[Any, Any]
    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Recipe:
    """Everything of a training run but the model, the data and the learning rates."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    label_smoothing: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Update:
    """One optimizer step: the batch's loss and gradients before it, the weights after it."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class History:
    """``optimizer``: parameter name → state name → value, after the last update."""

    updates: tuple[Update, ...]
    optimizer: dict[str, dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [update.loss for update in self.updates]


def vision_transformer(**arguments: Any) -> VisionTransformer:
    """timm's class itself, with the arguments of its constructor."""
    return VisionTransformer(**arguments)


def _prepare(build: Callable[[], nn.Module], weights: Weights, dtype: torch.dtype) -> nn.Module:
    """A model of that dtype that holds a copy of ``weights``; every name must match."""
    model = build().to(dtype)
    model.load_state_dict(dict(weights), strict=True)
    return model


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(
            model.parameters(),
            lr=0.0,
            betas=recipe.betas,
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
            foreach=False,
        )
    return torch.optim.SGD(
        model.parameters(),
        lr=0.0,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
        foreach=False,
    )


def _updates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    batches: Sequence[Batch],
    rates: Sequence[float],
    dtype: torch.dtype,
) -> Iterator[Update]:
    keys = Keys(recipe.seed)
    replace_random_layers(model, keys)
    model.train()
    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        keys.step, keys.samples = step, [int(index) for index in batch.indices]
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        logits = model(torch.from_numpy(batch.images).to(dtype))
        labels = torch.from_numpy(batch.labels)
        summed = F.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=recipe.label_smoothing
        )
        loss = summed / len(batch.labels)
        loss.backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients[name] = parameter.grad.clone()
        optimizer.step()
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        yield Update(loss.item(), gradients, weights)


def train(
    build: Callable[[], nn.Module],
    weights: Weights,
    recipe: Recipe,
    batches: Sequence[Batch],
    rates: Sequence[float],
    dtype: torch.dtype = torch.float64,
) -> History:
    """Train the model that ``build`` makes from ``weights``, one update a batch.

    ``rates``: the learning rate of each update; the updates count from 0, which keys the masks.
    """
    model = _prepare(build, weights, dtype)
    optimizer = _optimizer(model, recipe)
    updates = tuple(_updates(model, optimizer, recipe, batches, rates, dtype))
    state = {
        name: {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in optimizer.state[parameter].items()
        }
        for name, parameter in model.named_parameters()
    }
    return History(updates, state)


def evaluate(
    build: Callable[[], nn.Module],
    weights: Weights,
    images: np.ndarray[Any, Any],
    labels: np.ndarray[Any, Any],
    dtype: torch.dtype = torch.float64,
) -> tuple[int, float]:
    """(samples whose largest logit is their label's, sum of plain cross entropy), all at once."""
    model = _prepare(build, weights, dtype).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(images).to(dtype))
        targets = torch.from_numpy(labels)
        correct = int((logits.argmax(dim=1) == targets).sum())
        return correct, F.cross_entropy(logits, targets, reduction="sum").item()
