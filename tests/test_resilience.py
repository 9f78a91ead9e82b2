"""Whatever is killed, and whenever: nothing hangs, nothing done is repeated, the end is the same.

Real runs of a small ViT on digits through the command line, each in its own results directory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.experiments.wandb_history import expected_history, read_history

REPOSITORY = Path(__file__).parents[1]
MAIN = "from experiments.cli import main; main()"
CONFIG = """
[system]
name = "dapple"
[plan]
stages = 2
micro_batches = 2
[model]
name = "VisionTransformer"
[model.args]
img_size = 8
patch_size = 4
in_chans = 1
num_classes = 10
embed_dim = 32
depth = 2
num_heads = 2
[data]
set = "digits"
image_size = 8
[train]
batch_size = 48
epochs = 8
evaluate_every = 2
action_timeout_s = 15
[train.optimizer]
lr = 0.1
momentum = 0.9
"""  # fmt: skip

IN_PROCESS = """
[launch]
transport = "in-process"
[switch]
epoch = 4
system = { name = "gpipe" }
plan = { stages = 2, micro_batches = 2 }
"""


class Bench:
    """One results directory, and the command line on it."""

    def __init__(self, directory: Path, data: Path):
        self.results = directory / "results"
        self.config = directory / "small.toml"
        directory.mkdir()
        self.config.write_text(CONFIG)
        self.results.mkdir()
        # The prepared digits are shared: they are not what is tested here.
        (self.results / "data").symlink_to(data)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", MAIN, "run", str(self.config), *arguments],
            cwd=REPOSITORY,
            env=os.environ | {"PIPEBENCH_RESULTS": str(self.results)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        out, err = (process := self.start("--json", *arguments)).communicate(timeout=100)
        return process.returncode, json.loads(out)["runs"][0] if out else {}, err

    @property
    def directory(self) -> Path:
        runs = self.results / "runs"
        (found,) = (path for path in runs.glob("*") if not path.name.startswith("."))
        return found

    def events(self) -> list[dict[str, Any]]:
        try:
            lines = (self.directory / "events.jsonl").read_text().splitlines()
        except (FileNotFoundError, ValueError):  # No run yet.
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def checkpoints(self) -> int:
        return sum(event["event"] == "checkpoint" for event in self.events())


def processes(root: int, word: str) -> list[psutil.Process]:
    found = psutil.Process(root).children(recursive=True)
    return [p for p in found if any(word in part for part in p.cmdline())]


def gone(who: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    return psutil.wait_procs(who, timeout=within_s)[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Path]:
    directory = tmp_path_factory.mktemp("resilience")
    data = directory / "data"
    data.mkdir()
    bench = Bench(directory / "undisturbed", data)
    code, result, err = bench.run()
    assert (code, result["status"]) == (0, "ok"), err
    return bench, data


def kill_agent(cli: subprocess.Popen[str]) -> str:
    (agent,) = processes(cli.pid, "experiments.agent")[:1]
    agent.send_signal(signal.SIGKILL)
    return "agent"


def kill_rank(cli: subprocess.Popen[str]) -> str:
    processes(cli.pid, "runtimes.execution.rank")[-1].send_signal(signal.SIGKILL)
    return "rank"


def stop_rank(cli: subprocess.Popen[str]) -> str:
    processes(cli.pid, "runtimes.execution.rank")[-1].send_signal(signal.SIGSTOP)
    return "rank"


def kill_command(cli: subprocess.Popen[str]) -> str:
    cli.send_signal(signal.SIGKILL)
    return "command"


def disturb(bench: Bench, blow: Callable[[subprocess.Popen[str]], str]) -> tuple[float, str]:
    """Start or resume the run, strike after its next checkpoint; seconds to the end of all, and
    what was said."""
    before = bench.checkpoints()
    cli = bench.start()
    while bench.checkpoints() <= before:
        assert cli.poll() is None, cli.communicate()
        time.sleep(0.02)
    family = [psutil.Process(cli.pid), *psutil.Process(cli.pid).children(recursive=True)]
    struck = time.monotonic()
    blow(cli)
    _, err = cli.communicate(timeout=60)
    left = gone(family, within_s=30)
    assert not left, f"still there: {left}"
    return time.monotonic() - struck, err


@pytest.mark.launcher
@pytest.mark.timeout(300)
def test_after_any_death_the_run_resumes_and_ends_as_if_undisturbed(
    undisturbed: tuple[Bench, Path], tmp_path: Path
) -> None:
    reference, data = undisturbed
    bench = Bench(tmp_path / "disturbed", data)
    for blow in (kill_agent, kill_rank, kill_command):
        seconds, _ = disturb(bench, blow)
        assert seconds < 30
    resumed_from = bench.checkpoints()
    code, result, err = bench.run()
    assert (code, result["status"]) == (0, "ok"), err
    events = bench.events()
    assert sum(event["event"] == "launch" for event in events) >= 1
    steps = [event for event in events if event["event"] == "step"]
    assert steps == [event for event in reference.events() if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(len(steps)))
    assert result["final_loss"] == steps[-1]["loss"]
    assert max(event.get("attempt", 0) for event in events) == 4
    assert 3 <= resumed_from < 8
    history = read_history(bench.directory)
    assert history == expected_history(events)
    again, same, _ = bench.run()
    assert again == 0
    assert same == result
    assert bench.events() == events, "a finished run is not repeated"


@pytest.mark.launcher
@pytest.mark.timeout(200)
def test_ranks_in_one_process_resume_too_and_end_under_the_other_system(
    undisturbed: tuple[Bench, Path], tmp_path: Path
) -> None:
    """One virtual pipeline, gpipe from epoch 4 on, learns what two processes under dapple did."""
    reference, data = undisturbed
    bench = Bench(tmp_path / "virtual", data)
    bench.config.write_text(CONFIG + IN_PROCESS)
    seconds, err = disturb(bench, kill_rank)
    assert seconds < 30
    assert "rank 0 was killed by SIGKILL" in err
    code, result, err = bench.run()
    assert (code, result["status"], result["attempts"]) == (0, "ok", 2), err
    assert (result["label"], result["train_wall_s"]) == ("dapple → gpipe@4", None)
    assert result["switch"]["step"] == result["steps"] / 2
    losses, expected = (
        [event["loss"] for event in run.events() if event["event"] == "step"]
        for run in (bench, reference)
    )
    assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.launcher
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("blow", "name"), [(kill_rank, "SIGKILL"), (stop_rank, "SIGSTOP")])
def test_a_dead_or_stopped_rank_is_named_with_its_last_action(
    undisturbed: tuple[Bench, Path],
    tmp_path: Path,
    blow: Callable[[subprocess.Popen[str]], str],
    name: str,
) -> None:
    bench = Bench(tmp_path / "struck", undisturbed[1])
    seconds, err = disturb(bench, blow)
    assert seconds < 30
    assert "rank 1 was" in err
    assert name in err
    end = bench.events()[-1]
    assert (end["event"], end["status"], end["rank"], end["signal"]) == ("end", "failed", 1, name)
    assert set(end["last_actions"]) == {"0", "1"}
    assert end["last_actions"]["1"] in err
    result = json.loads((bench.directory / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["error"] == end["error"]
