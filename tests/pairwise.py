"""Covering sets: few combinations in which every two values that may meet do meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

__all__ = ["pairwise"]


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Combinations of one value a factor that together hold every two values which any allowed
    one holds: greedily, of some with a pair still missing, the one with most such pairs."""
    possible = [
        values
        for values in product(*factors.values())
        if allowed(dict(zip(factors, values, strict=True)))
    ]
    pairs = {values: frozenset(combinations(enumerate(values), 2)) for values in possible}
    missing = set().union(*pairs.values())
    generator, chosen = random.Random(0), []
    while missing:
        # Rare pairs first: of the values that rule others out.
        pair = min(missing, key=repr)
        candidates = [values for values in possible if pair in pairs[values]]
        some = generator.sample(candidates, min(100, len(candidates)))
        best = max(some, key=lambda values: len(pairs[values] & missing))
        chosen.append(dict(zip(factors, best, strict=True)))
        missing -= pairs[best]
    return chosen
