"""The optimizers' equations written out, and clipping: nothing is changed in place.

SGD      d = g + λ w;   b = μ b + d (b = d at first);   w ← w − η b
Nesterov d = g + λ w;   b = μ b + d (b = d at first);   w ← w − η (d + μ b)
AdamW    w ← (1 − η λ) w;   m = β1 m + (1 − β1) g;   v = β2 v + (1 − β2) g²;
         w ← w − η (m / (1 − β1^t)) / (√(v / (1 − β2^t)) + ε),   t = 1 at the first step
clip     g ← g · min(1, c / (‖g‖ + 1e-6)),   ‖·‖ over all tensors that are clipped together

λ and μ act on the weights that are replaced, whatever version g was taken at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.oracles.synchronous import Recipe

__all__ = ["clipped", "stepped"]

Moments = dict[str, Any]


def stepped(
    recipe: Recipe, weight: Tensor, gradient: Tensor, moments: Mapping[str, Any], rate: float
) -> tuple[Tensor, Moments]:
    """The weight after the step and the new moments, under torch's names."""
    rule = _adamw if recipe.optimizer == "adamw" else _sgd
    return rule(recipe, weight, gradient, moments, rate)


def _sgd(
    recipe: Recipe, weight: Tensor, gradient: Tensor, moments: Mapping[str, Any], rate: float
) -> tuple[Tensor, Moments]:
    direction = gradient + recipe.weight_decay * weight
    if recipe.momentum == 0.0:
        return weight - rate * direction, {}
    before = moments.get("momentum_buffer")
    buffer = direction if before is None else recipe.momentum * before + direction
    if recipe.nesterov:
        direction = direction + recipe.momentum * buffer
    else:
        direction = buffer
    return weight - rate * direction, {"momentum_buffer": buffer}


def _adamw(
    recipe: Recipe, weight: Tensor, gradient: Tensor, moments: Mapping[str, Any], rate: float
) -> tuple[Tensor, Moments]:
    beta1, beta2 = recipe.betas
    t = int(moments.get("step", 0)) + 1
    zero = torch.zeros_like(weight)
    m = beta1 * moments.get("exp_avg", zero) + (1 - beta1) * gradient
    v = beta2 * moments.get("exp_avg_sq", zero) + (1 - beta2) * gradient * gradient
    scale = torch.sqrt(v / (1 - beta2**t)) + recipe.eps
    new = (1 - rate * recipe.weight_decay) * weight - rate * (m / (1 - beta1**t)) / scale
    return new, {"step": torch.tensor(float(t)), "exp_avg": m, "exp_avg_sq": v}


def clipped(recipe: Recipe, gradients: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """``gradients`` by stage, clipped together or each stage for itself as the recipe says."""
    if recipe.clip is None:
        return [dict(stage) for stage in gradients]
    squares = [sum(float((g * g).sum()) for g in stage.values()) for stage in gradients]
    if recipe.clip_by == "global":
        squares = [sum(squares)] * len(gradients)
    factors = [min(1.0, recipe.clip / (math.sqrt(square) + 1e-6)) for square in squares]
    return [
        {name: factor * g for name, g in stage.items()}
        for factor, stage in zip(factors, gradients, strict=True)
    ]
