"""Where things lie: found from the repository, whatever the working directory."""

from __future__ import annotations

import os
from pathlib import Path

from experiments.errors import UserError, did_you_mean

__all__ = ["CLUSTERS", "CONFIGS", "PROFILES", "REPOSITORY", "named_file", "results_root"]

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = Path(__file__).resolve().parent / "configs"
CLUSTERS = Path(__file__).resolve().parent / "clusters"
PROFILES = Path(__file__).resolve().parent / "profiles"


def named_file(name_or_path: str, folder: Path, suffix: str, what: str) -> Path:
    """The file of this path, or of this name in ``folder``; UserError for an unknown name.  What
    ends in ``suffix`` is a path, which need not exist."""
    file = Path(name_or_path).expanduser()
    if file.suffix == suffix:
        return file
    known = sorted(path.stem for path in folder.glob(f"*{suffix}"))
    if name_or_path not in known:
        raise UserError(
            f"unknown {what} {name_or_path!r}{did_you_mean(name_or_path, known)}; or give the path "
            f"of a {suffix} file"
        )
    return folder / f"{name_or_path}{suffix}"


def results_root() -> Path:
    """``results/`` of the repository, unless the environment variable PIPEBENCH_RESULTS is set."""
    given = os.environ.get("PIPEBENCH_RESULTS")
    return Path(given).absolute() if given else REPOSITORY / "results"
