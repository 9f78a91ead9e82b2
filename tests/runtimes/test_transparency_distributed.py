"""Training by several processes equals plain training: a subset in which every two values meet."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.oracles import synchronous
from tests.pairwise import pairwise
from tests.processes import run_ranks
from tests.runtimes.transparency import (
    EPOCH,
    LIMITS,
    MODELS,
    ArrayFeed,
    Case,
    faults,
    initial_weights,
    reference,
)
from tests.runtimes.transparency_ranks import Share, merged, train_cases

MOST_CASES = 60
SYSTEMS: list[tuple[str, tuple[tuple[str, Any], ...]]] = [
    ("dp", (("overlap", True),)),
    ("dp", (("overlap", False),)),
    ("gpipe", ()),
    ("dapple", (("policy", "A"),)),
    ("dapple", (("policy", "B"),)),
]
#: Replicas of each stage, on 2 … 4 ranks.
REPLICAS = [
    (2,),
    (3,),
    (1, 1),
    (2, 1),
    (1, 3),
    (2, 2),
    (1, 1, 1),
    (1, 2, 1),
    (2, 1, 1),
    (1, 1, 1, 1),
]
FACTORS: dict[str, list[Any]] = {
    "system": SYSTEMS,
    "replicas": REPLICAS,
    "micro_batches": [1, 2, 5, 8],
    "recompute": [False, True],
    "cuts": [(), (1, 3)],
    "model": ["vit-drops", "widths"],
    "optimizer": ["sgd", "nesterov", "adamw"],
    "segments": [(EPOCH, (18, 18)), ((*EPOCH, 18, 18),)],
}


def _case(settings: dict[str, Any]) -> Case:
    name, options = settings.pop("system")
    return Case(name, stages=len(settings["replicas"]), options=options, **settings)


@cache
def cases_of_all_pairs() -> tuple[Case, ...]:
    def allowed(settings: dict[str, Any]) -> bool:
        return settings["system"][0] != "dp" or len(settings["replicas"]) == 1

    return tuple(_case(settings) for settings in pairwise(FACTORS, allowed))


def _evaluation_faults(case: Case, shares: list[Share]) -> list[str]:
    images, labels = ArrayFeed(data=1).arrays
    history, found, updates = reference(case), [], 0
    for number in range(len(case.segments) + 1):
        weights = history.updates[updates - 1].weights if updates else initial_weights(case.model)
        correct, loss = synchronous.evaluate(MODELS[case.model], weights, images, labels)
        parts = [share.accuracies[number] for share in shares]
        seen = sum(part.correct for part in parts), sum(part.samples for part in parts)
        error = abs(sum(part.loss_sum for part in parts) - loss)
        if seen != (correct, len(labels)) or not error <= LIMITS[case.precision] * loss:
            found.append(f"evaluation {number}: {parts}, but {correct} correct, loss {loss}")
        if number < len(case.segments):
            updates += len(case.segments[number])
    return found


def test_the_subset_is_small_and_holds_every_pair() -> None:
    cases = cases_of_all_pairs()
    assert 40 <= len(cases) <= MOST_CASES
    met = {(case.replicas, case.micro_batches) for case in cases}
    assert met == set(product(REPLICAS, FACTORS["micro_batches"]))
    assert {case.plan.world_size for case in cases} == {2, 3, 4}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_in_processes_of_their_own(world_size: int) -> None:
    cases = [case for case in cases_of_all_pairs() if case.plan.world_size == world_size]
    if world_size == 3:
        cases.append(Case("dapple", 2, 5, (2, 1), precision="float32"))
    ranks = run_ranks(world_size, train_cases, cases, timeout_s=110)
    for number, case in enumerate(cases):
        shares = [rank[number] for rank in ranks]
        assert not faults(case, merged(shares)) + _evaluation_faults(case, shares), str(case)
