"""Which processes a test session has left behind, orphans included."""

from __future__ import annotations

import os

import psutil

__all__ = ["MARK", "left_behind"]

#: Every process that a test starts inherits this variable, also when its parent is gone.
MARK = "PIPEBENCH_TEST_SESSION"

SERVERS = "multiprocessing.forkserver import main", "multiprocessing.resource_tracker import main"


def _belongs_to_pytest(process: psutil.Process) -> bool:
    """The servers that multiprocessing keeps for the whole session; what they fork does not."""
    line = " ".join(process.cmdline())
    return process.ppid() == os.getpid() and any(server in line for server in SERVERS)


def left_behind(mark: str) -> list[psutil.Process]:
    """Living processes, but this one, whose environment has ``mark`` as its :data:`MARK`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == mark and not _belongs_to_pytest(process):
                found.append(process)
        except psutil.Error:
            continue  # it ended meanwhile, or is another user's
    return found
