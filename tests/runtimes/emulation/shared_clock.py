"""One clock for all ranks of a host, which goes on only when all of them sleep.

Each rank's place says what it does: it runs, it computes until a time, or it rests, perhaps until a
time, and then a message wakes it.  The clock goes to the earliest of those times when nobody runs
and no message is under way: runs over processes then have one order of events, that of their times.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch.distributed as dist

from runtimes.emulation.device import Device
from runtimes.emulation.links import Delays
from runtimes.execution.arrivals import Arrivals
from runtimes.execution.distributed import DistributedEngine
from runtimes.schedule import posting

__all__ = ["SharedClock", "device_at", "shared_by"]

#: What a rank does: it runs, computes, or rests.
_RUNS, _COMPUTES, _RESTS = 0.0, 1.0, 2.0
_NEVER = math.inf
_POLL_S = 1e-4


class SharedClock:
    """A collective of all ranks.  The file holds the time, messages sent, messages there, and for
    each rank what it does and until when."""

    def __init__(self, rank: int, ranks: int):
        self._rank, self._form = rank, struct.Struct(f"{3 + 2 * ranks}d")
        self._threads = Lock()
        name = [""]
        if rank == 0:
            descriptor, name[0] = tempfile.mkstemp(prefix="clock-")
            os.truncate(descriptor, self._form.size)
            os.close(descriptor)
        dist.broadcast_object_list(name)
        self._file = open(name[0], "r+b")  # noqa: SIM115 - as long as this.
        self._map = mmap.mmap(self._file.fileno(), 0)
        dist.barrier()
        if rank == 0:
            os.unlink(name[0])

    @contextmanager
    def _values(self) -> Iterator[list[float]]:
        # The file's lock does not keep threads of one process apart.
        with self._threads:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                values = list(self._form.unpack(self._map[:]))
                yield values
                self._map[:] = self._form.pack(*values)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def now(self) -> int:
        return int(self._form.unpack(self._map[:])[0])

    def sent(self) -> None:
        with self._values() as values:
            values[1] += 1

    def there(self) -> None:
        """A message for this rank is: if it rests, it runs."""
        with self._values() as values:
            values[2] += 1
            if values[self._place] == _RESTS:
                values[self._place] = _RUNS

    @property
    def _place(self) -> int:
        return 3 + 2 * self._rank

    def set(self, doing: float, until: float = _NEVER) -> None:
        with self._values() as values:
            values[self._place : self._place + 2] = doing, until

    def sleep_until(self, deadline: int) -> None:
        if deadline > self.now():
            self.set(_COMPUTES, deadline)
            self.asleep()

    def asleep(self) -> None:
        """Until the time has come, or somebody lets this rank run."""
        while True:
            with self._values() as values:
                doing, until = values[3::2], values[4::2]
                if doing[self._rank] == _RUNS or until[self._rank] <= values[0]:
                    values[self._place] = _RUNS
                    return
                due = min(until)
                if _RUNS not in doing and values[1] == values[2] and due < _NEVER:
                    values[0] = max(values[0], due)
            time.sleep(_POLL_S)

    def leave(self) -> None:
        """The rank is done, and takes part again when all are."""
        self.set(_COMPUTES)
        dist.barrier()
        self.set(_RUNS)
        dist.barrier()


class _News(SimpleQueue[Any]):
    clock: SharedClock

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        self.clock.there()


class _Device(Device):
    clock: SharedClock

    def rest(self, arrival: Callable[[float], bool], seconds: float, due: int | None) -> None:
        self.clock.set(_RESTS, _NEVER if due is None else due)
        # What came before is not going to wake anybody.
        if arrival(0):
            self.clock.set(_RUNS)
            return
        if due is None or due > self.clock.now():
            self.clock.asleep()
        self.clock.set(_RUNS)
        if not arrival(0) and due is not None and due <= self.clock.now():
            self._settle(due, self.clock.now())


def device_at(clock: SharedClock) -> Device:
    _Device.clock = clock
    return _Device(clock.now, lambda: 0, clock.sleep_until, linked=True)


def shared_by(clock: SharedClock) -> None:
    """Of everything that this process does from now on."""
    _News.clock = clock
    # A message that no receive is posted for would be under way for as long as its receiver sleeps.
    posting.AHEAD = 64
    begin, sealed, walk = Arrivals.__init__, Delays.sealed, DistributedEngine._walk

    def with_news(self: Arrivals) -> None:
        begin(self)
        self._news = _News()

    def counted(self: Delays, *words: Any) -> Any:
        clock.sent()
        return sealed(self, *words)

    def walked(self: DistributedEngine) -> None:
        walk(self)
        self.ended = clock.now()  # type: ignore[attr-defined]
        clock.leave()

    Arrivals.__init__ = with_news  # type: ignore[method-assign]
    Delays.sealed = counted  # type: ignore[method-assign]
    DistributedEngine._walk = walked  # type: ignore[method-assign]
