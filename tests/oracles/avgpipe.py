"""Elastic averaging as a reference: N whole models in plain PyTorch, tied to another one.

    x_i, i = 0 … N−1   the copies, each with an optimizer of its own      c   the reference
    g_i                the gradient of the mean loss over share i of the batch

    after every update     x_i ← Opt_i(x_i, g_i, rate); x_i stays where share i is empty
    after every τ-th of the run
        centre-first       c' = c + α Σ_i (x_i − c),   x_i ← x_i − α (x_i − c')
        symmetric          c' = c + α Σ_i (x_i − c),   x_i ← x_i − α (x_i − c)

Synchronously the sum is over all copies at once.  Asynchronously each stage of each copy is drawn
by itself, the sum then having one term, in whatever order the pipelines got there:

    stage 0   p0  p1  p1  p0        the second time, p1 is drawn to what p0 and p1 left of c;
    stage 1   p1  p1  p0  p0        p0 makes update 1 when both stages of it are drawn
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from tests.oracles.asynchronous import Ranges, Segments, parts
from tests.oracles.stages import Stages
from tests.oracles.synchronous import Batch, Learner, Recipe, State, Weights

__all__ = ["Averaged", "Elastic", "Ensemble", "asynchronous", "shares", "synchronous"]


@dataclass(frozen=True)
class Elastic:
    """N, α, τ and the form."""

    pipelines: int
    alpha: float
    every: int = 1
    form: Literal["centre-first", "symmetric"] = "centre-first"

    def averages(self, update: int) -> bool:
        """Whether copies are drawn after ``update`` of the run."""
        return (update + 1) % self.every == 0


@dataclass(frozen=True)
class Ensemble:
    """What training goes on from.  ``weights`` are c, ``running`` the mean of BatchNorm's running
    statistics over the copies, of counts the largest."""

    weights: Weights
    copies: tuple[State, ...]
    step: int = 0
    running: Weights = field(default_factory=dict)

    @classmethod
    def of(cls, state: State, pipelines: int) -> Ensemble:
        """N copies that have not begun to differ."""
        return cls(state.weights, (state,) * pipelines, state.step, state.running)

    @property
    def mean(self) -> dict[str, Tensor]:
        """Of the copies' weights."""
        return {
            name: torch.stack([copy.weights[name] for copy in self.copies]).mean(0)
            for name in self.weights
        }


@dataclass(frozen=True)
class Averaged:
    """``losses``: of each update, the mean over all samples of the batch, each under the copy that
    learnt it; ``ends``: at the end of each segment."""

    losses: tuple[float, ...]
    ends: tuple[Ensemble, ...]


def shares(batch: Batch, number: int) -> list[Batch | None]:
    """Contiguous, in order, share i of (B + i) // number samples; None for one without."""
    found: list[Batch | None] = list(parts(batch, number))
    return [None] * (number - len(found)) + found


class _Copies:
    """N learners and the weights that they are drawn to."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        start: Ensemble,
        recipe: Recipe,
        elastic: Elastic,
        batches: Iterable[Batch],
        rates: Sequence[float],
        dtype: torch.dtype,
        micro_batches: int,
    ) -> None:
        assert len(start.copies) == elastic.pipelines
        self.elastic, self.first, self.micro_batches = elastic, start.step, micro_batches
        self.learners = [Learner(build, copy, recipe, dtype) for copy in start.copies]
        self.reference = {name: w.to(dtype).clone() for name, w in start.weights.items()}
        self.rates = rates
        self.shares = [shares(batch, elastic.pipelines) for batch in batches]
        assert len(self.shares) == len(rates)
        self.losses = [0.0] * len(rates)

    def idles(self, pipeline: int, update: int) -> bool:
        """Whether a pipeline has no sample of an update of the run."""
        return self.shares[update - self.first][pipeline] is None

    def learn(self, pipeline: int, update: int) -> None:
        """``update`` of the run, by one copy on its share."""
        if self.idles(pipeline, update):
            return
        place = update - self.first
        batch, share = self.shares[place], self.shares[place][pipeline]
        assert share is not None
        units = parts(share, self.micro_batches)
        loss = self.learners[pipeline].update(units, self.rates[place], update).loss
        samples = sum(len(other.labels) for other in batch if other is not None)
        self.losses[place] += loss * len(share.labels) / samples

    @torch.no_grad()
    def average(self, pipelines: Sequence[int], names: Iterable[str]) -> None:
        alpha = self.elastic.alpha
        for name in names:
            old = self.reference[name]
            copies = [self.learners[i].parameters[name] for i in pipelines]
            new = old + alpha * torch.stack([x - old for x in copies]).sum(0)
            centre = new if self.elastic.form == "centre-first" else old
            for x in copies:
                x.copy_(x - alpha * (x - centre))
            self.reference[name] = new

    def ensemble(self, step: int) -> Ensemble:
        copies = tuple(learner.state(step) for learner in self.learners)
        running = {}
        for name, first in copies[0].running.items():
            values = torch.stack([copy.running[name] for copy in copies])
            running[name] = values.mean(0) if first.is_floating_point() else values.max(0)[0]
        return Ensemble(dict(self.reference), copies, step, running)


def synchronous(
    build: Callable[[], nn.Module],
    start: Ensemble,
    recipe: Recipe,
    elastic: Elastic,
    segments: Segments,
    rates: Sequence[float],
    dtype: torch.dtype = torch.float64,
    *,
    micro_batches: int = 1,
) -> Averaged:
    """``segments``: the batches between drains; ``rates``: one a batch, over all segments.

    ``micro_batches`` matters to BatchNorm alone, which normalises each unit by itself.
    """
    batches = [batch for segment in segments for batch in segment]
    run = _Copies(build, start, recipe, elastic, batches, rates, dtype, micro_batches)
    update, ends, pipelines = start.step, [], range(elastic.pipelines)
    for segment in segments:
        for _ in segment:
            for pipeline in pipelines:
                run.learn(pipeline, update)
            if elastic.averages(update):
                run.average(pipelines, run.reference)
            update += 1
        ends.append(run.ensemble(update))
    return Averaged(tuple(run.losses), tuple(ends))


def asynchronous(
    build: Callable[[], nn.Module],
    start: Ensemble,
    recipe: Recipe,
    elastic: Elastic,
    ranges: Ranges,
    segments: Segments,
    rates: Sequence[float],
    orders: Sequence[Sequence[Sequence[int]]],
    dtype: torch.dtype = torch.float64,
    *,
    micro_batches: int = 1,
) -> Averaged:
    """``orders``: by segment, then stage, the pipelines in the order in which they were drawn; one
    may be updates ahead of another.  AssertionError for an order that cannot have been.
    """
    batches = [batch for segment in segments for batch in segment]
    run = _Copies(build, start, recipe, elastic, batches, rates, dtype, micro_batches)
    names = Stages(build, ranges, recipe, dtype).names
    update, ends = start.step, []
    for segment, order in zip(segments, orders, strict=True):
        _follow(run, names, range(update, update + len(segment)), order)
        update += len(segment)
        ends.append(run.ensemble(update))
    return Averaged(tuple(run.losses), tuple(ends))


def _follow(
    run: _Copies,
    names: Sequence[Sequence[str]],
    updates: range,
    order: Sequence[Sequence[int]],
) -> None:
    """All updates of a segment: a copy learns on as soon as every stage of it is drawn.  Where it
    has nothing to learn, none of its stages waits for another."""
    pipelines, stages = range(run.elastic.pipelines), range(len(names))
    times = sum(map(run.elastic.averages, updates))
    assert len(order) == len(names)
    for turns in order:
        assert sorted(turns) == sorted([*pipelines] * times), f"{times} turns each, but {turns}"
    queues = [deque(turns) for turns in order]
    following = dict.fromkeys(pipelines, updates.start)
    #: [pipeline][stage] → how often that stage of the copy is still to be drawn.
    due = [[0 for _ in stages] for _ in pipelines]
    moved = True
    while moved:
        moved = False
        for pipeline in pipelines:
            while following[pipeline] < updates.stop and (
                not any(due[pipeline]) or run.idles(pipeline, following[pipeline])
            ):
                run.learn(pipeline, following[pipeline])
                if run.elastic.averages(following[pipeline]):
                    due[pipeline] = [times + 1 for times in due[pipeline]]
                following[pipeline] += 1
                moved = True
        for stage, queue in enumerate(queues):
            while queue and due[queue[0]][stage]:
                pipeline = queue.popleft()
                run.average([pipeline], names[stage])
                due[pipeline][stage] -= 1
                moved = True
    assert not any(queues), f"an order that cannot have been: {[list(q) for q in queues]} left"
