"""Checkpoints at a drain: keyed by the parameter's name in the whole model, so that any plan can
start from any other's.

Each process writes what its ranks own; the manifest is renamed into place last, by the first, so a
checkpoint exists whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from runtimes.execution.engine import merged
from runtimes.execution.team import Team
from runtimes.manifest import Manifest, read_manifest, write_manifest

__all__ = ["load_state", "save_state"]


def save_state(run_dir: Path, step: int, team: Team, events: int) -> None:
    """Store the state after ``step`` updates, each process its ranks' share; all call it.

    ``events`` is the first process's count of event lines that are durable together with this
    checkpoint.
    """
    state = team.state()
    directory = run_dir / "checkpoint" / str(step)
    directory.mkdir(parents=True, exist_ok=True)
    written: tuple[str, int] | None = None
    if state["weights"]:
        path = directory / f"rank{team.process}.pt"
        with path.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        written = (path.name, path.stat().st_size)
    files = team.gather(written)
    if team.process == 0:
        write_manifest(run_dir, Manifest(step, events, dict(f for f in files if f)))
        for old in (run_dir / "checkpoint").iterdir():
            if old.is_dir() and old.name != str(step):
                shutil.rmtree(old)
    # Nobody goes on before the checkpoint is there.
    team.gather(None)


def load_state(run_dir: Path) -> tuple[int, dict[str, Any]] | None:
    """(updates done, merged state of all stages) of the latest checkpoint, None without one."""
    manifest = read_manifest(run_dir)
    if manifest is None:
        return None
    directory = run_dir / "checkpoint" / str(manifest.step)
    shares = (
        torch.load(directory / name, map_location="cpu", weights_only=True, mmap=True)
        for name in manifest.files
    )
    return manifest.step, merged(shares)
