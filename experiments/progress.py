"""What happens, on stderr: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

__all__ = ["EventTail", "Progress", "describe"]


class Progress:
    """Messages to the user, from several runs at a time; never on stdout, which is the result's."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._lock = threading.Lock()
        self._now: dict[str, str] = {}
        self._live: Status | None = None

    def say(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            self._console.print(text, markup=False)

    def warn(self, warnings: Iterable[str]) -> None:
        """Of what goes on nonetheless: each once."""
        for text in dict.fromkeys(warnings):
            self.say(f"warning: {text}")

    def update(self, run: str, text: str) -> None:
        """What a run is doing now."""
        if not self._console.is_terminal:
            self.say(f"{run}: {text}")
            return
        with self._lock:
            self._now[run] = text
            self._show()

    @contextlib.contextmanager
    def of(self, run: str) -> Iterator[None]:
        """While a run is at work; afterwards it is doing nothing any more."""
        try:
            yield
        finally:
            with self._lock:
                if self._now.pop(run, None) is not None:
                    self._show()

    def _show(self) -> None:
        text = " · ".join(f"{run}: {doing}" for run, doing in self._now.items())
        if self._live is None:
            # Once a second: what turns faster takes time from the ranks that are being timed.
            self._live = self._console.status("", spinner="line", refresh_per_second=1)
            self._live.start()
        if text:
            # Text, not markup: an action's name may hold what rich takes for a tag.
            self._live.update(text.replace("[", r"\["))
        else:
            self._live.stop()
            self._live = None


class EventTail:
    """New lines of an events.jsonl, each once, as they become whole."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def describe(event: Mapping[str, Any], *, epochs: int, rounds: int) -> str | None:
    """An event in words, if it is worth a line."""
    if event["event"] == "evaluation":
        return f"epoch {event['epoch'] + 1}/{epochs}: accuracy {event['accuracy']:.1%}"
    if event["event"] == "segment" and event["kind"] == "train":
        # Ranks that take turns in one process have no speed.
        wall_s = event.get("wall_s")
        speed = "" if wall_s is None else f": {event['samples'] / wall_s:.0f} images/s"
        return f"update {event['last']}{speed}"
    if event["event"] == "switch":
        return f"update {event['step']}: {event['from']} → {event['to']}, {event['reason']}"
    if event["event"] == "round":
        speed = event["samples"] / event["wall_s"]
        return f"round {event['round'] + 1}/{rounds}: {event['task']} {speed:.1f} images/s"
    return None
