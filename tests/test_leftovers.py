from __future__ import annotations

import os
import subprocess
import sys
import uuid

from tests.leftovers import MARK, left_behind


def test_an_orphan_is_found_until_it_ends() -> None:
    mark = uuid.uuid4().hex
    assert not left_behind(mark)
    started = subprocess.run(
        ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"],
        env={**os.environ, MARK: mark},
        capture_output=True,
        text=True,
        check=True,
    )
    pids = [process.pid for process in left_behind(mark)]
    os.kill(int(started.stdout), 9)
    assert pids == [int(started.stdout)]


SESSION = f"""
import multiprocessing, os, time
from tests.leftovers import left_behind

def pids():
    return [process.pid for process in left_behind(os.environ["{MARK}"])]

if __name__ == "__main__":
    child = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    child.start()
    assert pids() == [child.pid]
    child.kill()
    child.join()
    assert pids() == []
"""


def test_the_forkserver_stays_but_what_it_forks_does_not() -> None:
    """In an interpreter of its own: pytest's forkserver is started with torch, once."""
    environment = {**os.environ, MARK: uuid.uuid4().hex}
    subprocess.run([sys.executable, "-c", SESSION], env=environment, check=True, timeout=60)
