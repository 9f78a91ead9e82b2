"""Synchronous training as a reference: the whole model, one process, one plain backward a batch.

    loss = sum over the batch's samples of cross entropy / samples in the batch

It shares no code with what it is to judge: torch, timm and numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from tests.oracles.keyed_masks import Keys, replace_random_layers

__all__ = [
    "Batch",
    "History",
    "Recipe",
    "State",
    "Update",
    "Weights",
    "evaluate",
    "starting",
    "train",
    "vision_transformer",
]

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
    #: The largest gradient norm, over the whole model or over each stage for itself.
    clip: float | None = None
    clip_by: Literal["global", "stage"] = "global"


@dataclass(frozen=True)
class State:
    """What training goes on from: any reference takes what another one left behind.

    ``optimizer``: parameter name → state name → value; ``step`` counts the updates (units, in the
    asynchronous systems) so far; ``kept`` is the version before ``weights``, where one lives on;
    ``running`` are BatchNorm's running statistics.
    """

    weights: Weights
    optimizer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    step: int = 0
    kept: Weights | None = None
    running: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """One batch: its loss, the gradients that were applied after it, the weights after that.

    Gradients are clipped already.  Where some stages wait for the rest of a round, ``gradients``
    holds those of the others.  ``versions``: of the weights, by stage, that computed the batch;
    0 is the oldest there was when the segment began.
    """

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class History:
    """``ends``: the state at the end of each segment."""

    updates: tuple[Update, ...]
    ends: tuple[State, ...]

    @property
    def losses(self) -> list[float]:
        return [update.loss for update in self.updates]

    @property
    def optimizer(self) -> Mapping[str, Mapping[str, Any]]:
        """Parameter name → state name → value, after the last update."""
        return self.ends[-1].optimizer


def starting(start: Weights | State) -> State:
    """Weights alone are a training run that has not begun."""
    return start if isinstance(start, State) else State(start)


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
    first: int,
) -> Iterator[Update]:
    keys = Keys(recipe.seed)
    replace_random_layers(model, keys)
    model.train()
    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True), start=first):
        keys.step, keys.samples = step, [int(index) for index in batch.indices]
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        # A copy, for models whose first layer works in place.
        logits = model(torch.from_numpy(batch.images).to(dtype).clone())
        labels = torch.from_numpy(batch.labels)
        summed = F.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=recipe.label_smoothing
        )
        loss = summed / len(batch.labels)
        loss.backward()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip, foreach=False)
        gradients = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients[name] = parameter.grad.clone()
        optimizer.step()
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        yield Update(loss.item(), gradients, weights)


def train(
    build: Callable[[], nn.Module],
    start: Weights | State,
    recipe: Recipe,
    batches: Sequence[Batch],
    rates: Sequence[float],
    dtype: torch.dtype = torch.float64,
) -> History:
    """Train the model that ``build`` makes from ``start``, one update a batch.

    ``rates``: the learning rate of each of these updates; their number in the run keys the masks.
    """
    if recipe.clip is not None and recipe.clip_by != "global":
        raise ValueError("the whole model has one gradient norm: clip_by must be 'global'")
    state = starting(start)
    model = _prepare(build, state.weights, dtype)
    optimizer = _optimizer(model, recipe)
    for name, parameter in model.named_parameters():
        if state.optimizer.get(name):
            optimizer.state[parameter] = _copy(state.optimizer[name])
    updates = tuple(_updates(model, optimizer, recipe, batches, rates, dtype, state.step))
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    moments = {name: _copy(optimizer.state[value]) for name, value in model.named_parameters()}
    return History(updates, (State(weights, moments, state.step + len(batches)),))


def _copy(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}


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
        logits = model(torch.from_numpy(images).to(dtype).clone())  # As in training.
        targets = torch.from_numpy(labels)
        correct = int((logits.argmax(dim=1) == targets).sum())
        return correct, F.cross_entropy(logits, targets, reduction="sum").item()
