"""What probes saw, in the order in which it happened, and how long each ledger was held."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = [
    "NUMBER",
    "SAMPLES",
    "VERSION",
    "Arrival",
    "Crossing",
    "Evaluation",
    "Kind",
    "Recorder",
    "Update",
]

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
    """``optimizer`` stepped; what probe ``number``'s ledger read ``before``, and afterwards."""

    phase: int
    optimizer: int
    number: int
    before: np.ndarray[Any, np.dtype[np.float64]]
    ledger: np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Evaluation:
    """Samples crossed probe ``number`` in an evaluation: on weights ``ledger``, that some optimizer
    had ``stepped``, or that were the ``mean`` of all those which one had."""

    phase: int
    number: int
    samples: tuple[int, ...]
    ledger: int
    stepped: bool
    mean: bool


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
        self.evaluations: list[Evaluation] = []
        self._before: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}
        #: When somebody trained.
        self._training: list[int] = []
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

    def used(self, copy: int, ledger: Tensor, ids: Tensor, *, training: bool) -> None:
        """A copy of a probe computes samples ``ids`` with this ledger."""
        life = self._met(ledger)
        life.copies.add(copy)
        if training:
            self._training.append(self._clock)
            return
        trained = [
            other
            for key, life_of in self._living.items()
            if life_of.number == life.number and life_of.optimizers
            for other in [self._deaths[key]()]
            if other is not None
        ]
        mean = torch.stack([other.detach() for other in trained]).mean(0)
        self.evaluations.append(
            Evaluation(
                self.phase,
                life.number,
                tuple(ids.tolist()),
                id(ledger),
                bool(life.optimizers),
                bool(torch.allclose(ledger.detach(), mean, rtol=0.0, atol=1e-9)),
            )
        )

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Sees every step of an optimizer, whoever calls it, and so also the versions that no
        forward ever meets."""
        handles = [
            register_optimizer_step_pre_hook(self._steps),
            register_optimizer_step_post_hook(self._stepped),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _ledgers(self, optimizer: Optimizer) -> Iterator[Tensor]:
        for group in optimizer.param_groups:
            for ledger in group["params"]:
                if ledger.shape == (SAMPLES + self.samples,):
                    yield ledger

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        for ledger in self._ledgers(optimizer):
            self._before[id(ledger)] = ledger.detach().numpy().copy()

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for ledger in self._ledgers(optimizer):
            self._met(ledger).optimizers.add(id(optimizer))
            self._training.append(self._clock)
            values = ledger.detach().numpy().copy()
            number, before = int(values[NUMBER]), self._before.pop(id(ledger))
            self.updates.append(Update(self.phase, id(optimizer), number, before, values))

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
        """The most ledgers of one copy of probe ``number`` that existed at a moment of training."""
        lives = [life for life in self._lives if life.number == number]
        copies = {
            optimizer: copy
            for life in lives
            for optimizer in life.optimizers
            for copy in life.copies
        }
        begun: dict[int, list[int]] = defaultdict(list)
        ended: dict[int, list[int]] = defaultdict(list)
        for life in lives:
            users = life.copies | {copies.get(o, o) for o in life.optimizers}
            for copy in users:
                begun[copy].append(life.begin)
                ended[copy].append(self._clock if life.end is None else life.end)
        spans = [(sorted(begun[copy]), sorted(ended[copy])) for copy in begun]
        return max(
            (
                bisect_right(begins, moment) - bisect_left(ends, moment)
                for begins, ends in spans
                for moment in self._training
            ),
            default=0,
        )
