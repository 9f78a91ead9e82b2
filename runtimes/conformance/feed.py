"""A feed from tensors in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["MemoryFeed"]


@dataclass(frozen=True)
class MemoryFeed:
    """``values`` (N, …) and ``targets`` (N,), in batches of ``sizes``, which add up to N; every
    epoch in another order."""

    values: Tensor
    targets: Tensor
    sizes: tuple[int, ...]

    def batch_sizes(self) -> tuple[int, ...]:
        return self.sizes

    def indices(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        epoch, place = divmod(step, len(self.sizes))
        order = np.random.default_rng(epoch).permutation(len(self.values))
        first = sum(self.sizes[:place])
        return order[first : first + self.sizes[place]]

    def images(self, indices: np.ndarray[Any, Any], step: int) -> Tensor:
        return self.values[torch.from_numpy(indices)]

    def labels(self, indices: np.ndarray[Any, Any]) -> Tensor:
        return self.targets[torch.from_numpy(indices)]
