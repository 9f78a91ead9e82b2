"""What a run directory holds of its last drain, without torch: the checkpoint's manifest."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Manifest",
    "read_manifest",
    "sync_directory",
    "write_json",
    "write_manifest",
    "write_whole",
]


@dataclass(frozen=True)
class Manifest:
    """The latest checkpoint: ``step`` updates done, ``events`` durable lines of events.jsonl that
    belong to it, ``files`` (relative to the checkpoint's directory) with their sizes in bytes."""

    step: int
    events: int
    files: Mapping[str, int]


def write_whole(path: Path, content: bytes) -> None:
    """The whole of ``content``, or the file as it was: never half of it, whatever dies when."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, document: object) -> None:
    """As :func:`write_whole`."""
    write_whole(path, json.dumps(document, indent=1).encode())


def sync_directory(directory: Path) -> None:
    """Make a directory's entries durable: what was renamed into it, or appended as a new file."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(run_dir: Path, manifest: Manifest) -> None:
    document = {
        "step": manifest.step,
        "events": manifest.events,
        "files": dict(manifest.files),
    }
    write_json(run_dir / "checkpoint" / "latest.json", document)


def read_manifest(run_dir: Path) -> Manifest | None:
    """The manifest, None where there is no checkpoint; ValueError if a file is not as written."""
    path = run_dir / "checkpoint" / "latest.json"
    if not path.exists():
        return None
    remedy = f"delete {path.parent} to begin again from step 0, or use --fresh"
    try:
        document = json.loads(path.read_text())
        manifest = Manifest(document["step"], document["events"], document["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"checkpoint manifest {path} is damaged: {remedy}") from error
    for name, size in manifest.files.items():
        file = path.parent / str(manifest.step) / name
        found = file.stat().st_size if file.exists() else 0
        if found != size:
            raise ValueError(f"checkpoint {file} is truncated: {found} of {size} bytes; {remedy}")
    return manifest
