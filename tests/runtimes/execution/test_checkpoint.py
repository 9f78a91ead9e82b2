"""Checkpoints, resuming, and the signs of life of a rank, over real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtimes.execution.checkpoint import load_state
from runtimes.execution.events import EventLog
from runtimes.execution.status import StatusFile
from runtimes.job import OptimizerSpec
from runtimes.manifest import read_manifest
from runtimes.plan import Plan
from runtimes.schedule import parse
from tests.processes import run_ranks
from tests.runtimes.execution.runs import TWO, cut_back, job_of, steps, train, write_data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path)


def test_a_resumed_run_equals_the_undisturbed_one(tmp_path: Path, data: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(2, train, whole, data, job_of(TWO, 4))
    run_ranks(2, train, parts, data, job_of(TWO, 2))
    with (parts / "events.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 6, "loss": 99}\n')  # Not durable: cut off.
    cut_back(parts)
    run_ranks(2, train, parts, data, job_of(TWO, 4))
    assert steps(parts) == steps(whole)
    one, other = load_state(whole), load_state(parts)
    assert one is not None
    assert other is not None
    assert one[0] == other[0] == 12
    for name, tensor in one[1]["weights"].items():
        assert torch.equal(tensor, other[1]["weights"][name])
        for key, value in one[1]["optimizer"][name].items():
            assert torch.equal(value, other[1]["optimizer"][name][key])


def test_another_plan_can_go_on_from_a_checkpoint(tmp_path: Path, data: Path) -> None:
    """Synchronous systems do not depend on the plan, so the losses go on as they would have."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    three = Plan.even(4, 2, (1, 2), micro_batches=3, recompute=True)
    run_ranks(2, train, whole, data, job_of(TWO, 2))
    run_ranks(2, train, parts, data, job_of(TWO, 1))
    run_ranks(3, train, parts, data, job_of(three, 2))
    losses = [event["loss"] for event in steps(whole)]
    assert [event["loss"] for event in steps(parts)] == pytest.approx(losses, rel=1e-4)


def test_events_name_every_step_and_evaluations_count_every_sample(
    tmp_path: Path, data: Path
) -> None:
    run_ranks(2, train, tmp_path / "run", data, job_of(TWO, 2, evaluate_every=2))
    events = steps(tmp_path / "run")
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(6))
    assert [event["samples"] for event in events if event["event"] == "step"] == [8, 8, 3] * 2
    (evaluation,) = [event for event in events if event["event"] == "evaluation"]
    assert (evaluation["step"], evaluation["samples"]) == (6, 13)


def test_a_truncated_checkpoint_is_named(tmp_path: Path, data: Path) -> None:
    run_dir = tmp_path / "run"
    run_ranks(2, train, run_dir, data, job_of(TWO, 1))
    file = run_dir / "checkpoint" / "3" / "rank1.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"rank1\.pt is truncated: .* delete .* or use --fresh"):
        read_manifest(run_dir)
    (run_dir / "checkpoint" / "latest.json").write_text('{"step": 3')
    with pytest.raises(ValueError, match="is damaged"):
        read_manifest(run_dir)


def test_a_run_whose_loss_is_not_finite_ends_and_says_so(tmp_path: Path, data: Path) -> None:
    job = job_of(TWO, 3, optimizer=OptimizerSpec(lr=1e30))
    said = run_ranks(2, train, tmp_path / "run", data, job)
    assert all("lower the learning rate" in text for text in said)
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_weights_that_diverge_in_the_last_update_show_in_the_evaluation(
    tmp_path: Path, data: Path
) -> None:
    """One update an epoch: its loss is still finite, but its weights are not."""
    run_dir = tmp_path / "run"
    job = replace(job_of(TWO, 1, optimizer=OptimizerSpec(lr=1e38)), batch_size=19)
    assert all("validation loss" in text for text in run_ranks(2, train, run_dir, data, job))
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    events = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert events[-1]["event"] == "evaluation"
    assert events[-1]["loss"] == "nan"
    assert not (run_dir / "checkpoint").exists()


def test_a_torn_last_line_is_not_added_to(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write([{"event": "step", "step": 0}])
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "st')
    again = EventLog(tmp_path)
    assert again.lines == 1
    again.write([{"event": "step", "step": 1}])
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


def test_the_last_action_can_be_read_by_another_process(tmp_path: Path) -> None:
    status = StatusFile(tmp_path / "ranks" / "0.status")
    status.note("evaluation")
    status.note(parse("p0.s1.r0.B3/1@2"))
    assert (tmp_path / "ranks" / "0.status").read_text().strip() == "p0.s1.r0.B3/1@2"


def test_a_rank_whose_agent_is_gone_before_it_looks_ends_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtimes.execution.rank", str(tmp_path)],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"PIPEBENCH_AGENT": str(2**22), "RANK": "0"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    assert not any(tmp_path.iterdir())


def test_a_rank_that_cannot_load_torch_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    done = subprocess.run(
        [sys.executable, "-m", "runtimes.execution.rank", str(tmp_path)],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"RANK": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1
    document = json.loads((tmp_path / "error-1.json").read_text())
    assert document["rank"] == 1
    assert "no torch here" in document["error"]
