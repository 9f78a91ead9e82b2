"""Refusals of what torch cannot run, before anything runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from runtimes.job import Task
from runtimes.peers import check_peer
from runtimes.peers.limits import equal_micro_batches
from runtimes.plan import Plan, StagePlan


def task(system: str, plan: Plan) -> Task:
    return Task(system, system, plan)


def test_what_torch_can_run_is_accepted() -> None:
    check_peer(task("torch-ddp", Plan.even(4, 1, [3])), 8)
    check_peer(task("torch-gpipe", Plan.even(4, 4, micro_batches=2)), 8)
    check_peer(task("torch-1f1b", Plan.even(4, 4, micro_batches=4)), 8)


@pytest.mark.parametrize(
    ("system", "plan", "message"),
    [
        ("torch-ddp", Plan.even(4, 2), "takes 1 stage, not 2"),
        ("torch-ddp", Plan.even(4, 1, [2], micro_batches=2), "set micro_batches = 1, not 2"),
        ("torch-ddp", Plan.even(4, 1, [2], recompute=True), "set recompute = false"),
        ("torch-ddp", Plan.even(4, 1, [2], cuts=(2,)), "leave out its plan's cuts"),
        ("torch-gpipe", Plan.even(4, 2, [1, 2], micro_batches=4), "stage 1 is on ranks 1, 2"),
        ("torch-gpipe", Plan.even(4, 2, micro_batches=3), "3 do not divide the batch of 8.*e.g. 2"),
        ("torch-1f1b", Plan.even(4, 2, micro_batches=4, recompute=True), "does not recompute"),
        ("torch-1f1b", Plan.even(4, 4, micro_batches=2), "has 2 for 4: .*fewer stages"),
        (
            "torch-gpipe",
            Plan((StagePlan(0, 2, (1,)), StagePlan(2, 4, (0,))), 2),
            "stage 0 is on ranks 1: .*in order",
        ),
        ("torch-gpipe", replace(Plan.even(4, 2), pipelines=2), "one pipeline, not 2"),
        ("torch-zb", Plan.even(4, 2), "unknown peer 'torch-zb'"),
    ],
)
def test_what_torch_cannot_run_is_refused(system: str, plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_peer(task(system, plan), 8)


def test_peers_have_no_options() -> None:
    with pytest.raises(ValueError, match="torch-ddp has no option 'overlap'"):
        check_peer(Task("a", "torch-ddp", Plan.even(4, 1), {"overlap": True}), 8)


def test_equal_micro_batches_are_the_most_that_divide() -> None:
    assert [equal_micro_batches(samples, 4) for samples in (1, 3, 6, 7, 8, 18)] == [
        1, 3, 3, 1, 4, 3,
    ]  # fmt: skip


def test_preflight_does_not_load_torch() -> None:
    code = "import sys, runtimes.peers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
