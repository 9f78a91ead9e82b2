"""What an evaluation counts, as its units pass."""

from __future__ import annotations

import torch
from torch import Tensor

from runtimes.execution.criterion import cross_entropy_sum
from runtimes.execution.engine import Accuracy

__all__ = ["Tally"]


class Tally:
    """Top-1 hits, the sum of the losses (in float64, without smoothing), and samples.

    Sums stay on the device, so that no unit waits for the one before.
    """

    def __init__(self, device: torch.device):
        self._correct = torch.zeros((), dtype=torch.int64, device=device)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._samples = 0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Of n samples: ``logits`` (n, C), ``labels`` (n,) int64."""
        self._correct += (logits.argmax(1) == labels).sum()
        self._loss_sum += cross_entropy_sum(logits, labels)
        self._samples += len(labels)

    def clear(self) -> None:
        self._correct.zero_()
        self._loss_sum.zero_()
        self._samples = 0

    def accuracy(self) -> Accuracy:
        return Accuracy(int(self._correct), float(self._loss_sum), self._samples)
