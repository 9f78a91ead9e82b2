"""What probes saw, in the order in which it happened, and how long each ledger was held."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["NUMBER", "SAMPLES", "VERSION", "Arrival", "Crossing", "Kind", "Recorder", "Update"]

#: Places in a ledger; that of sample i is SAMPLES + i.
VERSION, NUMBER, SAMPLES = 0, 1, 2

Kind = Literal["forward", "recomputation", "backward"]


@dataclass(frozen=True)
class Crossing:
    """A unit crossed copy ``copy`` of probe ``number``, whose ledger read ``version``."""

    phase: int
    kind: Kind
    copy: int
    number: int
    samples: tuple[int, ...]
    version: float


@dataclass(frozen=True)
class Arrival:
    """A sample arrived at the end of the model; ``trail``: the versions that it says it crossed."""

    phase: int
    training: bool
    sample: int
    trail: tuple[float, ...]


@dataclass(frozen=True)
class Update:
    """``optimizer`` stepped; ``ledger``: what probe ``number``'s read afterwards."""

    phase: int
    optimizer: int
    number: int
    ledger: np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class _Life:
    """A ledger existed from event ``begin`` to event ``end``, used by copies and optimizers."""

    number: int
    begin: int
    end: int | None = None
    copies: set[int] = field(default_factory=set)
    optimizers: set[int] = field(default_factory=set)


class Recorder:
    """One for a run, shared by all copies of its probes; ``phase`` counts the run's segments.

    ``samples``: how many the data set has, which decides the length of a ledger.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.phase = 0
        self.crossings: list[Crossing] = []
        self.arrivals: list[Arrival] = []
        self.updates: list[Update] = []
        self._clock = 0
        self._lives: list[_Life] = []
        self._living: dict[int, _Life] = {}
        self._deaths: dict[int, weakref.ref[Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        """Stages are made of copies of layers, which all report here."""
        return self

    # -- reports ---------------------------------------------------------------------------

    def crossing(self, kind: Kind, copy: int, ids: Tensor, ledger: Tensor) -> None:
        samples = tuple(ids.tolist())
        number, version = int(ledger[NUMBER].detach()), float(ledger[VERSION].detach())
        self.crossings.append(Crossing(self.phase, kind, copy, number, samples, version))

    def arrival(self, training: bool, ids: Tensor, trails: Tensor) -> None:
        for sample, trail in zip(ids.tolist(), trails.tolist(), strict=True):
            self.arrivals.append(Arrival(self.phase, training, int(sample), tuple(trail)))

    def used(self, copy: int, ledger: Tensor) -> None:
        """A copy of a probe computes with this ledger."""
        self._met(ledger).copies.add(copy)

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Sees every step of an optimizer, whoever calls it, and so also the versions that no
        forward ever meets."""
        handle = register_optimizer_step_post_hook(self._stepped)
        try:
            yield
        finally:
            handle.remove()

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for ledger in group["params"]:
                if ledger.shape == (SAMPLES + self.samples,):
                    self._met(ledger).optimizers.add(id(optimizer))
                    values = ledger.detach().numpy().copy()
                    number = int(values[NUMBER])
                    self.updates.append(Update(self.phase, id(optimizer), number, values))

    # -- what was held at once -------------------------------------------------------------

    def _met(self, ledger: Tensor) -> _Life:
        self._clock += 1
        key = id(ledger)
        if key not in self._living:
            self._living[key] = _Life(int(ledger[NUMBER].detach()), self._clock)
            self._lives.append(self._living[key])
            self._deaths[key] = weakref.ref(ledger, lambda _: self._died(key))
        return self._living[key]

    def _died(self, key: int) -> None:
        self._living.pop(key).end = self._clock
        del self._deaths[key]

    def most_live(self, number: int) -> int:
        """The most ledgers of one copy of probe ``number`` that existed at one moment."""
        lives = [life for life in self._lives if life.number == number]
        copies = {
            optimizer: copy
            for life in lives
            for optimizer in life.optimizers
            for copy in life.copies
        }
        changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for life in lives:
            users = life.copies | {copies.get(o, o) for o in life.optimizers}
            end = self._clock if life.end is None else life.end
            for copy in users:
                changes[copy] += [(life.begin, 1), (end + 1, -1)]
        peaks = [
            max(accumulate(change for _, change in sorted(moments))) for moments in changes.values()
        ]
        return max(peaks, default=0)
