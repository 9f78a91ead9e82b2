"""Models, data and comparisons of the tests of the references."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.oracles.synchronous import Batch, History, Recipe, vision_transformer

__all__ = [
    "ETAS",
    "INITIAL",
    "MOMENTUM",
    "RATES",
    "RECIPES",
    "THREE",
    "THREE_SCALARS",
    "TWO_SCALARS",
    "VIT",
    "WHOLE",
    "XS",
    "System",
    "assert_same",
    "batches",
    "differ",
    "error",
    "per_stage",
    "scalar_batches",
    "scalar_start",
    "scalars",
    "vit",
    "weights_of",
]

VIT: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 4,
    "in_chans": 1,
    "num_classes": 4,
    "embed_dim": 8,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "pos_drop_rate": 0.1,
    "attn_drop_rate": 0.2,
    "proj_drop_rate": 0.15,
    "drop_path_rate": 0.3,
    "drop_rate": 0.1,
}
WHOLE, THREE = ((0, 4),), ((0, 1), (1, 3), (3, 4))
RECIPES = {
    "sgd": Recipe("sgd", label_smoothing=0.1, seed=5),
    "momentum": Recipe("sgd", momentum=0.9, weight_decay=0.05, seed=5),
    "nesterov": Recipe("sgd", momentum=0.8, nesterov=True, weight_decay=0.05, seed=5),
    # A larger eps than usual: a key bias has no gradient but rounding.
    "adamw": Recipe("adamw", betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1, seed=5),
    "clipped": Recipe("sgd", momentum=0.9, seed=5, clip=0.5),
}
MOMENTUM = RECIPES["momentum"]
RATES = [0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03]
System = Callable[..., History]


def vit() -> nn.Module:
    return vision_transformer(**VIT)


def weights_of(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        state = build().double().state_dict()
        return {name: value + 0.2 * torch.randn_like(value) for name, value in state.items()}


def batches(sizes: Sequence[int], shape: tuple[int, ...] = (1, 8, 8)) -> list[Batch]:
    generator = np.random.default_rng(0)
    return [
        Batch(
            generator.permutation(100)[:size],
            generator.normal(size=(size, *shape)),
            generator.integers(0, 4, size),
        )
        for size in sizes
    ]


def per_stage(recipe: Recipe) -> Recipe:
    return replace(recipe, clip_by="stage")


def error(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The largest, relative to the size of each tensor; a tiny tensor counts as a larger one."""
    assert ours.keys() == reference.keys()
    least = 1e-4 * max(float(value.detach().norm()) for value in reference.values())
    return max(
        float((ours[name] - value).detach().norm()) / max(float(value.detach().norm()), least)
        for name, value in reference.items()
    )


def assert_same(ours: History, reference: History, limit: float = 1e-10) -> None:
    assert ours.losses == pytest.approx(reference.losses, rel=limit)
    for mine, theirs in zip(ours.updates, reference.updates, strict=True):
        assert error(mine.gradients, theirs.gradients) <= limit
        assert error(mine.weights, theirs.weights) <= limit
    assert ours.optimizer.keys() == reference.optimizer.keys()
    for name, moments in reference.optimizer.items():
        assert ours.optimizer[name].keys() == moments.keys()
        for key, value in moments.items():
            mine = ours.optimizer[name][key]
            torch.testing.assert_close(mine, value, rtol=1e-8, atol=1e-10, msg=f"{name} {key}")


def differ(one: History, other: History) -> bool:
    return error(one.updates[-1].weights, other.updates[-1].weights) > 1e-6


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class TwoLogits(nn.Module):
    """z (B, 1) → (z, 0): the loss of label 0 is log(1 + exp(−z))."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([z, torch.zeros_like(z)], dim=1)


def scalars() -> nn.Module:
    return nn.Sequential(Scale(), Scale(), Scale(), TwoLogits())


XS = [1.5, -0.7, 0.9, 2.0, -1.1, 0.4]
INITIAL = [0.8, -0.6, 1.3]
#: Learning rates, unit by unit.
ETAS = [0.5, 0.4, 0.3, 0.2, 0.1, 0.05]
THREE_SCALARS, TWO_SCALARS = ((0, 1), (1, 2), (2, 4)), ((0, 2), (2, 4))


def scalar_start() -> dict[str, Tensor]:
    return {
        f"{i}.weight": torch.tensor(value, dtype=torch.float64) for i, value in enumerate(INITIAL)
    }


def scalar_batches() -> list[Batch]:
    return [Batch(np.array([i]), np.array([[x]]), np.array([0])) for i, x in enumerate(XS)]
