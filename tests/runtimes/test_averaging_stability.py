"""What is called stable is what stays bounded when copies and reference are averaged many times."""

from __future__ import annotations

import math
import re

import pytest

from runtimes.avgpipe import AvgPipe
from runtimes.avgpipe.stability import is_stable, stable_strengths
from runtimes.plan import Plan
from runtimes.system import Elastic


def spread(elastic: Elastic, copies: int, rounds: int = 250) -> float:
    """How far apart copies and reference are in the end, of 1 at most in the beginning, or infinity
    for more than a hundred on the way; the equations as they are written down, on numbers."""
    alpha, worst = elastic.alpha, 0.0
    for start in range(copies + 1):
        x = [float(i == start) for i in range(copies)]
        c = float(start == copies)
        for _ in range(rounds):
            groups = [list(range(copies))] if elastic.joint else [[i] for i in range(copies)]
            for group in groups:
                old = c
                c = old + alpha * sum(x[i] - old for i in group)
                centre = c if elastic.centre_first else old
                for i in group:
                    x[i] -= alpha * (x[i] - centre)
            if max(abs(value - c) for value in x) > 100:
                return math.inf
        worst = max(worst, *(abs(value - c) for value in x))
    return worst


@pytest.mark.parametrize("copies", [1, 2, 3, 5, 6, 8, 12])
@pytest.mark.parametrize("centre_first", [True, False])
@pytest.mark.parametrize("joint", [True, False])
def test_stable_is_what_does_not_grow(copies: int, centre_first: bool, joint: bool) -> None:
    for step in range(1, 45):
        alpha = step / 20 + 0.003
        elastic = Elastic(alpha, centre_first, joint)
        apart = spread(elastic, copies)
        if is_stable(elastic, copies):
            assert apart < 1.0 + 1e-9, alpha
        elif joint or not centre_first:
            assert apart > 2.0, alpha


@pytest.mark.parametrize("copies", [1, 2, 5, 6, 9])
@pytest.mark.parametrize("centre_first", [True, False])
@pytest.mark.parametrize("joint", [True, False])
def test_the_bounds_that_are_named_are_where_it_changes(
    copies: int, centre_first: bool, joint: bool
) -> None:
    elastic = Elastic(0.5, centre_first, joint)
    text, _, _ = stable_strengths(elastic, copies).partition(" (runtimes")
    text, _, _ = text.partition(" (Zhang")
    bounds = [float(number) for number in re.findall(r"(?<![/\w.])\d+\.?\d*(?![\d.]*[/)])", text)]
    flips = [
        alpha / 1000
        for alpha in range(1, 2500)
        if is_stable(Elastic(alpha / 1000, centre_first, joint), copies)
        != is_stable(Elastic((alpha + 1) / 1000, centre_first, joint), copies)
    ]
    for flip in flips:
        assert any(abs(flip - bound) < 0.006 for bound in bounds), (flip, bounds)


def test_a_default_strength_is_stable() -> None:
    for pipelines in range(1, 13):
        plan = Plan.even(2, 2, pipelines=pipelines)
        for form in ("centre-first", "symmetric"):
            for averaging in ("synchronous", "asynchronous"):
                warned = AvgPipe(form=form, averaging=averaging).warnings(plan)  # type: ignore[arg-type]
                assert bool(warned) == (pipelines == 1 and form == "symmetric"), (pipelines, form)


def test_a_warning_names_bound_and_source() -> None:
    plan = Plan.even(2, 2, pipelines=2)
    (text,) = AvgPipe(form="symmetric", alpha=0.7).warnings(plan)
    assert "alpha = 0.7" in text
    assert "synchronous averaging of 2 copies in the symmetric form" in text
    assert text.endswith("α < 2/(N + 1) = 0.667 (Zhang et al. 2015)")
    assert AvgPipe(form="symmetric", alpha=0.66).warnings(plan) == ()
    (text,) = AvgPipe(alpha=1.6).warnings(plan)
    assert text.endswith("α < (N + 1)/N = 1.5 (runtimes/avgpipe/stability.py)")
