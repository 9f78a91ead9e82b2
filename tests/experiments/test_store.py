"""What is written stays, whole, whoever is killed when; and one process at a time writes it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from experiments import store as store_module
from experiments.errors import UserError
from experiments.store import RunDirectory, Store

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


@pytest.fixture
def run(store: Store) -> RunDirectory:
    run = store.run("a-run")
    run.create()
    return run


def test_a_write_that_fails_leaves_the_file_as_it_was(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write("result.json", "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk")

    monkeypatch.setattr(store_module.os, "fsync", full)
    with pytest.raises(UserError, match="no space left on device.*PIPEBENCH_RESULTS"):
        run.write("result.json", "new" * 1000)
    assert (run.path / "result.json").read_text() == "old"
    assert not list(run.path.glob(".*"))


def test_a_writer_killed_at_any_moment_leaves_old_or_new(run: RunDirectory) -> None:
    """The writer dies between the parts of a write: before it is durable, and before the rename."""
    for moment in ("fsync", "replace"):
        run.write("result.json", "old")
        code = f"""
import os, signal
from pathlib import Path
from experiments.store import RunDirectory
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
os.fsync = die if {moment == "fsync"} else os.fsync
Path.replace = die if {moment == "replace"} else Path.replace
RunDirectory(Path({str(run.path)!r})).write("result.json", "new" * 100000)
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT)
        assert done.returncode == -signal.SIGKILL
        assert (run.path / "result.json").read_text() == "old"


def test_an_event_cut_off_by_a_kill_is_no_event(run: RunDirectory) -> None:
    run.append({"event": "a"})
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"event": "b"')
    assert run.events() == [{"event": "a"}]


def test_events_are_cut_back_to_the_durable_ones(run: RunDirectory) -> None:
    for name in "abcd":
        run.append({"event": name})
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"torn')
    run.cut_events(2)
    run.append({"event": "e"})
    assert [event["event"] for event in run.events()] == ["a", "b", "e"]


@pytest.mark.parametrize("name", ["events.jsonl", "result.json"])
def test_broken_files_are_named(run: RunDirectory, name: str) -> None:
    (run.path / name).write_text("not json\n")
    with pytest.raises(UserError, match=rf"{name} is broken: --fresh"):
        run.events() if name == "events.jsonl" else run.read_json(name)


def test_one_at_a_time(store: Store) -> None:
    with store.lock("a-run"):
        with pytest.raises(UserError, match=rf"a-run is running already, in process {os.getpid()}"):
            store.lock("a-run")
        store.lock("another").__exit__()
    with store.lock("a-run"):
        pass


def test_a_lock_ends_with_the_last_process_that_holds_it(store: Store) -> None:
    """Killed, the launcher lets go; an agent that inherited the lock keeps it until it ends."""
    code = f"""
import subprocess, sys
from pathlib import Path
from experiments.store import Store
lock = Store(Path({str(store.root)!r})).lock("a-run")
agent = subprocess.Popen(["sleep", "60"], pass_fds=(lock.descriptor,))
print(agent.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        agent = int(launcher.stdout.readline())
        launcher.kill()
        launcher.wait()
        with pytest.raises(UserError, match="running already"):
            store.lock("a-run")
        os.kill(agent, signal.SIGKILL)
        _eventually_locked(store)


def _eventually_locked(store: Store) -> None:
    import time

    for _ in range(100):
        try:
            store.lock("a-run").__exit__()
        except UserError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the lock is stale")


def test_archived_records_are_kept_together_and_never_overwritten(store: Store) -> None:
    for _ in range(2):
        for name in ("b-bench", "b-bench.dp", "b-benchmark"):
            store.run(name).create()
        store.archive("b-bench")
    assert [path.name for path in (store.root / "runs").iterdir()] == ["b-benchmark"]
    archived = sorted(path.name.partition("-")[2] for path in (store.root / "archive").iterdir())
    assert archived == ["b-bench", "b-bench", "b-bench.dp", "b-bench.dp"]
    assert store.archive("not-there") is None


def test_results_that_are_a_file(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    with pytest.raises(UserError, match="cannot write .*results.*: not a directory"):
        Store(tmp_path / "results").check()


def test_a_disk_too_small_for_the_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(_: object) -> Any:
        return shutil._ntuple_diskusage(10**6, 0, 10**6)

    monkeypatch.setattr(store_module.shutil, "disk_usage", small)
    store.check(10**6)
    with pytest.raises(UserError, match=r"1.0 MB free, but the run may need 8.9 MB"):
        store.check(8_900_000)


def test_many_may_look_whether_results_can_be_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(store.check) for _ in range(200)]:
            done.result()
    assert not list((tmp_path / "runs").iterdir())


def test_an_event_is_not_added_to_a_torn_line(tmp_path: Path) -> None:
    run = Store(tmp_path).run("some-run")
    run.create()
    run.append({"event": "launch"})
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"event": "st')
    run.append({"event": "end"})
    assert [event["event"] for event in run.events()] == ["launch", "end"]
