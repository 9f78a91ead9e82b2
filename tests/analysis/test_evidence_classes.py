"""A ratio never crosses evidence classes; a product carries its weakest."""

from __future__ import annotations

import itertools

import pytest

from analysis.evidence import Evidence, Quantity, product, ratio, weakest

MEASURED, EMULATED, SIMULATED, PAPER = Evidence


def test_classes_are_ordered_from_measured_to_paper() -> None:
    assert MEASURED < EMULATED < SIMULATED < PAPER
    assert [Evidence.parse(name) for name in ("measured", "emulated", "simulated", "paper")] == [
        *Evidence
    ]


def test_an_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'guessed': one of measured, emulated, simulated, paper"):
        Evidence.parse("guessed")


@pytest.mark.parametrize("evidence", Evidence)
def test_a_ratio_within_a_class_keeps_it(evidence: Evidence) -> None:
    assert ratio(Quantity(3.0, evidence), Quantity(2.0, evidence)) == Quantity(1.5, evidence)


@pytest.mark.parametrize(("above", "below"), [*itertools.permutations(Evidence, 2)])
def test_a_ratio_across_classes_is_refused(above: Evidence, below: Evidence) -> None:
    with pytest.raises(ValueError, match="cannot mix"):
        ratio(Quantity(3.0, above), Quantity(2.0, below))


@pytest.mark.parametrize(("one", "other"), [*itertools.product(Evidence, repeat=2)])
def test_a_product_carries_the_weakest_class(one: Evidence, other: Evidence) -> None:
    found = product(Quantity(3.0, one), Quantity(2.0, other))
    assert found == Quantity(6.0, max(one, other, key=[*Evidence].index))


def test_the_weakest_of_many() -> None:
    assert weakest([SIMULATED, MEASURED, EMULATED]) is SIMULATED
