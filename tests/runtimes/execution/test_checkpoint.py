"""Checkpoints, resuming, and the signs of life of a rank, over real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtimes.execution.checkpoint import load_state
from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.events import EventLog
from runtimes.execution.feed import ArrayFeed
from runtimes.execution.status import StatusFile
from runtimes.execution.training import DivergedError, run_training
from runtimes.job import Augmentation, DataSpec, Job, ModelSpec, OptimizerSpec, Task
from runtimes.manifest import read_manifest
from runtimes.model.stack import build_stack
from runtimes.plan import Plan
from runtimes.schedule import parse
from tests.processes import run_ranks

MODEL = ModelSpec(
    "VisionTransformer",
    {
        "img_size": 8,
        "patch_size": 4,
        "in_chans": 1,
        "embed_dim": 8,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 3,
        "drop_path_rate": 0.1,
    },
)


def job_of(plan: Plan, epochs: int, **changes: Any) -> Job:
    optimizer = changes.pop("optimizer", OptimizerSpec(lr=0.05, momentum=0.9))
    return Job(
        (Task("run", "dapple", plan),),
        MODEL,
        DataSpec("train", "validation"),
        batch_size=8,
        epochs=epochs,
        optimizer=optimizer,
        action_timeout_s=20,
        evaluation_batch_size=5,
        **changes,
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """19 training images (a last batch of 3) and 13 validation images of three classes."""
    dice = np.random.default_rng(0)
    for name, count in (("train", 19), ("validation", 13)):
        directory = tmp_path / name
        directory.mkdir()
        np.save(directory / "images.npy", dice.integers(0, 255, (count, 1, 8, 8), dtype=np.uint8))
        np.save(directory / "labels.npy", dice.integers(0, 3, count))
        meta = {"mean": [0.5], "std": [0.25], "classes": 3}
        (directory / "meta.json").write_text(json.dumps(meta))
    return tmp_path


def feed_of(job: Job, directory: Path, batch_size: int, *, shuffle: bool) -> ArrayFeed:
    return ArrayFeed(
        directory,
        batch_size=batch_size,
        seed=0,
        epochs=4,
        augmentation=Augmentation(),
        shuffle=shuffle,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def train(rank: int, world_size: int, run_dir: Path, data: Path, job: Job) -> str:
    run_dir.mkdir(exist_ok=True)
    feed = feed_of(job, data / "train", job.batch_size, shuffle=True)
    validation = feed_of(job, data / "validation", 5, shuffle=False)
    engine = DistributedEngine(job, job.tasks[0], build_stack(MODEL), feed, rank)
    try:
        run_training(engine, job, run_dir, feed, validation, note=lambda what: None)
    except DivergedError as error:
        return str(error)
    return ""


def steps(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] in ("step", "evaluation")]


def cut_back(run_dir: Path) -> None:
    """What the launcher does before it resumes a run."""
    manifest = read_manifest(run_dir)
    assert manifest is not None
    lines = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "events.jsonl").write_text("".join(lines[: manifest.events]))


TWO = Plan.even(4, 2, micro_batches=2)


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
