"""Optimizers and learning rates: built from plain data, the same for every system."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from runtimes.job import LearningRate, OptimizerSpec

__all__ = ["build_optimizer", "clip", "learning_rate", "squared_norm"]


def build_optimizer(params: Iterable[Parameter], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """SGD (momentum, Nesterov) or AdamW over one group of ``params``, which may be none.

    Weight decay acts on every parameter.  The caller sets the group's "lr" at each update.
    Raises ValueError for values the method does not take.
    """
    _check(spec)
    # A list of groups, since torch refuses a list without parameters: a stage may have none.
    groups = [{"params": list(params)}]
    if spec.name == "sgd":
        return torch.optim.SGD(
            groups,
            lr=spec.lr,
            momentum=spec.momentum,
            nesterov=spec.nesterov,
            weight_decay=spec.weight_decay,
        )
    return torch.optim.AdamW(
        groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
    )


def squared_norm(gradients: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """() float64: the sum of the squares of all gradients."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        if gradient is not None:
            total += gradient.square().sum(dtype=torch.float64)
    return total


def clip(gradients: Iterable[Tensor | None], squares: Tensor, most: float) -> None:
    """Scale in place by min(1, most / (norm + 1e-6)), the norm's square being given, as
    torch.nn.utils.clip_grad_norm_ does."""
    factor = (most / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(factor.to(gradient.dtype))


def _check(spec: OptimizerSpec) -> None:
    if spec.clip is not None and not (math.isfinite(spec.clip) and spec.clip > 0):
        raise ValueError(f"optimizer clip is {spec.clip}, but must be finite and above 0")
    if spec.name not in ("sgd", "adamw"):
        raise ValueError(f"optimizer {spec.name!r} is unknown: use sgd or adamw")
    for name, value in (("lr", spec.lr), ("weight_decay", spec.weight_decay)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"optimizer {name} is {value}, but must be finite and at least 0")
    if not 0 <= spec.momentum < 1:
        raise ValueError(f"optimizer momentum is {spec.momentum}, but must lie in [0, 1)")
    if spec.nesterov and not spec.momentum:
        raise ValueError(
            "optimizer nesterov needs a momentum above 0: set one, or nesterov = false"
        )
    if spec.name == "adamw" and spec.momentum:
        raise ValueError(
            f"optimizer momentum is {spec.momentum}, but adamw has betas instead: set it to 0"
        )
    if not all(0 <= beta < 1 for beta in spec.betas):
        raise ValueError(f"optimizer betas are {spec.betas}, but must lie in [0, 1)")
    if not (math.isfinite(spec.eps) and spec.eps > 0):
        raise ValueError(f"optimizer eps is {spec.eps}, but must be finite and above 0")


def learning_rate(
    spec: OptimizerSpec, rate: LearningRate, step: int, steps_per_epoch: int, epochs: int
) -> float:
    """The rate of update ``step`` (from 0), a pure function: peak × warm-up × decay.

    peak = ``spec.lr``; with w updates of warm-up and T = epochs · steps_per_epoch in all,

    - warm-up: (step + 1) / w for step < w, so update w − 1 is the first at the peak;
    - cosine: floor + (1 − floor) · (1 + cos π t) / 2, t = (step − w) / (T − w), as in Loshchilov
      and Hutter 2017, eq. 5, without restarts: the floor is the limit at the end of the last epoch,
      not the rate of the last update, which would be wasted at a floor of 0;
    - step: gamma to the power of the milestones passed.

    w and the milestones are rounded to whole updates.  Updates after the last epoch (benchmarks may
    run on) keep the rate of the end.  Raises ValueError for values out of range.
    """
    _check_rate(rate, step, steps_per_epoch, epochs)
    warmup = round(rate.warmup_epochs * steps_per_epoch)
    factor = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if rate.kind == "cosine" and step >= warmup:
        progress = min(1.0, (step - warmup) / max(1, epochs * steps_per_epoch - warmup))
        factor = rate.floor + (1 - rate.floor) * (1 + math.cos(math.pi * progress)) / 2
    elif rate.kind == "step":
        factor *= rate.gamma ** sum(step >= round(m * steps_per_epoch) for m in rate.milestones)
    return spec.lr * factor


def _check_rate(rate: LearningRate, step: int, steps_per_epoch: int, epochs: int) -> None:
    if rate.kind not in ("constant", "cosine", "step"):
        raise ValueError(
            f"learning-rate schedule {rate.kind!r} is unknown: use constant, cosine or step"
        )
    if step < 0 or steps_per_epoch < 1 or epochs < 1:
        raise ValueError(
            f"no learning rate at update {step} of {epochs} epochs of {steps_per_epoch} updates: "
            "updates count from 0, and there must be at least one"
        )
    if not 0 <= rate.warmup_epochs <= epochs:
        raise ValueError(
            f"warmup_epochs is {rate.warmup_epochs}, but must lie between 0 and the {epochs} epochs"
        )
    if not 0 <= rate.floor <= 1:
        raise ValueError(f"floor is {rate.floor}, but is a share of the peak between 0 and 1")
    if not rate.gamma > 0:
        raise ValueError(f"gamma is {rate.gamma}, but must be above 0")
    if any(milestone < 0 for milestone in rate.milestones):
        raise ValueError(f"milestones are {rate.milestones}, but epochs count from 0")
