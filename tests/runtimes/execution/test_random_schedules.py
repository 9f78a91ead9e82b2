"""What the validator passes never deadlocks in execution, and computes the same as any order."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.job import DataSpec, Job, ModelSpec, OptimizerSpec, Task
from runtimes.model.stack import LayerStack
from runtimes.plan import Plan
from runtimes.schedule import ScheduleError, validate
from tests.processes import run_ranks
from tests.random_schedules import RandomOrder, random_plan

SIZES = (7, 5)
WIDTHS = (3, 4, 2, 5, 3)


class Rows:
    """A feed of twelve random rows."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(12, WIDTHS[0], generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, WIDTHS[-1], (12,), generator=generator)

    def batch_sizes(self) -> tuple[int, ...]:
        return SIZES

    def indices(self, step: int) -> np.ndarray[Any, Any]:
        return np.arange(sum(SIZES[:step]), sum(SIZES[: step + 1]))

    def images(self, indices: np.ndarray[Any, Any], step: int) -> Tensor:
        return self.x[torch.as_tensor(indices)]

    def labels(self, indices: np.ndarray[Any, Any]) -> Tensor:
        return self.y[torch.as_tensor(indices)]


def parts(plan: Plan) -> tuple[Job, Task, LayerStack, Rows]:
    layers = [nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    task = Task("random", "random", plan)
    job = Job(
        (task,),
        ModelSpec("Sequential"),
        DataSpec("", ""),
        batch_size=7,
        epochs=1,
        precision="float64",
        optimizer=OptimizerSpec(lr=0.1, momentum=0.5),
        action_timeout_s=20,
    )
    return job, task, LayerStack.from_module(nn.Sequential(*layers)), Rows()


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in other)


@cache
def reference() -> dict[str, Tensor]:
    engine = InProcess(*parts(Plan.even(4, 1)), system=RandomOrder())
    engine.train(Segment(0, SIZES))
    return engine.state()["weights"]


def drawn(seed: int, skew: float, most_ranks: int = 8) -> tuple[Plan, RandomOrder]:
    dice = random.Random(seed)
    return random_plan(dice, len(WIDTHS) - 1, most_ranks=most_ranks), RandomOrder(seed, skew)


def passes(plan: Plan, system: RandomOrder) -> bool:
    try:
        validate(system.program(plan, SIZES), system.declared(plan))
    except ScheduleError:
        return False
    return True


@example(seed=179, skew=0.3)  # A replica that takes in the second half of a unit first.
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 1.0]))
def test_a_valid_random_schedule_runs_and_computes_the_same(seed: int, skew: float) -> None:
    plan, system = drawn(seed, skew)
    if not passes(plan, system):
        return
    engine = InProcess(*parts(plan), system=system)
    engine.train(Segment(0, SIZES))
    assert difference(engine.state()["weights"], reference()) < 1e-12


def test_random_schedules_are_often_valid_and_often_not() -> None:
    """Both halves of the statement above are put to the test."""
    verdicts = [passes(*drawn(seed, skew=0.3)) for seed in range(200)]
    assert 40 < sum(verdicts) < 190


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_program_that_is_refused_for_a_deadlock_would_deadlock(seed: int) -> None:
    plan, system = drawn(seed, 0.6)
    program = system.program(plan, SIZES)
    broken_rule = None
    try:
        validate(program)
    except ScheduleError as error:
        broken_rule = error.rule
    assert broken_rule in (None, 6)
    engine = InProcess(*parts(plan), system=system)
    try:
        engine.run(program, 0)
        stuck = False
    except RuntimeError as error:
        stuck = "deadlock" in str(error)
    assert stuck == (broken_rule == 6)


def run_drawn(rank: int, world_size: int, cases: list[tuple[Plan, RandomOrder]]) -> list[Any]:
    shares = []
    for plan, system in cases:
        engine = DistributedEngine(*parts(plan), rank, system=system)
        engine.train(Segment(0, SIZES))
        shares.append({name: p.clone() for name, p in engine.state()["weights"].items()})
    return shares


def test_valid_random_schedules_run_over_real_processes() -> None:
    cases: list[tuple[Plan, RandomOrder]] = []
    seed = 0
    while len(cases) < 12:
        plan, system = drawn(seed, skew=0.5, most_ranks=3)
        if plan.world_size == 3 and passes(plan, system):
            cases.append((plan, system))
        seed += 1
    expected = reference()
    shares = run_ranks(3, run_drawn, cases)
    for number, _ in enumerate(cases):
        merged: dict[str, Tensor] = {}
        for share in shares:
            merged |= share[number]
        assert difference(merged, expected) < 1e-12
