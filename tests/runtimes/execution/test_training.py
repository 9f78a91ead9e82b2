"""Training runs: one process or many, segments over several epochs, and another system half-way."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from runtimes.dapple import Dapple
from runtimes.execution.inprocess import InProcess
from runtimes.execution.switching import switch_reason
from runtimes.job import Job, OptimizerSpec, SwitchSpec, Task
from runtimes.plan import Plan
from runtimes.systems import SYSTEMS
from tests.processes import run_ranks
from tests.runtimes.execution.run_references import unlike_plain_training
from tests.runtimes.execution.runs import (
    TWO,
    cut_back,
    events,
    job_of,
    state_of,
    steps,
    train,
    train_in_process,
    write_data,
)

DP = Plan.even(4, 1, (2,), cuts=(2,))
THREE = Plan.even(4, 2, (1, 2), micro_batches=3, recompute=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path)


def switching(first: tuple[str, Plan], then: tuple[str, Plan], epoch: int = 1) -> Job:
    """In float64, so that only a wrong hand-over shows."""
    switch = SwitchSpec(Task("then", *then), epoch)
    return job_of(first[1], 3, first[0], switch=switch, precision="float64")


def test_one_process_trains_as_several_do(tmp_path: Path, data: Path) -> None:
    job = job_of(TWO, 2)
    run_ranks(2, train, tmp_path / "several", data, job)
    train_in_process(tmp_path / "one", data, job)
    assert steps(tmp_path / "one") == steps(tmp_path / "several")
    one, several = state_of(tmp_path / "one"), state_of(tmp_path / "several")
    assert one.keys() == several.keys()
    assert all(torch.equal(one[name], several[name]) for name in one)


def test_the_time_of_virtual_ranks_is_not_recorded(tmp_path: Path, data: Path) -> None:
    train_in_process(tmp_path / "one", data, job_of(TWO, 1))
    (segment,) = events(tmp_path / "one", "segment")
    assert "wall_s" not in segment
    assert [sorted(rank) for rank in segment["ranks"]] == [
        ["live_versions", "peak_in_flight", "rank", "replica", "stage"]
    ] * 2


@dataclass(frozen=True)
class Undrained(Dapple):
    """As a system whose pipeline stays full over epochs; a flush schedule does not mind."""

    name = "undrained"

    @property
    def drain(self) -> Literal["epoch", "run"]:
        return "run"


@pytest.mark.parametrize(
    ("evaluate", "checkpoint", "switch", "drains"),
    [
        (9, 9, None, [12]),
        (3, 9, None, [9, 12]),
        (9, 2, None, [6, 12]),
        (2, 3, None, [6, 9, 12]),
        (9, 9, 1, [3, 6, 9, 12]),  # Dapple, from then on, drains after every epoch.
    ],
)
def test_a_segment_lasts_until_the_run_needs_a_drain(
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluate: int,
    checkpoint: int,
    switch: int | None,
    drains: list[int],
) -> None:
    monkeypatch.setitem(SYSTEMS, "undrained", Undrained)
    then = None if switch is None else SwitchSpec(Task("then", "dapple", TWO), switch)
    job = job_of(TWO, 4, evaluate_every=evaluate, checkpoint_every=checkpoint)
    undrained = replace(job, tasks=(Task("run", "undrained", TWO),), switch=then)
    train_in_process(tmp_path / "long", data, undrained)
    train_in_process(tmp_path / "short", data, job)
    assert [event["last"] for event in events(tmp_path / "long", "segment")] == drains
    assert steps(tmp_path / "long") == steps(tmp_path / "short"), "epochs, rates, losses"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("dp", DP), ("gpipe", TWO)),
        (("gpipe", TWO), ("dapple", Plan.contiguous([1, 3], micro_batches=4))),
        (("dapple", THREE), ("dp", Plan.even(4, 1, (3,), cuts=(1,)))),
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_switch_changes_nothing_between_synchronous_systems(
    tmp_path: Path, data: Path, first: tuple[str, Plan], then: tuple[str, Plan], optimizer: str
) -> None:
    job = switching(first, then)
    if optimizer == "adamw":
        job = replace(job, optimizer=OptimizerSpec("adamw", lr=1e-3, eps=1e-4))
    train_in_process(tmp_path / "run", data, job)
    assert not unlike_plain_training(tmp_path / "run", data, job, 1e-10)
    (event,) = events(tmp_path / "run", "switch")
    assert event == {
        "event": "switch",
        "step": 3,
        "from": first[0],
        "to": then[0],
        "reason": "after epoch 1",
    }


def test_a_switch_that_drops_the_momentum_would_show(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = InProcess.state
    job = switching(("dp", DP), ("gpipe", TWO))
    monkeypatch.setattr(InProcess, "state", lambda self: state(self) | {"optimizer": {}})
    train_in_process(tmp_path / "run", data, replace(job, checkpoint_every=9))
    assert unlike_plain_training(tmp_path / "run", data, job, 1e-10)


def test_processes_hand_over_what_the_next_plan_needs(tmp_path: Path, data: Path) -> None:
    job = switching(("dapple", THREE), ("gpipe", Plan.even(4, 3, micro_batches=2)))
    run_ranks(3, train, tmp_path / "run", data, job)
    assert not unlike_plain_training(tmp_path / "run", data, job, 1e-10)


@pytest.mark.parametrize("killed_at", [2, 3, 4])
def test_a_run_killed_around_its_switch_ends_as_if_undisturbed(
    tmp_path: Path, data: Path, killed_at: int
) -> None:
    """Its last checkpoint comes before the switch, with it, or after it."""
    job = replace(switching(("dp", DP), ("gpipe", TWO), epoch=2), epochs=4)
    assert_unharmed(tmp_path, data, job, killed_at)


def assert_unharmed(tmp_path: Path, data: Path, job: Job, killed_at: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_in_process(whole, data, job)
    train_in_process(parts, data, job, killed_at)
    assert len(events(parts, "checkpoint")) == (killed_at - 1) // job.checkpoint_every
    cut_back(parts)
    train_in_process(parts, data, job)
    assert events(parts) == events(whole)
    one, other = state_of(whole), state_of(parts)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_processes_that_are_killed_after_the_switch_go_on_under_the_second_system(
    tmp_path: Path, data: Path
) -> None:
    job = switching(("dp", DP), ("gpipe", TWO))
    run_dir = tmp_path / "run"
    assert run_ranks(2, train, run_dir, data, job, 2) == ["killed"] * 2
    cut_back(run_dir)
    run_ranks(2, train, run_dir, data, job)
    assert not unlike_plain_training(run_dir, data, job, 1e-10)
    assert [len(event["ranks"]) for event in events(run_dir, "segment")] == [2, 2, 2]
    assert [event["ranks"][1]["stage"] for event in events(run_dir, "segment")] == [0, 1, 1]


@pytest.mark.parametrize(
    ("accuracies", "patience", "min_delta", "due"),
    [
        ([0.1, 0.2, 0.3], 1, 0.0, False),
        ([0.1, 0.2, 0.2], 1, 0.0, True),
        ([0.1, 0.2, 0.1, 0.2], 3, 0.0, False),
        ([0.1, 0.2, 0.1, 0.2, 0.2], 3, 0.0, True),
        ([0.1, 0.15, 0.19, 0.22], 3, 0.1, False),  # The last is 0.12 above the best before it.
        ([0.1, 0.15, 0.19, 0.2], 3, 0.1, True),
        ([0.5, 0.4, 0.4], 2, 0.0, True),
        ([], 1, 0.0, False),
    ],
)
def test_a_plateau_is_so_many_evaluations_without_a_better_one(
    accuracies: list[float], patience: int, min_delta: float, due: bool
) -> None:
    switch = SwitchSpec(Task("then", "gpipe", TWO), patience=patience, min_delta=min_delta)
    assert (switch_reason(switch, 9, accuracies) is not None) == due


def test_a_plateau_is_found_again_after_a_kill(tmp_path: Path, data: Path) -> None:
    """No evaluation is 1 better, so the third is the second in a row that is not; the checkpoint
    that is resumed from lies between them."""
    plateau = SwitchSpec(Task("then", "gpipe", TWO), patience=2, min_delta=1.0)
    job = replace(job_of(DP, 4, "dp", checkpoint_every=2), switch=plateau)
    assert_unharmed(tmp_path, data, job, killed_at=4)
    (event,) = events(tmp_path / "whole", "switch")
    assert event["step"] == 9
    assert "in 2 evaluations" in event["reason"]


def test_a_run_starts_from_another_ones_checkpoint(tmp_path: Path, data: Path) -> None:
    """Of another system, plan and transport; and, once it has one, from its own."""
    first = job_of(DP, 2, "dp", precision="float64")
    run_ranks(2, train, tmp_path / "first", data, first)
    job = replace(job_of(THREE, 4, precision="float64"), start_from=str(tmp_path / "first"))
    second = tmp_path / "second"
    train_in_process(second, data, job, killed_at=2)
    cut_back(second)
    train_in_process(second, data, job)
    assert [event["step"] for event in events(second, "step")] == list(range(6, 12))
    own = (second / "events.jsonl").read_text()
    (second / "events.jsonl").write_text((tmp_path / "first" / "events.jsonl").read_text() + own)
    assert not unlike_plain_training(second, data, job, 1e-10)


def test_a_start_that_is_not_there_or_does_not_fit(tmp_path: Path, data: Path) -> None:
    job = replace(job_of(TWO, 2), start_from=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="no checkpoint in .*nowhere"):
        train_in_process(tmp_path / "run", data, job)
    train_in_process(tmp_path / "first", data, job_of(TWO, 1))
    other = replace(job, batch_size=4, start_from=str(tmp_path / "first"))
    with pytest.raises(ValueError, match="3 updates are no whole number of epochs of 5"):
        train_in_process(tmp_path / "run", data, other)


def test_a_job_with_a_switch_survives_json() -> None:
    plateau = SwitchSpec(Task("then", "gpipe", TWO, {"a": 1}), patience=2, min_delta=0.5)
    job = replace(job_of(DP, 2, "dp"), switch=plateau, transport="in-process", start_from="x")
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


@pytest.mark.parametrize(
    ("switch", "said"),
    [
        (SwitchSpec(Task("then", "gpipe", TWO), 2), "after epoch 2, but must be after 1 … 1"),
        (SwitchSpec(Task("then", "gpipe", THREE), 1), "equally many ranks, not [2, 3]"),
    ],
)
def test_switches_that_cannot_be(switch: SwitchSpec, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        replace(job_of(DP, 2, "dp"), switch=switch)
    with pytest.raises(ValueError, match="set one of them"):
        SwitchSpec(switch.task)
