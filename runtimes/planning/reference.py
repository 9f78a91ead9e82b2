"""How fast the machine is at this moment: a fixed piece of work, timed beside what is measured.

A shared machine's speed drifts by more than a good prediction errs.  Times found in one hour and
predicted from another's are compared after division by what this work took in either.
"""

from __future__ import annotations

from functools import cache
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F

from runtimes.execution.precision import synchronize

__all__ = ["reference_seconds"]

#: Rows, and width, of what is multiplied; how often.
_ROWS, _WIDTH, _PASSES = 256, 384, 20


@cache
def _operands(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, wide, back = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((_ROWS, _WIDTH), (4 * _WIDTH, _WIDTH), (_WIDTH, 4 * _WIDTH))
    )
    return x, wide / _WIDTH**0.5, back / (4 * _WIDTH) ** 0.5


def reference_seconds(device: torch.device) -> list[float]:
    """Of every pass of some tenths of a second through what a transformer block's second half
    computes, in float32.  With ranks that share a machine, all should call it at the same time.

    What a machine's other tenants take comes in bursts.  They are part of what a run takes, so its
    reference is the mean; a profile's times are medians of short pieces, and so is its reference.
    """
    x, wide, back = _operands(device)
    found = []
    with torch.no_grad():
        for _ in range(_PASSES):
            synchronize(device)
            begin = perf_counter()
            x + F.linear(F.gelu(F.linear(F.layer_norm(x, (_WIDTH,)), wide)), back)
            synchronize(device)
            found.append(perf_counter() - begin)
    return found
