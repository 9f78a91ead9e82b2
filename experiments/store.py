"""Run directories: atomic writes, one writer at a time, and what survives a kill."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.errors import UserError
from runtimes.execution.events import drop_torn_line
from runtimes.manifest import write_whole
from runtimes.tracing import TRACE_FILE

__all__ = ["Lock", "RunDirectory", "Store", "writing"]


@contextlib.contextmanager
def writing(what: Path) -> Iterator[None]:
    """Turns what the file system refuses (full, read-only, a file in the way) into a UserError."""
    try:
        yield
    except OSError as error:
        where = error.filename or what
        raise UserError(
            f"cannot write {where}: {(error.strerror or str(error)).lower()}; mend that, or let "
            "PIPEBENCH_RESULTS name another folder for results"
        ) from None


@dataclass(frozen=True)
class RunDirectory:
    """``results/runs/<id>/`` of one run."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    def create(self) -> None:
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "ranks").mkdir(exist_ok=True)

    def write(self, name: str, text: str) -> None:
        with writing(self.path / name):
            write_whole(self.path / name, text.encode())

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        self.write(name, json.dumps(document, indent=1) + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """None if there is no such file; UserError if it is not JSON."""
        try:
            text = (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            document: dict[str, Any] = json.loads(text)
        except ValueError:
            raise UserError(
                f"{self.path / name} is broken: --fresh puts the run aside and starts over"
            ) from None
        return document

    def _lines(self) -> list[bytes]:
        """Whole lines of events.jsonl: what a killed writer left of a last one does not count."""
        try:
            content = (self.path / "events.jsonl").read_bytes()
        except FileNotFoundError:
            return []
        return content.splitlines(keepends=True)[: content.count(b"\n")]

    def events(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in self._lines()]
        except ValueError:
            raise UserError(
                f"{self.path / 'events.jsonl'} is broken: --fresh puts the run aside and starts "
                "over"
            ) from None

    def append(self, event: Mapping[str, Any]) -> None:
        """One whole line, on disk when this returns."""
        path = self.path / "events.jsonl"
        with writing(path):
            drop_torn_line(path)
        with writing(path), path.open("ab") as file:
            # One write: two processes that append can not mix their lines.
            os.write(file.fileno(), json.dumps(event).encode() + b"\n")
            os.fsync(file.fileno())

    def write_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(event) + "\n" for event in events)
        self.write("events.jsonl", text)

    def cut_events(self, lines: int) -> None:
        """Keep the first ``lines`` events."""
        with writing(self.path / "events.jsonl"):
            write_whole(self.path / "events.jsonl", b"".join(self._lines()[:lines]))

    def forget_attempt(self, *, resumed: bool) -> None:
        """Remove what ranks of an earlier attempt left to explain their end, and, unless the run is
        ``resumed`` from it, their trace."""
        patterns = ["error-*.json", "ranks/*.status", *([] if resumed else [TRACE_FILE])]
        with writing(self.path):
            for pattern in patterns:
                for file in self.path.glob(pattern):
                    file.unlink(missing_ok=True)


class Lock:
    """Held by the process that runs a run, and by the agent that inherits ``descriptor``.

    The kernel lets go of it when the last of them ends, however it ends: it is never stale.
    """

    def __init__(self, path: Path, run: str):
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise UserError(f"run {run} is running already, in {holder}: wait for it") from None
        with writing(path):
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()}")
            self._file.flush()

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@dataclass(frozen=True)
class Store:
    """The results directory."""

    root: Path

    def check(self, needed_bytes: int = 0) -> None:
        """UserError unless runs can be written here, and that many bytes are free."""
        runs = self.root / "runs"
        with writing(runs):
            runs.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=runs) as probe:
                probe.write(b"0")
                probe.flush()
                os.fsync(probe.fileno())
            free = shutil.disk_usage(runs).free
        if free < needed_bytes:
            raise UserError(
                f"{runs} has {free / 1e6:.1f} MB free, but the run may need "
                f"{needed_bytes / 1e6:.1f} MB; free some, or let PIPEBENCH_RESULTS name another "
                "folder for results"
            )

    def run(self, run_id: str) -> RunDirectory:
        return RunDirectory(self.root / "runs" / run_id)

    def lock(self, run_id: str) -> Lock:
        return Lock(self.root / "locks" / f"{run_id}.lock", run_id)

    def archive(self, run_id: str) -> Path | None:
        """Move the run, and the records of its contenders, to ``archive/<time>-<id>``."""
        runs = self.root / "runs"
        records = [runs / run_id, *sorted(runs.glob(f"{run_id}.*"))]
        stamp = time.strftime("%Y%m%dT%H%M%S")
        target = None
        with writing(self.root / "archive"):
            for record in filter(Path.exists, records):
                (self.root / "archive").mkdir(parents=True, exist_ok=True)
                target = self.root / "archive" / f"{stamp}-{record.name}"
                count = 1
                while target.exists():
                    target = target.with_name(f"{stamp}.{count}-{record.name}")
                    count += 1
                record.rename(target)
        return target
