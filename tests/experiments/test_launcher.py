"""Ranks through the real agent: how they end, who is named, and that none is left.

The rank program is a stand-in, so what takes time is the agent's import of torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from experiments.agent import LaunchSpec
from experiments.config import Launch
from experiments.launcher import launch, launch_spec
from experiments.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("rank_stand_in.py")
LIMIT_S = 30

pytestmark = pytest.mark.timeout(120)


def command(run_dir: Path, *behaviours: str) -> tuple[str, ...]:
    pairs = [f"{rank}={behaviour}" for rank, behaviour in enumerate(behaviours)]
    return (sys.executable, str(PROGRAM), str(run_dir), *pairs)


def spec_of(run_dir: Path, *behaviours: str) -> LaunchSpec:
    return launch_spec(Launch(), command(run_dir, *behaviours), len(behaviours), run_dir.name)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "a-run"
    (folder / "ranks").mkdir(parents=True)
    return folder


def pids(run_dir: Path, ranks: int = 2) -> list[int]:
    """Of all ranks, once they run."""
    files = [run_dir / f"pid-{rank}" for rank in range(ranks)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def gone(*processes: int) -> bool:
    alive = [pid for pid in processes if psutil.pid_exists(pid)]
    return all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in alive)


def launch_and(
    run_dir: Path, disturb: Callable[[list[int]], None], *behaviours: str
) -> tuple[Outcome, list[int], float]:
    """The outcome of a launch that is disturbed once its ranks run, their pids, and the seconds
    from the disturbance to the end."""
    started: list[int] = []
    began: list[float] = []

    def act() -> None:
        started.extend(pids(run_dir, len(behaviours)))
        began.append(time.monotonic())
        disturb(started)

    thread = threading.Thread(target=act)
    thread.start()
    outcome = launch(run_dir, spec_of(run_dir, *behaviours))
    ended = time.monotonic()
    thread.join()
    return outcome, started, ended - began[0]


@pytest.mark.launcher
def test_ranks_that_end_well_and_leave_their_output_in_the_log(run_dir: Path) -> None:
    outcome = launch(run_dir, spec_of(run_dir, "ends", "ends"))
    assert (outcome.status, outcome.error) == ("ok", None)
    log = (run_dir / "log").read_text()
    assert "rank 0 of 2 ends" in log
    assert "rank 1 of 2 ends" in log


@pytest.mark.launcher
def test_a_killed_rank_ends_even_one_that_will_not_listen(run_dir: Path) -> None:
    def kill(ranks: list[int]) -> None:
        os.kill(ranks[1], signal.SIGKILL)

    outcome, ranks, took = launch_and(run_dir, kill, "deaf", "waits")
    assert (outcome.status, outcome.rank, outcome.signal) == ("failed", 1, "SIGKILL")
    assert outcome.error == (
        "rank 1 was killed by SIGKILL during p0.s1.r0.F0@0; "
        "last actions: rank 0 p0.s0.r0.F0@0, rank 1 p0.s1.r0.F0@0"
    )
    assert took < LIMIT_S
    assert gone(*ranks)


@pytest.mark.launcher
def test_a_stopped_rank_is_a_failure(run_dir: Path) -> None:
    def stop(ranks: list[int]) -> None:
        os.kill(ranks[0], signal.SIGSTOP)

    outcome, ranks, took = launch_and(run_dir, stop, "waits", "waits")
    assert (outcome.status, outcome.rank, outcome.signal) == ("failed", 0, "SIGSTOP")
    assert outcome.error is not None
    assert outcome.error.startswith("rank 0 was stopped by SIGSTOP during p0.s0.r0.F0@0")
    assert took < LIMIT_S
    assert gone(*ranks)


@pytest.mark.launcher
def test_a_killed_agent_takes_its_ranks_along(run_dir: Path) -> None:
    def kill_agent(ranks: list[int]) -> None:
        psutil.Process(ranks[0]).parent().kill()  # type: ignore[union-attr]

    outcome, ranks, took = launch_and(run_dir, kill_agent, "deaf", "waits")
    assert (outcome.status, outcome.rank, outcome.signal) == ("failed", None, "SIGKILL")
    assert outcome.error is not None
    assert outcome.error.startswith("the launch agent was killed by SIGKILL")
    assert took < LIMIT_S
    assert gone(*ranks)


@pytest.mark.launcher
def test_a_killed_launcher_takes_agent_and_ranks_along(run_dir: Path) -> None:
    code = f"""
from pathlib import Path
from experiments.config import Launch
from experiments.launcher import launch, launch_spec
run_dir, command = Path({str(run_dir)!r}), {command(run_dir, "deaf", "waits")!r}
launch(run_dir, launch_spec(Launch(), command, 2, "a-run"))
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    ranks = pids(run_dir)
    agent = psutil.Process(ranks[0]).ppid()
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + LIMIT_S
    while not gone(agent, *ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nodes_share_the_ranks() -> None:
    section = Launch(nodes=2, node_rank=1, address="10.0.0.1", port=29500, local_address="10.0.0.2")
    spec = launch_spec(section, ["rank"], 8, "a-run")
    assert (spec.ranks, spec.nodes, spec.node_rank) == (4, 2, 1)
    assert (spec.address, spec.port, spec.local_address) == ("10.0.0.1", 29500, "10.0.0.2")
    assert spec.launch_id != launch_spec(section, ["rank"], 8, "a-run").launch_id
