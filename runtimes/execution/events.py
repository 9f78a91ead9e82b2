"""The record of a run as it happens: one JSON object a line, written by rank 0 at drains."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["EventLog", "drop_torn_line"]


def drop_torn_line(path: Path) -> None:
    """Cut off what a writer that died left behind the last whole line, so none is added to it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
            os.fsync(file.fileno())


class EventLog:
    """Appends whole lines to events.jsonl, durable when :meth:`write` returns."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / "events.jsonl"
        drop_torn_line(self._path)
        self.lines = 0
        if self._path.exists():
            with self._path.open("rb") as file:
                self.lines = sum(1 for _ in file)

    def events(self) -> list[dict[str, Any]]:
        """What has been recorded so far."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def write(self, events: Iterable[Mapping[str, Any]]) -> None:
        text = [json.dumps(event, allow_nan=False) + "\n" for event in events]
        with self._path.open("a") as file:
            file.write("".join(text))
            file.flush()
            os.fsync(file.fileno())
        self.lines += len(text)
