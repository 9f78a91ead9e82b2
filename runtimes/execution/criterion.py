"""The training loss: summed, so that any split of a batch adds up to the same."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["cross_entropy_sum"]


def cross_entropy_sum(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross entropy summed over n samples, with label smoothing (Szegedy et al. 2016, section 7).

    With C classes the target is (1 − smoothing) · one-hot + smoothing / C.  ``logits`` (n, C),
    ``labels`` (n,) int64; n may be 0.  Returns a scalar in float64 if the logits are, else in
    float32, under autocast too: an 8-bit mantissa would lose samples in a sum.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"label smoothing is {smoothing}, but must lie in [0, 1)")
    with torch.autocast(logits.device.type, enabled=False):
        if logits.dtype != torch.float64:
            logits = logits.float()
        return functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
