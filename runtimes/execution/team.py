"""All ranks of a run, seen from one of its processes, which runs one of them or all.

The loops that train know nothing else of how ranks are spread over processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from runtimes.execution.collection import collect
from runtimes.execution.engine import Accuracy, Engine, Feed, Segment, SegmentReport
from runtimes.execution.handover import redistribute
from runtimes.execution.inprocess import InProcess
from runtimes.execution.starting import untied
from runtimes.model.stack import LayerStack
from runtimes.plan import Plan
from runtimes.timeline import Timeline

__all__ = ["DistributedTeam", "InProcessTeam", "Team", "gather"]

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """Every process's value, in the order of ranks; a collective, outside timed regions."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Team(Protocol):
    """One system on all ranks.  Every process calls the same methods in the same order.

    ``process`` counts the processes from 0, which writes the record; ``timed`` tells whether the
    ranks run side by side, so that the time they take means anything.
    """

    process: int
    plan: Plan
    timed: bool

    def train(self, segment: Segment) -> Sequence[SegmentReport]:
        """The reports of all ranks, in their order."""

    def timeline(self, label: str, segment: Segment, words: str) -> Timeline | None:
        """What was done when in the segment just trained, which ``words`` name: for process 0,
        if the system tells it and time means anything."""

    def evaluate(self, feed: Feed, samples: int, batch_size: int) -> Sequence[Accuracy]:
        """Shares that add up to the whole."""

    def state(self) -> Mapping[str, Any]:
        """As of an engine: what the ranks of this process own."""

    def load(self, state: Mapping[str, Any]) -> None:
        """As of an engine."""

    def hand_over(self, plan: Plan) -> Mapping[str, Any]:
        """What the ranks of this process need of the state under another plan; this team ends."""

    def gather(self, value: T) -> list[T]:
        """Every process's value, in their order."""


class DistributedTeam:
    """A process for each rank: this one runs one of ours or of the peers' engines."""

    timed = True

    def __init__(self, engine: Engine, plan: Plan, stack: LayerStack, rank: int, device: str):
        self.process, self.plan = rank, plan
        self._engine, self._stack, self._device = engine, stack, torch.device(device)

    def train(self, segment: Segment) -> Sequence[SegmentReport]:
        return gather(self._engine.train(segment))

    def timeline(self, label: str, segment: Segment, words: str) -> Timeline | None:
        return collect(self._engine, label, first=segment.first, words=words)

    def evaluate(self, feed: Feed, samples: int, batch_size: int) -> Sequence[Accuracy]:
        return gather(self._engine.evaluate(feed, samples, batch_size))

    def state(self) -> Mapping[str, Any]:
        return self._engine.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._engine.load(state)

    def hand_over(self, plan: Plan) -> Mapping[str, Any]:
        stages = [self._stack.tensor_names(stage.first, stage.last) for stage in plan.stages]
        needs = [stages[plan.place(rank)[0]] for rank in range(plan.world_size)]
        state = redistribute(untied(self._engine.state()), needs, self.process, self._device)
        self._engine.close()
        return state

    def gather(self, value: T) -> list[T]:
        return gather(value)


class InProcessTeam:
    """All ranks in this one process, which takes turns with them."""

    process = 0
    timed = False

    def __init__(self, engine: InProcess):
        self.plan = engine.plan
        self._engine = engine

    def train(self, segment: Segment) -> Sequence[SegmentReport]:
        return self._engine.train(segment)

    def timeline(self, label: str, segment: Segment, words: str) -> Timeline | None:
        return None

    def evaluate(self, feed: Feed, samples: int, batch_size: int) -> Sequence[Accuracy]:
        return [self._engine.evaluate(feed, samples, batch_size)]

    def state(self) -> Mapping[str, Any]:
        return self._engine.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._engine.load(state)

    def hand_over(self, plan: Plan) -> Mapping[str, Any]:
        return untied(self._engine.state())

    def gather(self, value: T) -> list[T]:
        return [value]
