"""Where and with what a run was made: machine, versions, commit, evidence class."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from experiments.paths import REPOSITORY

__all__ = ["environment", "machine"]

_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "wandb")


def environment(evidence: str) -> dict[str, Any]:
    """The content of a run's env.json; ``evidence``: the class of its times."""
    return {
        "schema": "pipebench.env/1",
        "evidence": evidence,
        "machine": machine(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": _commit(),
    }


def machine() -> dict[str, Any]:
    """What one would name a machine by; nothing that tells whose it is."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "accelerators": _accelerators(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _commit() -> dict[str, Any] | None:
    """None outside a git checkout."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    return {"id": head, "modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
