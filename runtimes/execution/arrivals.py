"""What has come for a rank of several streams, which waits for none of it alone.

gloo does not say whether a message has arrived, but to who waits for it, and a wait that runs out
of time closes the connection for good.  So each channel has a thread that waits, without a limit
and without Python's lock, for one posted receive after the other, and reports.  Collectives report
themselves.  All reports go through one queue, and only the rank's own thread acts on them.
"""

from __future__ import annotations

from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

import torch.distributed as dist

__all__ = ["Arrivals", "Counts"]

#: The rank's own thread keeps the time: a message may be posted long before it is waited for.
_WITHOUT_LIMIT = timedelta(days=365)


class Counts(Protocol):
    """What reports are about: how many of its receives or collectives are over."""

    arrived: int


class Arrivals:
    """Of one program: :meth:`close` ends its threads."""

    def __init__(self) -> None:
        self._news: SimpleQueue[tuple[Counts, Exception | None]] = SimpleQueue()
        self._posted: dict[int, SimpleQueue[dist.Work | None]] = {}
        self._threads: list[Thread] = []

    def expect(self, channel: Counts, work: dist.Work) -> None:
        """The receive is the next of its channel."""
        posted = self._posted.get(id(channel))
        if posted is None:
            posted = self._posted[id(channel)] = SimpleQueue()
            thread = Thread(
                target=self._receive, args=(channel, posted), name="receiver", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        posted.put(work)

    def _receive(self, channel: Counts, posted: SimpleQueue[dist.Work | None]) -> None:
        """The thread of a channel."""
        try:
            while (work := posted.get()) is not None:
                work.wait(_WITHOUT_LIMIT)
                self._news.put((channel, None))
        except Exception as error:
            self._news.put((channel, error))

    def watch(self, sums: Counts, work: dist.Work) -> None:
        """A collective; who waits for it, when it is reported, is told if it failed."""
        work.get_future().add_done_callback(lambda _: self._news.put((sums, None)))

    def note(self) -> None:
        """Take in what has been reported.  Raises what a receive has failed with."""
        while not self._news.empty():
            self._take(*self._news.get_nowait())

    def rest(self, seconds: float) -> bool:
        """Sleep until something is reported, and take it in; False if the time is over before."""
        try:
            news = self._news.get(timeout=max(0.0, seconds))
        except Empty:
            return False
        self._take(*news)
        return True

    def _take(self, subject: Counts, error: Exception | None) -> None:
        if error is not None:
            raise error
        subject.arrived += 1

    def close(self) -> None:
        """All receives are over; end the threads."""
        for posted in self._posted.values():
            posted.put(None)
        for thread in self._threads:
            thread.join()
