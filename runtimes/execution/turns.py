"""In which order a round's contenders take their turns: random, and balanced.

A contender leaves caches, memory and clock rates to the one behind it.  If the order were always
the same but for where it begins, a ratio of two contenders would hold what their predecessors do.

Rounds come in blocks of n, one for each of n contenders: a Latin square, in which each contender
has each place once.  Its rows are those of Williams (1949): the zigzag 0, n−1, 1, n−2, … shifted by
0, 1, …, n−1.  Neighbours in it differ by each number but 0, so that each contender follows each
other one once a block; for odd n they do so in two blocks, the second with its rows turned round,
and twice.  Which contender is which number, and the order of the rows, are drawn anew.
"""

from __future__ import annotations

import numpy as np

__all__ = ["turns"]


def turns(contenders: int, seed: int, number: int) -> tuple[int, ...]:
    """The contenders, 0 … n − 1, in their order in round ``number``: a pure function, so that all
    ranks and a repeated benchmark agree."""
    n = contenders
    block, row = divmod(number, n)
    # Two blocks that only together are balanced share their names.
    pair, mirrored = (block, False) if n % 2 == 0 else (block // 2, block % 2 == 1)
    names = _permutation(n, seed, 0, pair)
    shift = _permutation(n, seed, 1, block)[row]
    zigzag = [place // 2 if place % 2 == 0 else n - 1 - place // 2 for place in range(n)]
    order = tuple(names[(step + shift) % n] for step in zigzag)
    return order[::-1] if mirrored else order


def _permutation(length: int, *key: int) -> list[int]:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
    return [int(value) for value in generator.permutation(length)]
