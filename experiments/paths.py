"""Where things lie: found from the repository, whatever the working directory."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CLUSTERS", "CONFIGS", "PROFILES", "REPOSITORY", "results_root"]

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = Path(__file__).resolve().parent / "configs"
CLUSTERS = Path(__file__).resolve().parent / "clusters"
PROFILES = Path(__file__).resolve().parent / "profiles"


def results_root() -> Path:
    """``results/`` of the repository, unless the environment variable PIPEBENCH_RESULTS is set."""
    given = os.environ.get("PIPEBENCH_RESULTS")
    return Path(given).absolute() if given else REPOSITORY / "results"
