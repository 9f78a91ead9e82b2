"""Synchronous training as a reference, unit by unit: for models whose results depend on the units.

    g = Σ_u ∂f_u/∂w at the latest weights,   w ← Opt(w, g, rate),   u = 0 … M − 1

Without BatchNorm this is the plain training of ``synchronous``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tests.oracles.asynchronous import Ranges, Segments, Training, parts
from tests.oracles.optimizers import clipped
from tests.oracles.stages import Stages
from tests.oracles.synchronous import History, Recipe, State, Weights

__all__ = ["flushed"]


def flushed(
    build: Callable[[], nn.Module],
    start: Weights | State,
    recipe: Recipe,
    ranges: Ranges,
    segments: Segments,
    rates: Sequence[float],
    dtype: torch.dtype = torch.float64,
    *,
    micro_batches: int = 1,
    replicas: Sequence[int] | None = None,
) -> History:
    """As ``asynchronous.pipedream_2bw``, but every batch on the latest weights."""
    stages = Stages(build, ranges, recipe, dtype, replicas)
    run = Training(stages, start, segments, rates)
    for segment in segments:
        for batch in segment:
            loss = 0.0
            total = [{n: torch.zeros_like(w) for n, w in ws.items()} for ws in run.latest]
            for unit in parts(batch, micro_batches):
                share, more = stages.gradients(run.latest, unit, run.step, len(batch.labels))
                loss += share
                total = [
                    {name: value + found[name] for name, value in stage.items()}
                    for stage, found in zip(total, more, strict=True)
                ]
            total, rate = clipped(recipe, total), rates[run.units]
            for stage in range(len(stages)):
                run.update(stage, total[stage], rate)
            run.record(loss, total, [0] * len(stages))
        run.drain()
    return run.history()
