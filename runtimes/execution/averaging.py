"""Elastic averaging of one stage on one rank: parallel pipelines' copies tied to a reference.

x_i  weights of copy i, N  copies, c  weights of the reference, α  ``Elastic.alpha``

    synchronous     c′ = c + α Σ_i (x_i − c) = (1 − N α) c + α Σ_i x_i    once all have stepped
    asynchronous    c′ = c + α (x_i − c), copy after copy, in the order in which they have stepped
    centre-first    x_i ← x_i − α (x_i − c′)
    symmetric       x_i ← x_i − α (x_i − c), as in Zhang, Choromanska, LeCun 2015, eq. 5 and 6

Only weights are tied, never what an optimizer keeps of them.  A stage's layers are all on its rank,
so nothing is sent; replicas of a stage hold the same copies, and make the same of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from runtimes.execution.versions import WeightVersions
from runtimes.system import Elastic

__all__ = ["Averaging", "mean_of"]


class Averaging:
    """The reference, which begins as a copy of the first copy, and the AVERAGE actions.

    ``order``: the pipelines of the averagings since :meth:`start`, where each makes its own.
    ``tying(n)``: what the tying of n copies happens in.
    """

    def __init__(
        self,
        elastic: Elastic,
        copies: Sequence[WeightVersions],
        tying: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ):
        self.elastic, self._copies, self._tying = elastic, copies, tying
        self.reference = {
            name: parameter.detach().clone() for name, parameter in copies[0].current.items()
        }
        self.start()

    def start(self) -> None:
        self.order: list[int] = []
        self._tied = -1

    def average(self, pipeline: int, update: int) -> None:
        """Perform the pipeline's AVERAGE of an update.  One of all copies together is made at the
        first of theirs, when all have stepped; then the others have nothing left to do."""
        if not self.elastic.joint:
            self.order.append(pipeline)
            with self._tying(1):
                self._tie([self._copies[pipeline]])
        elif update > self._tied:
            with self._tying(len(self._copies)):
                self._tie(self._copies)
            self._tied = update

    @torch.no_grad()
    def _tie(self, copies: Sequence[WeightVersions]) -> None:
        centre = list(self.reference.values())
        if not centre:  # torch refuses empty lists.
            return
        alpha = self.elastic.alpha
        weights: list[list[Tensor]] = [[*copy.idle().values()] for copy in copies]
        target = centre if self.elastic.centre_first else [tensor.clone() for tensor in centre]
        torch._foreach_mul_(centre, 1 - len(copies) * alpha)
        for copy in weights:
            torch._foreach_add_(centre, copy, alpha=alpha)
        for copy in weights:
            torch._foreach_lerp_(copy, target, alpha)

    @torch.no_grad()
    def squared_distances(self) -> list[float]:
        """‖x_i − c‖² of each copy over the stage's trained parameters."""
        return [
            sum(
                float((parameter - self.reference[name]).square().sum(dtype=torch.float64))
                for name, parameter in copy.current.items()
            )
            for copy in self._copies
        ]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Let the reference be ``weights``, by parameter name."""
        for name, tensor in self.reference.items():
            tensor.copy_(weights[name])


@torch.no_grad()
def mean_of(copies: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of tensors of the same names; of integers, which count, the largest."""
    found = {}
    for name, first in copies[0].items():
        total = first.detach().clone()
        for other in copies[1:]:
            if first.is_floating_point():
                total += other[name]
            else:
                total = torch.maximum(total, other[name])
        found[name] = total.div_(len(copies)) if first.is_floating_point() else total
    return found
