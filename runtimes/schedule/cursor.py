"""A stream's walk through the validator's dry run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from runtimes.schedule.action import Action, Op
from runtimes.schedule.program import Stream

__all__ = ["Cursor", "Unit"]


@dataclass
class Unit:
    """A unit in flight at one replica."""

    version: int | None = None
    forward: bool = False
    recomputed: bool = False
    parts: int = 0
    received: dict[Op, list[tuple[int, int]]] = field(default_factory=dict)


@dataclass
class Cursor:
    """One stream's walk, and what its replica has done so far."""

    stream: Stream
    actions: Iterator[Action]
    head: Action | None = None
    position: int = -1
    units: dict[int, Unit] = field(default_factory=dict)
    in_flight: int = 0
    done: dict[int, set[int]] = field(default_factory=dict)
    reduced: dict[int, list[int | None]] = field(default_factory=dict)
    #: Version whose gradients an update takes, by update.
    versions: dict[int, int | None] = field(default_factory=dict)
    #: Units of the update stepped last, whose gradients may still have to be sent.
    stepped: set[int] = field(default_factory=set)
    normed: set[int] = field(default_factory=set)
    steps: int = 0
    #: The update to be stepped next; the latest that a forward was for.
    update: int = 0
    begun: int = -1
    #: Updates averaged after, and up to which one none is overdue.
    averaged: list[int] = field(default_factory=list)
    on_time: int = 0
    ahead: deque[Action] = field(default_factory=deque)

    def advance(self) -> None:
        self.head = self.ahead.popleft() if self.ahead else next(self.actions, None)
        self.position += 1

    def upcoming(self) -> Iterator[Action]:
        """From the head on, without moving."""
        if self.head is not None:
            yield self.head
        yield from tuple(self.ahead)
        for action in self.actions:
            self.ahead.append(action)
            yield action
