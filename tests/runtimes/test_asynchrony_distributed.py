"""Training without a flush by several processes equals its delayed-gradient reference."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.pairwise import pairwise
from tests.processes import run_ranks
from tests.runtimes.transparency import ODD_EPOCHS, Case, faults, train_in_process
from tests.runtimes.transparency_ranks import Share, merged, train_cases

MOST_CASES = 60
FACTORS: dict[str, list[Any]] = {
    "system": [
        ("ashpipe", (("order", "ours"),)),
        ("ashpipe", (("order", "published"),)),
        ("pipedream", (("lr_scaling", "none"),)),
        ("pipedream", (("lr_scaling", "published"),)),
        ("pipedream", (("vertical_sync", True),)),
        ("pipedream_2bw", ()),
    ],
    "replicas": [
        (2,), (1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (2, 3), (1, 1, 1), (1, 1, 1, 1), (1, 2, 1, 1),
    ],
    "batch": [85, 18, 7, 1],
    "recompute": [False, True],
    "cuts": [(), (1, 3)],
    "model": ["vit-drops", "widths"],
    "optimizer": ["sgd", "adamw"],
    "clip": [None, 1.0],
}  # fmt: skip


def _case(settings: dict[str, Any]) -> Case:
    name, options = settings.pop("system")
    epoch, stages = ODD_EPOCHS[settings.pop("batch")], len(settings["replicas"])
    micro_batches, clip_by = (5, "global") if name == "pipedream_2bw" else (1, "stage")
    return Case(
        name,
        stages,
        micro_batches,
        options=options,
        clip_by=clip_by,
        epoch=epoch,
        segments=(epoch,) * 3,
        **settings,
    )


@cache
def cases_of_all_pairs() -> tuple[Case, ...]:
    def allowed(settings: dict[str, Any]) -> bool:
        (name, options), replicas = settings["system"], settings["replicas"]
        if settings["batch"] == 85 and settings["model"] != "widths":
            return False  # Much the slowest, and the split of the batch does not know the model.
        if name == "pipedream_2bw":
            return len(set(replicas)) == 1
        return max(replicas) == 1 or options != (("vertical_sync", True),)

    return tuple(_case(settings) for settings in pairwise(FACTORS, allowed))


def test_the_subset_is_small() -> None:
    assert 25 <= len(cases_of_all_pairs()) <= MOST_CASES, len(cases_of_all_pairs())


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_ranks_in_processes_of_their_own(world_size: int) -> None:
    cases = [case for case in cases_of_all_pairs() if case.plan.world_size == world_size]
    assert cases
    ranks = run_ranks(world_size, train_cases, cases, timeout_s=110)
    for number, case in enumerate(cases):
        assert not faults(case, merged([rank[number] for rank in ranks])), str(case)


def test_eight_processes_and_eight_virtual_workers_agree() -> None:
    """With replicas that divide neither each other nor the batch."""
    ashpipe = Case(
        "ashpipe",
        3,
        1,
        (4, 3, 1),
        cuts=(1, 3),
        epoch=ODD_EPOCHS[18],
        segments=(ODD_EPOCHS[18],) * 2,
    )
    pipedream = replace(ashpipe, system="pipedream", cuts=(), recompute=True)
    cases = [ashpipe, replace(ashpipe, options=(("order", "published"),)), pipedream]
    ranks = run_ranks(8, train_cases, cases, timeout_s=110)
    for number, case in enumerate(cases):
        shares: list[Share] = [rank[number] for rank in ranks]
        outcome, virtual = merged(shares), train_in_process(case)
        assert not faults(case, outcome), str(case)
        for step, weights in virtual.weights.items():
            for name, tensor in weights.items():
                torch.testing.assert_close(outcome.weights[step][name], tensor, rtol=1e-11, atol=0)
        assert outcome.losses == pytest.approx(virtual.losses, rel=1e-12)
