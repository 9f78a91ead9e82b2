"""The order of turns is balanced, and what a benchmark runs and records is that order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from runtimes.execution.benchmark import run_benchmark
from runtimes.execution.engine import Segment, SegmentReport
from runtimes.execution.turns import turns
from runtimes.job import BenchSpec, Job, Task
from tests.processes import run_ranks
from tests.runtimes.execution.runs import TWO, events, job_of

Order = Sequence[int]


def order_of(contenders: int, rounds: int, seed: int = 0) -> list[Order]:
    return [turns(contenders, seed, number) for number in range(rounds)]


def unbalanced(orders: Sequence[Order]) -> list[str]:
    """What of whole blocks of rounds is not balanced: places, and who follows whom in a round."""
    n = len(orders[0])
    places = Counter(chain.from_iterable(enumerate(order) for order in orders))
    pairs = Counter(chain.from_iterable(pairwise(order) for order in orders))
    found = ["some round leaves one out"] * any(sorted(o) != list(range(n)) for o in orders)
    found += ["places"] * (len(places) != n * n or len(set(places.values())) != 1)
    return found + ["pairs"] * (len(pairs) != n * (n - 1) or len(set(pairs.values())) > 1)


@pytest.mark.parametrize("contenders", range(1, 12))
def test_places_and_predecessors_are_balanced(contenders: int) -> None:
    """Places after n rounds; predecessors after n rounds too, or, if n is odd, 2n."""
    block = contenders * (1 + contenders % 2)
    for seed in range(5):
        orders = order_of(contenders, 3 * block, seed)
        for first in range(0, 3 * block, block):
            assert not unbalanced(orders[first : first + block])
        for first in range(0, 3 * block, contenders):
            assert "places" not in unbalanced(orders[first : first + contenders])


def rotation(contenders: int, rounds: int) -> list[Order]:
    return [[(start + i) % contenders for i in range(contenders)] for start in range(rounds)]


def always_the_same(contenders: int, rounds: int) -> list[Order]:
    return [list(range(contenders))] * rounds


@pytest.mark.parametrize(
    ("mutant", "seen"), [(rotation, ["pairs"]), (always_the_same, ["places", "pairs"])]
)
def test_an_order_that_is_not_balanced_is_seen(
    mutant: Callable[[int, int], list[Order]], seen: list[str]
) -> None:
    assert unbalanced(mutant(6, 6)) == seen


def test_the_order_is_random_and_keyed() -> None:
    assert order_of(8, 40) == order_of(8, 40)
    assert len({tuple(map(tuple, order_of(8, 8, seed))) for seed in range(50)}) == 50
    firsts = Counter(turns(5, seed, 0) for seed in range(3000))
    # Every one of 5 · 4 beginnings, about equally often.
    beginnings = Counter(pair[:2] for pair in firsts.elements())
    assert len(beginnings) == 20
    assert max(beginnings.values()) < 2 * min(beginnings.values())
    blocks = [order_of(8, 80)[first : first + 8] for first in range(0, 80, 8)]
    assert len({tuple(map(tuple, block)) for block in blocks}) == 10, "a block is repeated"


class Counting:
    """An engine that notes its turns."""

    def __init__(self, label: str, notes: list[str]) -> None:
        self.label, self.notes = label, notes

    def train(self, segment: Segment) -> SegmentReport:
        self.notes.append(self.label)
        return SegmentReport(1.0, breakdown={"compute": 1.0})


def bench_job(contenders: int, rounds: int, seed: int) -> Job:
    tasks = tuple(Task(f"t{number}", "dapple", TWO) for number in range(contenders))
    bench = BenchSpec(rounds=rounds, steps=1, warmup_steps=1, bound=False)
    return replace(job_of(TWO, 1, seed=seed), tasks=tasks, bench=bench)


def bench(rank: int, world_size: int, run_dir: Path, job: Job) -> list[str]:
    notes: list[str] = []
    engines: list[Any] = [Counting(task.label, notes) for task in job.tasks]
    run_benchmark(engines, job, run_dir, [], lambda _: None)
    return notes


def test_all_ranks_take_the_turns_that_are_recorded(tmp_path: Path) -> None:
    """And a benchmark that is started again takes the same."""
    job = bench_job(5, 12, seed=3)
    expected = [(n, f"t{index}") for n in range(12) for index in turns(5, 3, n)]
    for attempt in ("first", "again"):
        (run_dir := tmp_path / attempt).mkdir()
        noted = run_ranks(2, bench, run_dir, job)
        assert noted == [[f"t{i}" for i in range(5)] + [label for _, label in expected]] * 2
        recorded = events(run_dir, "round")
        assert [(event["round"], event["task"]) for event in recorded] == expected
        assert [event["position"] for event in recorded] == [0, 1, 2, 3, 4] * 12
