"""Switched, resumed and restarted runs of systems without a flush equal their references in a
chain, each from the state before it; nothing but the state goes over a drain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtimes.execution.inprocess import InProcess
from runtimes.job import Job, LearningRate, OptimizerSpec, SwitchSpec, Task
from runtimes.plan import Plan
from tests.processes import run_ranks
from tests.runtimes.execution.run_references import Phase, phases_of, unlike_its_references
from tests.runtimes.execution.runs import (
    cut_back,
    events,
    job_of,
    state_of,
    train,
    train_in_process,
    write_data,
)

OPTIMIZERS = {
    "sgd": OptimizerSpec(lr=0.05, momentum=0.9, weight_decay=0.02),
    "adamw": OptimizerSpec("adamw", lr=1e-3, weight_decay=0.1, eps=1e-4),
}
LIMIT = 1e-10


def dp(ranks: int) -> Task:
    return Task("dp", "dp", Plan.even(4, 1, (ranks,), cuts=(2,)))


def ashpipe(*replicas: int, recompute: bool = False, **options: Any) -> Task:
    plan = Plan.even(4, len(replicas), replicas, cuts=(1, 3), recompute=recompute)
    return Task("ashpipe", "ashpipe", plan, options)


def pipedream(*replicas: int, **options: Any) -> Task:
    return Task("pipedream", "pipedream", Plan.even(4, len(replicas), replicas), options)


def two_buffers(layers: list[int], replicas: int, micro_batches: int) -> Task:
    plan = Plan.contiguous(layers, [replicas] * len(layers), micro_batches=micro_batches)
    return Task("2bw", "pipedream_2bw", plan)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path)


def job_for(task: Task, epochs: int, optimizer: str = "sgd", **changes: Any) -> Job:
    """In float64, so that only what is wrong shows; the rate falls in the third epoch."""
    job = job_of(
        task.plan,
        epochs,
        optimizer=OPTIMIZERS[optimizer],
        learning_rate=LearningRate("step", milestones=(2.0,), gamma=0.5),
        precision="float64",
    )
    return replace(job, tasks=(task,), **changes)


def switching(first: Task, then: Task, optimizer: str) -> Job:
    return job_for(first, 3, optimizer, switch=SwitchSpec(then, 1))


PHASED = {
    "dp-ashpipe": (dp(3), ashpipe(1, 1, 1)),
    "dp-ashpipe-2-3": (dp(5), ashpipe(2, 3)),
    "dp-ashpipe-4-3-1": (dp(8), ashpipe(4, 3, 1, recompute=True, order="published")),
    "dp-pipedream": (dp(3), pipedream(1, 2, lr_scaling="published")),
    "dp-2bw": (dp(3), two_buffers([2, 1, 1], 1, 4)),
    "ashpipe-dp": (ashpipe(1, 2), dp(3)),
    "2bw-ashpipe": (two_buffers([1, 3], 2, 3), ashpipe(3, 1)),
    "pipedream-2bw": (pipedream(2, 1), two_buffers([1, 2, 1], 1, 3)),
    "2bw-2bw": (two_buffers([1, 3], 2, 2), two_buffers([1, 1, 1, 1], 1, 5)),
}


WITH_ADAMW = ("dp-ashpipe-4-3-1", "ashpipe-dp", "pipedream-2bw", "2bw-2bw")


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "sgd") for name in PHASED), *((name, "adamw") for name in WITH_ADAMW)],
)
def test_a_switch_starts_from_the_state_before_it(
    tmp_path: Path, data: Path, name: str, optimizer: str
) -> None:
    """Weights and momentum, and from 2BW to 2BW the version before."""
    job = switching(*PHASED[name], optimizer)
    train_in_process(tmp_path / "run", data, job)
    assert [event["step"] for event in events(tmp_path / "run", "switch")] == [3]
    assert not unlike_its_references(tmp_path / "run", data, job, LIMIT)


@pytest.mark.parametrize(
    ("kind", "then"), [("optimizer", ashpipe(1, 2)), ("stash", two_buffers([2, 1, 1], 1, 3))]
)
def test_a_switch_that_drops_momentum_or_stash_would_show(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, kind: str, then: Task
) -> None:
    state, calls = InProcess.state, []

    def dropping(self: InProcess) -> dict[str, Any]:
        calls.append(kind)
        return state(self) | ({kind: {}} if len(calls) == 1 else {})

    job = switching(two_buffers([2, 1, 1], 1, 3), then, "sgd")
    job = replace(job, checkpoint_every=9)  # Of the last state alone, after the switch.
    train_in_process(tmp_path / "run", data, job)
    assert not unlike_its_references(tmp_path / "run", data, job, LIMIT)
    monkeypatch.setattr(InProcess, "state", dropping)
    train_in_process(tmp_path / "mutated", data, job)
    assert len(calls) == 2
    found = unlike_its_references(tmp_path / "mutated", data, job, LIMIT)
    assert any(line.startswith("loss of step") for line in found), found


def train_all(
    rank: int, world_size: int, data: Path, runs: list[tuple[Path, Job]], killed_at: int
) -> list[str]:
    """One run after the other by the same processes."""
    return [train(rank, world_size, run_dir, data, job, killed_at) for run_dir, job in runs]


def test_processes_switch_to_systems_without_a_flush(tmp_path: Path, data: Path) -> None:
    """And are killed at the first evaluation after the switch, and go on."""
    pairs = [
        PHASED["dp-ashpipe"],
        PHASED["dp-pipedream"],
        (two_buffers([2, 1, 1], 1, 3), two_buffers([1, 2, 1], 1, 4)),
    ]
    jobs = [switching(*pair, "sgd") for pair in pairs]
    runs = [(tmp_path / f"run-{number}", job) for number, job in enumerate(jobs)]
    assert run_ranks(3, train_all, data, runs, 2) == [["killed"] * 3] * 3
    for run_dir, _ in runs:
        cut_back(run_dir)
    run_ranks(3, train_all, data, runs, 0)
    for run_dir, job in runs:
        assert not unlike_its_references(run_dir, data, job, LIMIT)


RESUMED = {
    "ashpipe": ashpipe(2, 1),
    "pipedream": pipedream(1, 2),
    "2bw": two_buffers([1, 3], 1, 3),
}
OTHER_PLANS = {
    "ashpipe": ashpipe(1, 1, 2),
    "pipedream": pipedream(2, 1, 1),
    "2bw": two_buffers([1, 1, 2], 2, 4),
}


@pytest.mark.parametrize(
    ("name", "killed_at"), [("ashpipe", 2), ("pipedream", 3), ("2bw", 2), ("2bw", 3)]
)
def test_a_resumed_run_is_bitwise_the_undisturbed_one(
    tmp_path: Path, data: Path, name: str, killed_at: int
) -> None:
    """Killed at a drain, before its checkpoint is written; 2BW's holds both versions."""
    job, whole, parts = job_for(RESUMED[name], 3, "adamw"), tmp_path / "whole", tmp_path / "parts"
    train_in_process(whole, data, job)
    train_in_process(parts, data, job, killed_at)
    assert len(events(parts, "checkpoint")) == killed_at - 1
    cut_back(parts)
    stashed = [key for key in state_of(parts) if key.endswith(", stash")]
    assert bool(stashed) == (name == "2bw")
    train_in_process(parts, data, job)
    assert events(parts) == events(whole)
    one, other = state_of(whole), state_of(parts)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not unlike_its_references(whole, data, job, LIMIT)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("ashpipe", "sgd"), ("pipedream", "adamw"), ("2bw", "sgd"), ("2bw", "adamw")],
)
def test_a_run_that_goes_on_under_another_plan_equals_the_reference_from_there(
    tmp_path: Path, data: Path, name: str, optimizer: str
) -> None:
    first, then = RESUMED[name], OTHER_PLANS[name]
    run_dir = tmp_path / "run"
    train_in_process(run_dir, data, job_for(first, 1, optimizer))
    job = job_for(then, 3, optimizer)
    train_in_process(run_dir, data, job)
    phases = [Phase(first, (1,)), Phase(then, (1, 1))]
    assert not unlike_its_references(run_dir, data, job, LIMIT, phases)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (dp(2), ashpipe(2, 3)),
        (dp(3), two_buffers([1, 3], 1, 2)),
        (two_buffers([1, 3], 1, 2), two_buffers([2, 1, 1], 1, 3)),
        (two_buffers([1, 3], 1, 2), dp(3)),
    ],
    ids=lambda task: task.system,
)
def test_a_run_starts_from_the_checkpoint_of_another_system(
    tmp_path: Path, data: Path, first: Task, then: Task
) -> None:
    """And is killed and resumed from its own, later on."""
    origin, run_dir = tmp_path / "origin", tmp_path / "run"
    train_in_process(origin, data, job_for(first, 1))
    job = job_for(then, 3, start_from=str(origin))
    train_in_process(run_dir, data, job, killed_at=2)
    cut_back(run_dir)
    train_in_process(run_dir, data, job)
    own = (run_dir / "events.jsonl").read_text()
    (run_dir / "events.jsonl").write_text((origin / "events.jsonl").read_text() + own)
    phases = [Phase(first, (1,)), Phase(then, (1, 1))]
    assert not unlike_its_references(run_dir, data, job, LIMIT, phases)


@pytest.mark.parametrize(
    "task",
    [ashpipe(2, 1, drain="run"), pipedream(1, 1, 1, drain="run")],
    ids=["ashpipe", "pipedream"],
)
def test_a_pipeline_that_stays_full_over_epochs_drains_for_evaluation_and_switch(
    tmp_path: Path, data: Path, task: Task
) -> None:
    """With a partial batch in the middle of a segment; a resumed run drains where it would have."""
    job = job_for(task, 4, evaluate_every=2, checkpoint_every=2)
    job = replace(job, switch=SwitchSpec(dp(3), 3))
    train_in_process(tmp_path / "run", data, job, killed_at=2)
    cut_back(tmp_path / "run")
    train_in_process(tmp_path / "run", data, job)
    phases = [Phase(task, (2, 1)), Phase(dp(3), (1,))]
    assert not unlike_its_references(tmp_path / "run", data, job, LIMIT, phases)
    drained = unlike_its_references(tmp_path / "run", data, job, LIMIT, phases_of(job))
    assert drained[0].startswith("loss of step 3"), "the first after a drain that was not"
