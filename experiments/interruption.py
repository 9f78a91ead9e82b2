"""Ctrl-C and SIGTERM: while runs are under way they end in order, at other times at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interruption"]


class Interruption:
    """``stop`` is set by the first signal.

    Inside :meth:`deferred` that is all, and those who watch ``stop`` end what they do; elsewhere,
    or at a second signal, KeyboardInterrupt is raised in the main thread.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._deferred = False

    def install(self) -> None:
        """Handle the signals; only the main thread can."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.stop.is_set()
        self.stop.set()
        if again or not self._deferred:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def deferred(self) -> Iterator[threading.Event]:
        self._deferred = True
        try:
            yield self.stop
        finally:
            self._deferred = False
