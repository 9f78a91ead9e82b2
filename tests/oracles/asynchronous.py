"""Asynchronous pipelines as references: one process, and every version of the weights kept.

Units k = 0, 1, … count since the last drain, stages s = 0 … S−1; w^s_v is version v of stage s,
and w^s_0 its weights when the pipeline was empty.  A unit computes one function of the versions
its stages hold, forward and backward alike; each update goes to the latest version:

    g_k = ∂f_k/∂w^s at (w^0_{v_0}, …, w^{S−1}_{v_{S−1}}),   w^s_{n+1} = Opt(w^s_n, g, rate)

    AshPipe        v_s(k) = max(0, k − (S−1−s)), one update a unit
    PipeDream      round i of stage s: the R_s units from i·R_s; v_s(i) = max(0, i − w_s),
                   w_s = floor((R_s + … + R_{S−1} − 1) / R_s), one update a round, the mean over it
    PipeDream-2BW  W(t+1) = Opt(W(t), ∇f_t(W(max(0, t−1)))), t counts batches over drains too

Replicas share a unit (AshPipe) or take units in turn (PipeDream).  In unit order every version
exists when it is asked for: v_s(i) needs rounds before i − w_s ≤ i, that is, units before
(i − w_s)·R_s ≤ i·R_s, the round's first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.oracles.optimizers import clipped, stepped
from tests.oracles.stages import Stages
from tests.oracles.synchronous import Batch, History, Recipe, State, Update, Weights, starting

__all__ = ["Ranges", "Segments", "Training", "ashpipe", "parts", "pipedream", "pipedream_2bw"]

Ranges = Sequence[tuple[int, int]]
Segments = Sequence[Sequence[Batch]]


class Training:
    """The latest weights of every stage, the optimizer's state, and what has happened so far."""

    def __init__(
        self,
        stages: Stages,
        start: Weights | State,
        segments: Segments,
        rates: Sequence[float],
    ) -> None:
        state = starting(start)
        self.stages, self.recipe, self.rates = stages, stages.recipe, rates
        assert len(rates) == sum(len(segment) for segment in segments)
        self.latest = stages.split(state.weights)
        if state.running:
            stages.take_over(state.running)
        self.moments: dict[str, Mapping[str, Any]] = {
            name: state.optimizer.get(name, {}) for name in state.weights
        }
        self.first = state.step
        self.updates: list[Update] = []
        self.ends: list[State] = []

    @property
    def units(self) -> int:
        """Done since the start, which is the next one's place in ``rates``."""
        return len(self.updates)

    @property
    def step(self) -> int:
        """The next unit's number in the run."""
        return self.first + self.units

    def update(self, stage: int, gradients: Mapping[str, Tensor], rate: float) -> dict[str, Tensor]:
        """Step ``stage``'s latest weights; returns the new version."""
        new = {}
        for name, weight in self.latest[stage].items():
            new[name], self.moments[name] = stepped(
                self.recipe, weight, gradients[name], self.moments[name], rate
            )
        self.latest[stage] = new
        return new

    def record(
        self, loss: float, applied: Sequence[Mapping[str, Tensor]], versions: Sequence[int]
    ) -> None:
        gradients = {name: g for stage in applied for name, g in stage.items()}
        self.updates.append(Update(loss, gradients, self.weights(), tuple(versions)))

    def weights(self) -> dict[str, Tensor]:
        return {name: weight for stage in self.latest for name, weight in stage.items()}

    def drain(self, kept: Weights | None = None) -> None:
        running = self.stages.averaged()
        self.ends.append(State(self.weights(), dict(self.moments), self.step, kept, running))

    def history(self) -> History:
        return History(tuple(self.updates), tuple(self.ends))


def ashpipe(
    build: Callable[[], nn.Module],
    start: Weights | State,
    recipe: Recipe,
    ranges: Ranges,
    segments: Segments,
    rates: Sequence[float],
    dtype: torch.dtype = torch.float64,
    *,
    replicas: Sequence[int] | None = None,
) -> History:
    """``segments``: the batches between drains; ``rates``: one a batch, over all segments."""
    _refuse_a_global_norm(recipe)
    stages = Stages(build, ranges, recipe, dtype, replicas)
    run, S = Training(stages, start, segments, rates), len(stages)
    for segment in segments:
        held = [[weights] for weights in run.latest]  # held[s][v]
        for k, batch in enumerate(segment):
            versions = [max(0, k - (S - 1 - s)) for s in range(S)]
            used = [held[s][v] for s, v in enumerate(versions)]
            loss, gradients = stages.gradients(used, batch, run.step)
            gradients = clipped(recipe, gradients)
            for s in range(S):
                held[s].append(run.update(s, gradients[s], rates[run.units]))
            run.record(loss, gradients, versions)
        run.drain()
    return run.history()


def pipedream(
    build: Callable[[], nn.Module],
    start: Weights | State,
    recipe: Recipe,
    ranges: Ranges,
    segments: Segments,
    rates: Sequence[float],
    dtype: torch.dtype = torch.float64,
    *,
    replicas: Sequence[int] | None = None,
    lr_scaling: Literal["none", "published"] = "none",
    vertical_sync: bool = False,
) -> History:
    """``replicas``: R_s of each stage.  A round has the rate of its first unit, times R_s / R_0 if
    published.  With vertical sync all stages compute unit k on v(k) = max(0, k − (S−1))."""
    _refuse_a_global_norm(recipe)
    stages = Stages(build, ranges, recipe, dtype, replicas, turns=True)
    run, S = Training(stages, start, segments, rates), len(stages)
    R = list(replicas or [1] * S)
    assert len(R) == S
    if vertical_sync:
        assert set(R) == {1}, "rounds of different sizes have no version in common"
        delays = [S - 1] * S
    else:
        delays = [(sum(R[s:]) - 1) // R[s] for s in range(S)]
    for segment in segments:
        held = [[weights] for weights in run.latest]
        rounds: list[list[dict[str, Tensor]]] = [[] for _ in range(S)]  # gradients so far
        segment_rates = rates[run.units : run.units + len(segment)]
        for b, batch in enumerate(segment):
            versions = [max(0, b // R[s] - delays[s]) for s in range(S)]
            assert all(v < len(held[s]) for s, v in enumerate(versions))
            used = [held[s][v] for s, v in enumerate(versions)]
            loss, gradients = stages.gradients(used, batch, run.step, unit=b)
            applied = []
            for s in range(S):
                rounds[s].append(gradients[s])
                if (b + 1) % R[s] and b + 1 < len(segment):
                    continue
                (mean,) = clipped(recipe, [_mean(rounds[s])])
                rounds[s] = []
                factor = R[s] / R[0] if lr_scaling == "published" else 1.0
                rate = segment_rates[b // R[s] * R[s]] * factor
                held[s].append(run.update(s, mean, rate))
                applied.append(mean)
            run.record(loss, applied, versions)
        run.drain()
    return run.history()


def pipedream_2bw(
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
    """``start.kept``, if it is there, is the W(t−1) that the first batch is computed on."""
    stages, kept = Stages(build, ranges, recipe, dtype, replicas), starting(start).kept
    run = Training(stages, start, segments, rates)
    before = None if kept is None else stages.split(kept)
    for segment in segments:
        oldest = run.units - (before is not None)  # which Update.versions counts from
        for batch in segment:
            used = run.latest if before is None else before
            version = run.units - (before is not None) - oldest
            loss, gradients = 0.0, [{n: torch.zeros_like(w) for n, w in ws.items()} for ws in used]
            for part in parts(batch, micro_batches):
                share, more = stages.gradients(used, part, run.step, len(batch.labels))
                loss += share
                for stage in range(len(stages)):
                    gradients[stage] = {n: g + more[stage][n] for n, g in gradients[stage].items()}
            gradients = clipped(recipe, gradients)
            before, rate = list(run.latest), rates[run.units]
            for stage in range(len(stages)):
                run.update(stage, gradients[stage], rate)
            run.record(loss, gradients, [version] * len(stages))
        run.drain(None if before is None else {n: w for ws in before for n, w in ws.items()})
    return run.history()


def parts(batch: Batch, number: int) -> list[Batch]:
    """Contiguous, in order, part i of (B + i) // number samples; empty ones are left out."""
    sizes, low, found = [(len(batch.labels) + i) // number for i in range(number)], 0, []
    for size in sizes:
        piece = slice(low, low + size)
        if size:
            found.append(Batch(batch.indices[piece], batch.images[piece], batch.labels[piece]))
        low += size
    assert low == len(batch.labels)
    return found


def _mean(gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    total = dict(gradients[0])
    for more in gradients[1:]:
        total = {name: value + more[name] for name, value in total.items()}
    return {name: value / len(gradients) for name, value in total.items()}


def _refuse_a_global_norm(recipe: Recipe) -> None:
    if recipe.clip is not None and recipe.clip_by != "stage":
        raise ValueError("stages step at different times: clip_by must be 'stage'")
