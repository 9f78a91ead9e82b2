"""A rank's life signs: the last action it began, readable after any death."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import threading
import time
from functools import lru_cache
from pathlib import Path

from runtimes.schedule.action import Action

__all__ = [
    "EXIT_DIVERGED",
    "EXIT_OUT_OF_MEMORY",
    "EXIT_TIMEOUT",
    "StatusFile",
    "die_with_parent",
]

#: How a rank's process ends when it knows why; any other code but 0 is a failure.
EXIT_TIMEOUT = 13
EXIT_OUT_OF_MEMORY = 14
EXIT_DIVERGED = 15

_SIZE = 128
_PR_SET_PDEATHSIG = 1


@lru_cache(maxsize=4096)  # Segments repeat their actions.
def _line(what: Action | str) -> bytes:
    return str(what).encode()[:_SIZE].ljust(_SIZE)


class StatusFile:
    """A mapped file of fixed size: noting an action costs a copy, and survives SIGKILL."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.truncate(_SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def note(self, what: Action | str) -> None:
        self._map[:] = _line(what)

    @property
    def text(self) -> str:
        return self._map[:].decode().strip()


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent dies, even by SIGKILL.

    ``parent``: the process id it is expected to have, if known; another one means that it died
    before this call.  The thread is for systems without prctl.
    """
    parent = os.getppid() if parent is None else parent
    # Where there is no prctl, the thread below watches alone.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()
