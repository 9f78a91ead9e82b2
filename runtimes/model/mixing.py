"""The finaliser of MurmurHash3 (Appleby): a bijection of 32-bit words in which every bit counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["Words", "mix", "mix_", "signed"]

_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35
_MODULUS = 1 << 32

Words = np.ndarray[Any, np.dtype[np.uint32]]


def mix(x: Words) -> Words:
    """Of arrays only: scalars warn of products that wrap."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(_FIRST)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(_SECOND)
    return x ^ (x >> np.uint32(16))


def signed(word: int) -> int:
    """The int32 of the same 32 bits: torch has no full arithmetic on uint32."""
    return word - _MODULUS if word >= _MODULUS // 2 else word


def mix_(x: Tensor) -> Tensor:
    """:func:`mix` in place on an int32 tensor, whose products wrap like unsigned ones."""
    for shift, factor in ((16, _FIRST), (13, _SECOND), (16, None)):
        # The shift of a signed tensor drags the sign bit along; the mask removes the copies.
        x ^= (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        if factor is not None:
            x *= signed(factor)
    return x
