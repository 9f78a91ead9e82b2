"""A program: one stream of actions for each rank and pipeline, generated when it is walked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from runtimes.plan import Plan
from runtimes.schedule.action import SENDS, Action, Op, parse
from runtimes.schedule.batches import Batches

__all__ = ["Channel", "Program", "Stream", "channel"]


@dataclass(frozen=True)
class Stream:
    """The actions of one rank in one pipeline, in order; every walk starts anew.

    ``unkept``: another source of the same actions, which keeps none of them for the next walk.
    """

    rank: int
    pipeline: int
    source: Callable[[], Iterable[Action]]
    unkept: Callable[[], Iterable[Action]] | None = None

    def __iter__(self) -> Iterator[Action]:
        return iter(self.source())

    def once(self) -> Iterator[Action]:
        """A walk that nobody is going to repeat."""
        return iter(self.source() if self.unkept is None else self.unkept())


class Channel(NamedTuple):
    """Where messages keep their order: one sender, one receiver, one kind, one pipeline."""

    pipeline: int
    kind: str
    sender: int
    receiver: int


@dataclass(frozen=True)
class Program:
    """Streams that together train (or, if not ``training``, evaluate) ``batches`` on ``plan``.

    ``after`` holds edges that neither a stream's order nor a message gives: an action waits
    until all of ``after[action]`` are done.

    ``carried`` weight versions from before the segment are there beside the latest: they are
    numbered from 0, so the latest is version ``carried`` at the start.

    ``rendezvous``: a SEND_ACT ends only when its receive is posted, and a receive is posted no
    earlier than when nothing but recomputation, sends of gradients and other receives stands before
    it.  Without it receives are posted ahead and sends are never awaited.

    ``joint_average``: an AVERAGE waits until all pipelines of its rank have made that update
    (``runtimes.schedule.joining``); without it, it waits for nothing but its own stream.

    ``phase``: updates of the run before the segment, modulo the system's period.
    """

    plan: Plan
    batches: Batches
    streams: tuple[Stream, ...]
    training: bool = True
    after: Mapping[Action, tuple[Action, ...]] = field(default_factory=dict)
    rendezvous: bool = False
    carried: int = 0
    joint_average: bool = True
    phase: int = 0

    def updates(self, stage: int) -> int:
        return self.batches.updates(self.plan.stages[stage].replicas)

    def update(self, stage: int, unit: int) -> int:
        """The update of the stage that takes the unit's gradient."""
        return self.batches.update(unit, self.plan.stages[stage].replicas)

    def units(self, pipeline: int, stage: int, update: int) -> Sequence[int]:
        """The units whose gradients an update of the stage takes."""
        return self.batches.units(pipeline, update, self.plan.stages[stage].replicas)

    def steps(self, pipeline: int, stage: int, update: int) -> bool:
        """Whether a pipeline has any sample of an update, and so makes it."""
        return bool(self.units(pipeline, stage, update))

    def next_update(self, pipeline: int, stage: int, update: int) -> int:
        """This update, or the next one that the pipeline makes; as many as there are for none."""
        updates = self.updates(stage)
        while update < updates and not self.steps(pipeline, stage, update):
            update += 1
        return update

    def of_rank(self, rank: int) -> tuple[Stream, ...]:
        return tuple(stream for stream in self.streams if stream.rank == rank)

    def share(self, pipeline: int, stage: int, replica: int, unit: int) -> tuple[int, int]:
        """Samples of the unit that a replica computes, counted within the unit; may be empty."""
        replicas = self.plan.stages[stage].replicas
        return self.batches.share(pipeline, unit, replicas, replica)

    def replaced(self, rank: int, actions: Sequence[Action], pipeline: int = 0) -> Program:
        """The program with one stream given explicitly."""
        fixed = tuple(actions)
        return replace(
            self,
            streams=tuple(
                Stream(rank, pipeline, lambda: fixed)
                if (stream.rank, stream.pipeline) == (rank, pipeline)
                else stream
                for stream in self.streams
            ),
        )

    def text(self) -> str:
        """One line an action, grouped by stream: the form of golden files."""
        lines: list[str] = []
        for stream in self.streams:
            lines.append(f"# rank {stream.rank} pipeline {stream.pipeline}")
            lines.extend(str(action) for action in stream)
        return "\n".join(lines) + "\n"

    def with_text(self, text: str) -> Program:
        """The program with its streams read from the form that :meth:`text` writes."""
        streams: list[Stream] = []
        actions: list[Action] = []
        for line in text.splitlines():
            if line.startswith("# rank "):
                _, _, rank, _, pipeline = line.split()
                actions = []
                streams.append(Stream(int(rank), int(pipeline), actions.copy))
            elif line:
                actions.append(parse(line))
        return replace(self, streams=tuple(streams))


def channel(action: Action, plan: Plan) -> Channel:
    """The channel of a send or receive."""
    here = plan.rank(action.stage, action.replica)
    kind = "ACT" if action.op in (Op.SEND_ACT, Op.RECV_ACT) else "GRAD"
    ahead = action.op in (Op.SEND_ACT, Op.RECV_GRAD)
    assert action.peer is not None
    there = plan.rank(action.stage + (1 if ahead else -1), action.peer)
    sender, receiver = (here, there) if action.op in SENDS else (there, here)
    return Channel(action.pipeline, kind, sender, receiver)
