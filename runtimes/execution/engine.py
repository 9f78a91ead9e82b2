"""What a run loop needs of a system on one rank: ours and the peers are driven alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

__all__ = ["Accuracy", "Engine", "Feed", "Segment", "SegmentReport", "added", "merged"]


class Feed(Protocol):
    """Which samples each batch has, and their values: a pure function, the same on every rank.

    Steps count the whole run's updates from 0; indices are positions in the data set.
    """

    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of each batch of an epoch, of any epoch; the last may be smaller."""

    def indices(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(B,) sample indices of the batch of update ``step``."""

    def images(self, indices: np.ndarray[Any, Any], step: int) -> Tensor:
        """(n, C, H, W) normalised and augmented, on the device, in the run's dtype."""

    def labels(self, indices: np.ndarray[Any, Any]) -> Tensor:
        """(n,) int64, on the device."""


@dataclass(frozen=True)
class Segment:
    """A stretch of training between two drains: batches of these sizes from update ``first``."""

    first: int
    batches: tuple[int, ...]


@dataclass
class SegmentReport:
    """What one rank saw of a segment.  ``losses[step]`` is this rank's share of the update's loss,
    already divided by the samples of the global batch: the shares of all ranks add up to it.

    Of parallel pipelines: ``pipeline_losses[step]``, by pipeline, shares of the mean over that
    pipeline's part of the batch; ``squared_distances``, the squares of each copy's distance to the
    reference at the end, over this rank's parameters, on one replica of a stage; ``averaged``, the
    pipelines of its averagings in their order, where each makes its own.
    """

    wall_s: float
    losses: dict[int, float] = field(default_factory=dict)
    breakdown: dict[str, float] = field(default_factory=dict)
    live_versions: int = 1
    peak_in_flight: int = 0
    pipeline_losses: dict[int, dict[int, float]] = field(default_factory=dict)
    squared_distances: list[float] = field(default_factory=list)
    averaged: list[int] | None = None


@dataclass(frozen=True)
class Accuracy:
    """This rank's share of an evaluation; the shares of all ranks add up to the whole.

    ``mean``: where parallel pipelines are tied to a reference, which is what was evaluated, the
    same of the mean of their copies.
    """

    correct: int = 0
    loss_sum: float = 0.0
    samples: int = 0
    mean: Accuracy | None = None


def added(shares: Sequence[Accuracy]) -> Accuracy:
    """The whole, of which these are the shares."""
    means = [share.mean for share in shares if share.mean is not None]
    return Accuracy(
        sum(share.correct for share in shares),
        sum(share.loss_sum for share in shares),
        sum(share.samples for share in shares),
        added(means) if means else None,
    )


def merged(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole state, as of Engine.state, of which ``states`` are what ranks own."""
    whole: dict[str, Any] = {"weights": {}, "optimizer": {}, "stash": {}}
    for state in states:
        _merge(whole, state)
    return whole


def _merge(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, Mapping):
            _merge(whole.setdefault(key, {}), value)
        else:
            whole[key] = value


class Engine(Protocol):
    """One system on one rank.  Every rank calls the same methods in the same order."""

    def train(self, segment: Segment) -> SegmentReport: ...

    def evaluate(self, feed: Feed, samples: int, batch_size: int) -> Accuracy:
        """Top-1 over samples 0 … samples−1 of ``feed``, in evaluation mode."""

    def state(self) -> Mapping[str, Any]:
        """{"weights": {parameter name of the whole model: Tensor},
        "optimizer": {parameter name: {state name: Tensor or number}},
        "stash": {parameter name: Tensor} of the version before, for systems that carry it over}
        of what this rank owns; empty on ranks whose copy another rank stores.

        Of parallel pipelines "weights" are the reference's, which has no optimizer state, and
        "copies": {pipeline, as text: {"weights": …, "optimizer": …}} are beside them."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what this rank needs of a merged state."""

    def close(self) -> None:
        """The run goes on without this engine: give back what its transport holds."""
