"""What a simulator knows of ranks, streams, channels and reductions while time goes on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from runtimes.execution.trace import PARTS
from runtimes.schedule.action import Action, Op
from runtimes.schedule.joining import Joining
from runtimes.schedule.posting import Posting
from runtimes.simulation.network import Route

__all__ = ["Head", "Joint", "Lane", "Rank", "Sent", "Timed"]


class Timed(NamedTuple):
    """One action of a rank: it came to it at ``start``, waited ``waited`` seconds in all (for a
    message, a reduction, a receive to be posted), and was through with it at ``end``."""

    action: Action
    start: float
    end: float
    waited: float


@dataclass(slots=True, eq=False)
class Lane:
    """A channel.  ``arrivals``: what is known of messages that were sent and not taken yet;
    ``posted``: receives posted that no send has used; ``held``: a send that waits for one."""

    route: Route
    receiver: Rank
    sample_bytes: float
    arrivals: deque[tuple[float, Sent]] = field(default_factory=deque)
    posted: int = 0
    held: Sent | None = None


class Sent(NamedTuple):
    """A message whose send ``began`` then; ``blocked``: the rank that waits for its arrival."""

    lane: Lane
    unit: int
    samples: int
    began: float
    blocked: Rank | None


@dataclass(slots=True, eq=False)
class Joint:
    """A reduction or norm; it ``ends`` at a time that is infinite until all have joined."""

    joined: list[Rank] = field(default_factory=list)
    ends: float = math.inf


@dataclass(slots=True, eq=False)
class Head:
    """A stream being walked.  ``samples``: its share of every unit, if that is always the same;
    ``lane``: the channel of ``action``, if that is a message; ``at_once``: nothing can hold the
    action up; ``come``: what is to be posted before it has been."""

    actions: Iterator[Action]
    posting: Posting | None
    samples: int | None
    action: Action | None = None
    lane: Lane | None = None
    at_once: bool = False
    come: bool = False
    lanes: dict[tuple[Op, int | None], Lane] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Rank:
    """``current``: the stream that it is busy with, or blocked in.  It came to that action, or to
    where it waits, at ``since``; it waited ``waited`` seconds for the action, and was blocked in it
    from ``blocked_at`` on."""

    number: int
    stage: int
    replica: int
    joining: Joining
    heads: list[Head] = field(default_factory=list)
    current: Head | None = None
    waits: bool = True
    busy: bool = False
    since: float = 0.0
    waited: float = 0.0
    blocked_at: float = 0.0
    #: Seconds that transfers have stolen and it has not made up for, as of ``debt_at``.
    debt: float = 0.0
    debt_at: float = 0.0
    #: Of computations seen before.
    seconds: dict[tuple[Op, int | None, int], float] = field(default_factory=dict)
    #: Of updates not stepped yet, by pipeline and update: what was reduced, and the norm.
    reductions: dict[tuple[int, int], list[Joint]] = field(default_factory=dict)
    norms: dict[tuple[int, int], Joint] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    timed: list[Timed] = field(default_factory=list)
    #: The latest update that any of its pipelines was averaged after.
    averaged: int = -1

    def robbed(self, seconds: float, now: float) -> None:
        """A transfer that takes so much of its time begins."""
        if not self.busy:
            self.settle(now)
        self.debt += seconds

    def settle(self, now: float) -> None:
        """Being idle until now, it has made up for what it could."""
        self.debt = max(0.0, self.debt - (now - self.debt_at))
        self.debt_at = now
