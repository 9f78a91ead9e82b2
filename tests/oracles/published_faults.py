"""Faults of the published AshPipe code, as variants of the reference, to measure what they do.

None of them is a way to train: the reference is ``asynchronous.ashpipe``.  docs/errata.md tells
of all faults that are known, with what these variants measure.

The published code keeps the last W_s + 1 versions of stage s in a queue that starts with copies of
the initial weights.  A backward loads the queue's oldest, which is the version of its forward only
if that queue has been filled since the drain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.oracles.asynchronous import Ranges, Segments, Training
from tests.oracles.optimizers import clipped
from tests.oracles.stages import Leaves, Stages
from tests.oracles.synchronous import Batch, History, Recipe, State, Weights, evaluate

__all__ = [
    "adam_does_not_train",
    "batch_norm_updated_twice",
    "drop_last_validation",
    "masks_drawn_anew",
    "stash_kept_over_drain",
]


def stash_kept_over_drain(
    build: Callable[[], nn.Module],
    start: Weights | State,
    recipe: Recipe,
    ranges: Ranges,
    segments: Segments,
    rates: Sequence[float],
    dtype: torch.dtype = torch.float64,
    *,
    recompute: bool = False,
) -> History:
    """The queue survives drains: with N updates before the segment, unit k runs forward on version
    N + max(0, k − W_s) but backward on max(0, N + k − W_s).

    Autograd kept views of what nn.Linear multiplied by, so those stay the forward's; all other
    weights that a backward needs (LayerNorm, convolutions, scales) are the older ones.  With
    ``recompute`` every stage but the last, which has one version, is computed anew on the older.
    """
    run = Training(Stages(build, ranges, recipe, dtype), start, segments, rates)

    def backward_version(N: int, k: int, W: int) -> int:
        return max(0, N + k - W)

    return _trained(run, segments, backward_version, recompute=recompute, redrawn=False)


def masks_drawn_anew(
    build: Callable[[], nn.Module],
    start: Weights | State,
    recipe: Recipe,
    ranges: Ranges,
    segments: Segments,
    rates: Sequence[float],
    dtype: torch.dtype = torch.float64,
) -> History:
    """Recomputation does not restore the state of the random number generator: the backward of
    every stage but the last goes through other masks than its forward.  The versions are right."""
    run = Training(Stages(build, ranges, recipe, dtype), start, segments, rates)

    def backward_version(N: int, k: int, W: int) -> int:
        return N + max(0, k - W)

    return _trained(run, segments, backward_version, recompute=True, redrawn=True)


def _trained(
    run: Training,
    segments: Segments,
    backward_version: Callable[[int, int, int], int],
    *,
    recompute: bool,
    redrawn: bool,
) -> History:
    stages, S = run.stages, len(run.stages)
    held = [[weights] for weights in run.latest]  # held[s][n], of all segments
    for segment in segments:
        N = run.units
        for k, batch in enumerate(segment):
            ahead = [N + max(0, k - (S - 1 - s)) for s in range(S)]
            back = [backward_version(N, k, S - 1 - s) for s in range(S)]
            loss, gradients = _gradients(
                stages,
                [held[s][v] for s, v in enumerate(ahead)],
                [held[s][v] for s, v in enumerate(back)],
                batch,
                run.step,
                recompute=recompute,
                redrawn=redrawn,
            )
            gradients = clipped(run.recipe, gradients)
            for s in range(S):
                held[s].append(run.update(s, gradients[s], run.rates[run.units]))
            run.record(loss, gradients, [v - N for v in ahead])
        run.drain()
    return run.history()


#: Of a step whose masks no run of a test has.
OTHER_MASKS = 2**31


def _gradients(
    stages: Stages,
    ahead: Leaves,
    back: Leaves,
    batch: Batch,
    step: int,
    *,
    recompute: bool,
    redrawn: bool,
) -> tuple[float, list[dict[str, Tensor]]]:
    """Forward on ``ahead``; each stage's backward on ``back``, from its input of the forward."""
    x, graphs = stages.begin(batch, step), []
    for stage in range(len(stages)):
        entry = x.detach().requires_grad_()
        forward, backward = (
            {name: weight.detach().requires_grad_() for name, weight in versions[stage].items()}
            for versions in (ahead, back)
        )
        # Copies of the entry, for layers that work in place.
        with _loaded_for_backward(forward, back[stage], stages.linear):
            out = stages.call(stage, forward, entry.clone())
        x = out.detach()
        if recompute and stage < len(stages) - 1:
            stages.keys.step = OTHER_MASKS + step if redrawn else step
            graphs.append((entry, backward, stages.call(stage, backward, entry.clone())))
            stages.keys.step = step
        else:
            graphs.append((entry, forward, out))
    logits = x.clone().requires_grad_()
    loss = stages.loss(logits, batch, len(batch.labels))
    (gradient,) = torch.autograd.grad(loss, logits)
    found: list[dict[str, Tensor]] = []
    for entry, leaves, out in reversed(graphs):
        gradient, *own = torch.autograd.grad(out, [entry, *leaves.values()], gradient)
        found.insert(0, dict(zip(leaves, own, strict=True)))
    return loss.item(), found


def _loaded_for_backward(
    leaves: Mapping[str, Tensor], older: Mapping[str, Tensor], views: set[str]
) -> saved_tensors_hooks:
    """Whatever autograd saves of ``leaves`` themselves, it finds replaced by ``older``."""
    names = {weight.data_ptr(): name for name, weight in leaves.items() if name not in views}

    def pack(tensor: Tensor) -> Any:
        name = names.get(tensor.data_ptr())
        # Autograd hands over a detached alias.  Other shapes are views, which keep the old buffer.
        if name is None or tensor.shape != leaves[name].shape:
            return tensor
        return name

    def unpack(saved: Any) -> Tensor:
        return older[saved] if isinstance(saved, str) else saved

    return saved_tensors_hooks(pack, unpack)


def adam_does_not_train(
    build: Callable[[], nn.Module],
    start: Weights | State,
    recipe: Recipe,
    ranges: Ranges,
    segments: Segments,
    rates: Sequence[float],
    dtype: torch.dtype = torch.float64,
) -> History:
    """The published Adam makes new tensors while the queue keeps those of before the step, so that
    a stage with more than one version, every stage but the last, stays as it was."""
    assert recipe.optimizer == "adamw"
    stages = Stages(build, ranges, recipe, dtype)
    run = Training(stages, start, segments, rates)
    initial = list(run.latest[:-1])
    for segment in segments:
        for k, batch in enumerate(segment):
            loss, gradients = stages.gradients(run.latest, batch, run.step)
            gradients = clipped(recipe, gradients)
            for stage in range(len(stages)):
                run.update(stage, gradients[stage], rates[run.units])
            run.latest[:-1] = initial
            run.record(loss, gradients, [0] * (len(stages) - 1) + [k])
        run.drain()
    return run.history()


def drop_last_validation(
    build: Callable[[], nn.Module],
    weights: Weights,
    images: np.ndarray[Any, Any],
    labels: np.ndarray[Any, Any],
    batch_size: int,
    dtype: torch.dtype = torch.float64,
) -> tuple[int, float, int]:
    """(hits, sum of cross entropy, samples seen) of the whole batches alone."""
    seen = len(labels) - len(labels) % batch_size
    return (*evaluate(build, weights, images[:seen], labels[:seen], dtype), seen)


def batch_norm_updated_twice(
    batches: Sequence[Tensor], momentum: float, *, recompute: bool = True
) -> nn.BatchNorm1d:
    """torch's layer after a forward of every batch (B, C) and, once more in training mode, its
    recomputation; without ``recompute`` as it should be."""
    layer = nn.BatchNorm1d(batches[0].shape[1], momentum=momentum, dtype=batches[0].dtype)
    for batch in batches:
        for _ in range(1 + recompute):
            layer(batch)
    return layer
