"""Synchronous training as a reference: the whole model, one process, one plain backward a batch.

    loss = sum over the batch's samples of cross entropy / samples in the batch

It shares no code with what it is to judge: torch, timm and numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    "Learner",
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


class Learner:
    """A whole model and its optimizer, from ``state`` on; it learns one update after the other."""

    def __init__(
        self, build: Callable[[], nn.Module], state: State, recipe: Recipe, dtype: torch.dtype
    ) -> None:
        if recipe.clip is not None and recipe.clip_by != "global":
            raise ValueError("the whole model has one gradient norm: clip_by must be 'global'")
        self.recipe, self.dtype, self.keys = recipe, dtype, Keys(recipe.seed)
        self.model = _prepare(build, {**state.weights, **state.running}, dtype)
        self.optimizer = _optimizer(self.model, recipe)
        self.parameters = dict(self.model.named_parameters())
        for name, parameter in self.parameters.items():
            if state.optimizer.get(name):
                self.optimizer.state[parameter] = _copy(state.optimizer[name])
        replace_random_layers(self.model, self.keys)
        self.model.train()

    def update(self, units: Sequence[Batch], rate: float, step: int) -> Update:
        """Learn the batch that ``units`` are the pieces of, by the gradient of its mean loss;
        ``step`` counts the updates of the run."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        samples = sum(len(unit.labels) for unit in units)
        loss = sum(self._backward(unit, samples, step) for unit in units)
        if self.recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip, foreach=False)
        gradients = {}
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            gradients[name] = parameter.grad.clone()
        self.optimizer.step()
        return Update(loss, gradients, self.weights())

    def _backward(self, unit: Batch, samples: int, step: int) -> float:
        self.keys.step, self.keys.samples = step, [int(index) for index in unit.indices]
        # A copy, for models whose first layer works in place.
        logits = self.model(torch.from_numpy(unit.images).to(self.dtype).clone())
        labels = torch.from_numpy(unit.labels)
        summed = F.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=self.recipe.label_smoothing
        )
        loss = summed / samples
        loss.backward()
        return loss.item()

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    def state(self, step: int) -> State:
        """After ``step`` updates of the run."""
        moments = {n: _copy(self.optimizer.state[value]) for n, value in self.parameters.items()}
        running = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return State(self.weights(), moments, step, running=running)


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
    state = starting(start)
    learner = Learner(build, state, recipe, dtype)
    updates = tuple(
        learner.update([batch], rate, step)
        for step, (batch, rate) in enumerate(zip(batches, rates, strict=True), start=state.step)
    )
    return History(updates, (learner.state(state.step + len(batches)),))


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
