"""From what probes recorded of a run to properties of the system that ran."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from runtimes.conformance.cases import SEGMENTS
from runtimes.conformance.feed import MemoryFeed
from runtimes.conformance.properties import Properties, Taken
from runtimes.conformance.recorder import (
    NUMBER,
    SAMPLES,
    VERSION,
    Crossing,
    Evaluation,
    Recorder,
    Update,
)
from runtimes.plan import Plan

__all__ = ["Reading"]

#: A version or a sample's share is a sum of a few tens of fractions like 1/8 and 1/3.
EXACT = 1e-9
#: A delay whose forward nobody saw, or whose update a replica did not make.
UNKNOWN = math.inf

_Ledger = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class _Change:
    """An update, by the ledger before and after it; ``left`` is what the one before it left."""

    phase: int
    left: _Ledger
    before: _Ledger
    after: _Ledger

    @property
    def moved(self) -> bool:
        """Whether the weights were changed by something else in between."""
        return bool(np.any(np.abs(self.before - self.left) > EXACT))

    @property
    def weights(self) -> dict[int, float]:
        """Sample → the weight it was taken in with."""
        moved = (self.after - self.before)[SAMPLES:]
        return {int(i): float(moved[i]) for i in np.flatnonzero(np.abs(moved) > EXACT)}


class Reading:
    """From what the probes recorded to properties; the plan says which probe is of which stage."""

    def __init__(self, recorder: Recorder, plan: Plan, probes: int, feed: MemoryFeed) -> None:
        self.recorder, self.feed, self.pipelines = recorder, feed, plan.pipelines
        self.probes = [range(stage.first, min(stage.last, probes)) for stage in plan.stages]
        #: (phase, sample) → the trails it arrived with, all the same if all is well.
        self.trails: dict[tuple[int, int], set[tuple[float, ...]]] = defaultdict(set)
        for arrival in recorder.arrivals:
            if arrival.training:
                self.trails[arrival.phase, arrival.sample].add(arrival.trail)
        self.changes = {number: self._changes(number) for number in range(probes)}
        #: (probe, phase, sample) → the copies of its weights that took the sample in.
        self.takers: dict[tuple[int, int, int], set[int]] = defaultdict(set)
        for number, copies in self.changes.items():
            for place, copy in enumerate(copies):
                for change in copy:
                    for sample in change.weights:
                        self.takers[number, change.phase, sample].add(place)

    def _changes(self, number: int) -> list[list[_Change]]:
        """The updates of each copy of a probe."""
        histories: dict[int, list[Update]] = defaultdict(list)
        for update in self.recorder.updates:
            if update.number == number:
                histories[update.optimizer].append(update)
        copies = []
        for history in histories.values():
            start = np.zeros_like(history[0].ledger)
            start[NUMBER] = number
            left = [start, *(update.ledger for update in history)]
            copies.append(
                [
                    _Change(update.phase, values, update.before, update.ledger)
                    for values, update in zip(left, history, strict=False)
                ]
            )
        return copies

    def properties(self) -> Properties:
        stages, segments = range(len(self.probes)), range(SEGMENTS)
        return Properties(
            delays=tuple(tuple(self._delays(s, segment) for s in stages) for segment in segments),
            live=tuple(max(map(self.recorder.most_live, probes)) for probes in self.probes),
            in_flight=tuple(max(map(self._in_flight, probes)) for probes in self.probes),
            mixed=tuple(sum(map(self._mixed, probes)) for probes in self.probes),
            taken=tuple(tuple(self._taken(s, segment) for s in stages) for segment in segments),
            averaged=tuple(
                tuple(self._averaged(s, segment) for s in stages) for segment in segments
            ),
            evaluated=tuple(self._evaluated(segment) for segment in segments),
        )

    def _of_segment(
        self, stage: int, segment: int
    ) -> Iterator[Sequence[tuple[int, _Change | None]]]:
        """Update by update, (probe, change) of all copies of all probes of a stage; None of those
        that have made fewer updates than others."""
        histories = [
            (number, [change for change in copy if change.phase == segment])
            for number in self.probes[stage]
            for copy in self.changes[number]
        ]
        numbers = [number for number, _ in histories]
        for same in zip_longest(*(changes for _, changes in histories)):
            yield list(zip(numbers, same, strict=True))

    # -- delays ----------------------------------------------------------------------------

    def _delays(self, stage: int, segment: int) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(sorted({delay for number, c in same for delay in self._delays_of(number, c)}))
            for same in self._of_segment(stage, segment)
        )

    def _delays_of(self, number: int, change: _Change | None) -> set[float]:
        if change is None:
            return {UNKNOWN}
        version, found = change.before[VERSION], set[float]()
        for sample in change.weights:
            trails = self.trails[change.phase, sample]
            found |= {_number(version - trail[number]) for trail in trails} or {UNKNOWN}
        return found

    # -- samples ---------------------------------------------------------------------------

    def _taken(self, stage: int, segment: int) -> tuple[Taken, ...]:
        """As that layer saw it who saw the worst: all should agree."""
        return tuple(
            max(
                (
                    self._taken_by([c for n, c in same if n == number and c is not None])
                    for number in self.probes[stage]
                ),
                key=lambda taken: taken.otherwise,
            )
            for same in self._of_segment(stage, segment)
        )

    def _taken_by(self, changes: Sequence[_Change]) -> Taken:
        """Replicas take the same samples in, and pipelines each their own."""
        shares: dict[frozenset[int], list[_Change]] = defaultdict(list)
        for change in changes:
            shares[frozenset(change.weights)].append(change)
        phase, batches = changes[0].phase, len(self.feed.sizes)
        members = [self.feed.indices(phase * batches + place) for place in range(batches)]
        taken = frozenset().union(*shares)
        places = [place for place, ids in enumerate(members) if taken & set(ids.tolist())]
        once = otherwise = 0
        for place in places:
            of_batch = set(members[place].tolist())
            for sample in of_batch:
                takers = [share for share in shares if sample in share]
                # Batches of an update count alike, and so do a pipeline's samples of a batch.
                good = len(takers) == 1 and all(
                    abs(change.weights[sample] * self._share(of_batch, share) * len(places) - 1)
                    <= EXACT
                    for share in takers
                    for change in shares[share]
                )
                once, otherwise = once + good, otherwise + (not good)
        return Taken(tuple(places), once, otherwise)

    def _share(self, of_batch: set[int], taken: frozenset[int]) -> int:
        """How many samples a pipeline's gradient is the mean of."""
        return len(of_batch & taken) if self.pipelines > 1 else len(of_batch)

    def _averaged(self, stage: int, segment: int) -> tuple[tuple[bool, ...], ...]:
        return tuple(
            tuple(sorted({change.moved for _, change in same if change is not None}))
            for same in self._of_segment(stage, segment)
        )

    # -- units -----------------------------------------------------------------------------

    def _crossings(self, number: int) -> Iterator[Sequence[Crossing]]:
        """Of each pipeline of each copy of a probe, in order: the same weights took their samples
        in."""
        copies: dict[tuple[int, frozenset[int]], list[Crossing]] = defaultdict(list)
        for crossing in self.recorder.crossings:
            if crossing.number == number:
                takers = (self.takers[number, crossing.phase, i] for i in crossing.samples)
                pipeline = frozenset().union(*takers) if self.pipelines > 1 else frozenset[int]()
                copies[crossing.copy, pipeline].append(crossing)
        yield from copies.values()

    def _in_flight(self, number: int) -> int:
        peak = 0
        for crossings in self._crossings(number):
            flying: Counter[tuple[int, ...]] = Counter()
            for crossing in crossings:
                if crossing.kind == "forward":
                    flying[crossing.samples] += 1
                elif crossing.kind == "backward":
                    flying[crossing.samples] -= 1
                peak = max(peak, flying.total())
        return peak

    def _mixed(self, number: int) -> int:
        wrong = 0
        for crossing in self.recorder.crossings:
            if crossing.number == number and crossing.kind != "forward":
                trails = set().union(*(self.trails[crossing.phase, i] for i in crossing.samples))
                wrong += {trail[number] for trail in trails} != {crossing.version}
        return wrong

    # -- evaluation ------------------------------------------------------------------------

    def _evaluated(self, segment: int) -> int:
        if self.pipelines > 1:
            return self._evaluated_beside(segment)
        latest = {
            number: {copy[-1].after[VERSION] for copy in self._until(number, segment)}
            for number in self.changes
        }
        times: Counter[int] = Counter()
        for arrival in self.recorder.arrivals:
            if arrival.phase == segment and not arrival.training:
                versions = enumerate(arrival.trail)
                fresh = all(latest[number] == {version} for number, version in versions)
                # What was computed on old weights counts as too often.
                times[arrival.sample] += 1 if fresh else 2
        return sum(count == 1 for count in times.values())

    def _evaluated_beside(self, segment: int) -> int:
        """On weights that nobody steps: the mean of the copies, and others once."""
        met: dict[int, dict[int, list[Evaluation]]] = defaultdict(lambda: defaultdict(list))
        for evaluation in self.recorder.evaluations:
            if evaluation.phase == segment:
                for sample in evaluation.samples:
                    met[sample][evaluation.number].append(evaluation)
        return sum(
            probes.keys() == self.changes.keys() and all(map(_beside, probes.values()))
            for probes in met.values()
        )

    def _until(self, number: int, segment: int) -> Iterator[list[_Change]]:
        for copy in self.changes[number]:
            done = [change for change in copy if change.phase <= segment]
            if done:
                yield done


def _beside(evaluations: Sequence[Evaluation]) -> bool:
    ledgers = {evaluation.ledger for evaluation in evaluations}
    return (
        len(evaluations) == len(ledgers) == 2
        and not any(evaluation.stepped for evaluation in evaluations)
        and any(evaluation.mean for evaluation in evaluations)
    )


def _number(value: float) -> float:
    """Whole where it stands for a whole number."""
    whole = round(value)
    return whole if abs(value - whole) <= EXACT else round(float(value), 6)
