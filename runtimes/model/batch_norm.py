"""BatchNorm per unit: the one layer whose results depend on how a batch is cut.

Of the n samples of a unit that a replica computes, m values a channel,

    y = (x − mean) / √(var + eps) · weight + bias             mean and var of these m values
    running ← (1 − momentum) · running + momentum · (mean, var · m / (m − 1))

so statistics are of a unit and a replica, never of the whole batch.  The running statistics are
updated once a unit, in the order of the forwards, and not again by a recomputation; evaluation uses
them and leaves them alone.  They have no versions: there is one set a replica, whatever weights a
unit runs on.  At every drain the replicas of a stage take over their mean; of num_batches_tracked,
which no result depends on where there is a momentum, the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from runtimes.job import BatchNorm
from runtimes.plan import Plan
from runtimes.schedule.batches import Batches

__all__ = [
    "average_copies",
    "batch_norms",
    "lone_samples",
    "refuse_batch_norm",
    "repeated",
    "reset_running",
    "running_names",
]

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def refuse_batch_norm(module: nn.Module, path: str, batch_norm: BatchNorm | None) -> None:
    """Refuse a BatchNorm that nobody asked to run per unit, or that cannot."""
    if not isinstance(module, _BatchNorm):
        return
    what = f"{path} is a {type(module).__name__}"
    if batch_norm is None:
        raise ValueError(
            f"{what}: its results depend on how a batch is cut into units; set model.batch_norm = "
            '"per-unit" to normalise each unit by itself, or use nn.LayerNorm or nn.GroupNorm'
        )
    if type(module) not in _KINDS:
        raise ValueError(
            f"{what}, which does not run per unit: use nn.BatchNorm1d, nn.BatchNorm2d or "
            "nn.BatchNorm3d"
        )
    if not module.track_running_stats:
        raise ValueError(
            f"{what} without running statistics, so an evaluation would depend on its batches: "
            "set track_running_stats = True"
        )
    if module.momentum is None:
        raise ValueError(
            f"{what} with momentum None, a mean over all units so far, which replicas that saw "
            "different numbers of units cannot average: set a momentum"
        )


def batch_norms(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every BatchNorm in ``module``, which may be one itself."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            yield name, part


def running_names(module: nn.Module) -> tuple[str, ...]:
    """Names, in ``module``, of the buffers that its BatchNorms update."""
    return tuple(
        f"{name}.{buffer}" if name else buffer
        for name, part in batch_norms(module)
        for buffer, _ in part.named_buffers(recurse=False)
    )


def reset_running(module: nn.Module) -> None:
    """Running statistics as those of a model that has seen nothing."""
    for _, part in batch_norms(module):
        part.reset_running_stats()  # type: ignore[operator]


@contextmanager
def repeated(module: nn.Module) -> Iterator[None]:
    """A forward in training mode computes what it computed before, and updates no statistics."""
    parts = [part for _, part in batch_norms(module)]
    for part in parts:
        part.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for part in parts:
            part.track_running_stats = True  # type: ignore[assignment]


@torch.no_grad()
def average_copies(copies: Sequence[Mapping[str, Tensor]]) -> None:
    """Give all replicas of a stage the mean of their running statistics, in place; of counts the
    largest.  Summed in the order of replicas, so that the result is bitwise the same for all."""
    for name, first in copies[0].items():
        values = torch.stack([copy[name] for copy in copies])
        merged = values.sum(0) / len(copies) if first.is_floating_point() else values.amax(0)
        for copy in copies:
            copy[name].copy_(merged)


def lone_samples(plan: Plan, sizes: Iterable[int], *, rounds: bool) -> set[int]:
    """The stages at which, of batches of these sizes, a replica computes a unit of one sample."""
    batches = Batches(tuple(sorted(set(sizes))), plan.micro_batches, plan.pipelines, rounds)
    units = range(len(batches.sizes) * plan.micro_batches)
    return {
        number
        for number, stage in enumerate(plan.stages)
        for unit in units
        for replica in range(stage.replicas)
        for pipeline in range(plan.pipelines)
        for low, high in [batches.share(pipeline, unit, stage.replicas, replica)]
        if high - low == 1
    }
