"""A schedule's own bound, against what pencil and paper give."""

from __future__ import annotations

import pytest

from runtimes.execution.bound import Slice, bound_seconds
from runtimes.job import Task
from runtimes.plan import Plan

#: A unit of 1 + 2 seconds.
EQUAL = Slice(1.0, 1.0, 2.0, 0.0)
WHOLE = ("pipedream", "ashpipe")


def task(system: str, plan: Plan, **options: object) -> Task:
    return Task(system, system, plan, options)


@pytest.mark.parametrize("system", ["gpipe", "dapple", "pipedream_2bw", *WHOLE])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_equal_stages(system: str, stages: int, step: float) -> None:
    """(M + S − 1) · t + step a batch with a flush; without one the pipeline fills and drains once,
    and every batch adds its step."""
    units = 1 if system in WHOLE else 8
    plan = Plan.even(stages, stages, micro_batches=units)
    slices = [Slice(1.0, 1.0, 2.0, step)] * stages
    found = bound_seconds(task(system, plan), slices, (8,) * 7)
    if system in ("gpipe", "dapple"):
        assert found == 7 * ((8 + stages - 1) * 3.0 + step)
    else:
        assert found == (7 * units + stages - 1) * 3.0 + 7 * step


def test_a_faster_stage_shortens_only_filling_and_draining() -> None:
    """1F1B, 2 stages of 1 + 2 and 2/3 + 4/3 seconds, 2 units:

    F0 F1 .. B0 B0 B1 B1     stage 0 waits from 2 to 3, and then for nothing: 7 seconds, not the
    .. F0B0 F1B1             (M + S − 1) · 3 = 9 of two stages as slow as the slowest.
    """
    plan = Plan.even(2, 2, micro_batches=2)
    slices = [EQUAL, Slice(2 / 3, 0.0, 4 / 3, 0.0)]
    assert bound_seconds(task("dapple", plan), slices, (4,)) == pytest.approx(7.0)
    assert bound_seconds(task("dapple", plan), [EQUAL] * 2, (4,)) == 9.0
    whole = Plan.even(2, 2)
    # Without a flush the slower stage never waits, but for the first gradient and after the last.
    assert bound_seconds(task("ashpipe", whole), slices, (4,) * 9) == pytest.approx(9 * 3.0 + 1.0)


def test_a_stage_is_as_slow_as_its_slowest_replica() -> None:
    plan = Plan.even(1, 1, [3])
    slices = [EQUAL, Slice(1.0, 1.0, 4.0, 0.0), EQUAL]
    assert bound_seconds(task("dp", plan), slices, (6, 6)) == 10.0


def test_recomputation_counts() -> None:
    plan = Plan.even(1, 1, micro_batches=4, recompute=True)
    assert bound_seconds(task("dapple", plan), [Slice(1.0, 1.5, 2.0, 0.25)], (8,)) == 18.25
