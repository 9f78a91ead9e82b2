"""Splitting batches into units and units into replicas."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.plan import Plan, share, split
from runtimes.schedule import Batches


@given(st.integers(0, 300), st.integers(1, 20))
def test_a_split_is_contiguous_complete_and_even(samples: int, parts: int) -> None:
    intervals = split(samples, parts)
    assert intervals[0][0] == 0
    assert intervals[-1][1] == samples
    assert all(a[1] == b[0] for a, b in pairwise(intervals))
    sizes = [high - low for low, high in intervals]
    assert sizes == [(samples + i) // parts for i in range(parts)]
    assert max(sizes) - min(sizes) <= 1


def test_the_papers_example_of_an_uneven_split() -> None:
    assert [high - low for low, high in split(256, 3)] == [85, 85, 86]
    assert share(256, 3, 2) == (170, 256)


def test_units_that_would_be_empty_do_not_exist() -> None:
    batches = Batches((18, 1), micro_batches=8)
    assert [batches.size(0, unit) for unit in range(8)] == [2, 2, 2, 2, 2, 2, 3, 3]
    assert list(batches.units_of_batch(0, 0)) == list(range(8))
    assert list(batches.units_of_batch(0, 1)) == [15]
    assert batches.samples(0, 15) == (0, 1)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_pipelines_units_and_replicas_hold_each_sample_once(
    sizes: list[int], micro_batches: int, pipelines: int, replicas: int
) -> None:
    batches = Batches(tuple(sizes), micro_batches, pipelines)
    for update, size in enumerate(sizes):
        seen: list[int] = []
        for pipeline in range(pipelines):
            for unit in batches.units_of_batch(pipeline, update):
                low, _ = batches.samples(pipeline, unit)
                for replica in range(replicas):
                    first, last = batches.share(pipeline, unit, replicas, replica)
                    seen.extend(range(low + first, low + last))
        assert seen == list(range(size))


@pytest.mark.parametrize("sizes", [(0,), (4, -1)])
def test_an_empty_batch_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Batches(sizes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plan.even(3, 4), "4 stages asked for, but the model has 3 layers"),
        (lambda: Plan.even(4, 2, (1,)), "2 stages need as many replica counts"),
        (lambda: Plan.contiguous([2, 0]), "at least one layer"),
        (lambda: Plan.even(4, 2, micro_batches=0), "must be at least 1"),
        (lambda: Plan(()), "at least one stage"),
    ],
)
def test_plans_that_cannot_be_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_plan_survives_json() -> None:
    plan = Plan.even(7, 3, (2, 1, 3), micro_batches=4, recompute=True, cuts=(1, 4))
    assert Plan.from_json(plan.to_json()) == plan
    assert [plan.place(rank) for rank in range(plan.world_size)] == [
        (0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(1, 3),
)
def test_a_size_that_all_units_have(sizes: list[int], micro_batches: int, pipelines: int) -> None:
    batches = Batches(tuple(sizes), micro_batches, pipelines)
    for pipeline in range(pipelines):
        found = {batches.size(pipeline, unit) for unit in range(len(sizes) * micro_batches)}
        assert batches.unit_size(pipeline) == (found.pop() if len(found) == 1 else None)


def test_units_that_go_round_the_replicas_have_no_common_share() -> None:
    assert Batches((4, 4), rounds=True).unit_size(0) is None
    assert [Batches((4, 4), rounds=True).is_shared(0, unit, 2, 1) for unit in (0, 1)] == [
        False,
        True,
    ]
