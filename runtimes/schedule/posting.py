"""When a rank posts the receives of its stream: pure, so that whoever reads a program knows it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from runtimes.schedule.action import RECEIVES, Action, Op

__all__ = ["AHEAD", "Ahead", "Posting", "Reach", "posting"]

#: Receives posted ahead on each channel.  Two let a message arrive while another is used; more
#: would only hold more memory, since a sender is never made to wait.
AHEAD = 2


class Posting(Protocol):
    """Gives every receive of a stream once, in an order that each channel's messages keep."""

    def begin(self) -> Iterable[Action]:
        """To be posted before the stream is walked."""

    def before(self, action: Action) -> Iterable[Action]:
        """To be posted when the walk has come to a message, before it is waited for."""

    def after(self, action: Action) -> Iterable[Action]:
        """To be posted when the message has been received, or handed over."""


class Ahead:
    """``AHEAD`` a channel, as far as the stream has been looked through: no further than it takes
    to have a next receive for the channel that has just been used."""

    def __init__(self, stream: Iterable[Action]):
        self._upcoming = (action for action in stream if action.op in RECEIVES)
        self._waiting: dict[tuple[Op, int | None], deque[Action]] = defaultdict(deque)
        self._posted: dict[tuple[Op, int | None], int] = defaultdict(int)

    def begin(self) -> list[Action]:
        posted = []
        for action in self._upcoming:
            channel = action.op, action.peer
            self._waiting[channel].append(action)
            posted += self._fill(channel)
            if len(self._waiting[channel]) > AHEAD:
                break
        return posted

    def _fill(self, channel: tuple[Op, int | None]) -> list[Action]:
        posted, waiting = [], self._waiting[channel]
        while waiting and self._posted[channel] < AHEAD:
            self._posted[channel] += 1
            posted.append(waiting.popleft())
        return posted

    def before(self, action: Action) -> list[Action]:
        posted: list[Action] = []
        while action.op in RECEIVES and not self._posted[action.op, action.peer]:
            posted += self.begin()
        return posted

    def after(self, action: Action) -> list[Action]:
        if action.op not in RECEIVES:
            return []
        channel = action.op, action.peer
        self._posted[channel] -= 1
        posted = self._fill(channel)
        return posted if self._waiting[channel] else posted + self.begin()


class Reach:
    """As of ``Program.rendezvous``: those that the walk has come to, with nothing but
    recomputation, sends of gradients and other receives before them."""

    def __init__(self, stream: Iterable[Action]):
        self._stream, self._ahead, self._given = iter(stream), deque[Action](), 0

    def begin(self) -> Iterator[Action]:
        """Up to the first action that may take its time."""
        position = 0
        while position < len(self._ahead) or self._more():
            action = self._ahead[position]
            position += 1
            if action.op in RECEIVES:
                if position > self._given:
                    yield action
            elif action.op not in (Op.R, Op.SEND_GRAD):
                break
            self._given = max(self._given, position)

    def before(self, action: Action) -> Iterator[Action]:
        """The next activation's receive is posted before a gradient leaves, but only after an
        activation has left."""
        if action.op == Op.SEND_ACT:
            return iter(())
        return self._past(action, inclusive=action.op in RECEIVES)

    def after(self, action: Action) -> Iterator[Action]:
        return self._past(action) if action.op == Op.SEND_ACT else iter(())

    def _past(self, action: Action, *, inclusive: bool = False) -> Iterator[Action]:
        """The receives that are in reach behind ``action`` (or, ``inclusive``, with it), each given
        once; nothing before it is left to do."""
        while self._ahead or self._more():
            if self._ahead[0] == action and inclusive:
                break
            passed = self._ahead.popleft()
            self._given -= self._given > 0
            if passed == action:
                break
        return self.begin()

    def _more(self) -> bool:
        action = next(self._stream, None)
        if action is not None:
            self._ahead.append(action)
        return action is not None


def posting(stream: Iterable[Action], *, rendezvous: bool) -> Posting:
    return Reach(stream) if rendezvous else Ahead(stream)
