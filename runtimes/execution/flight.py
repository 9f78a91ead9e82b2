"""A unit in flight at a rank: what is kept of it between its actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from runtimes.schedule.action import Op

__all__ = ["Flight"]


@dataclass
class Flight:
    """From the first message or computation of a unit to the last."""

    parameters: Mapping[str, Tensor]
    pipeline: int
    step: int
    samples: np.ndarray[Any, Any]
    first: int  #: Of the samples, counted within the unit.
    #: Pieces of its samples by the first of them.
    received: dict[Op, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    #: Samples handed to the transport.
    sent: dict[Op, int] = field(default_factory=lambda: defaultdict(int))
    #: (input, output) of each part of the backward, in the order of the forward.
    pieces: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    input: Tensor | None = None
    output: Tensor | None = None
    gradient: Tensor | None = None

    def activations(self) -> Iterator[Tensor]:
        """What its backward will read, beside what autograd saved; for recomputation, its input."""
        for piece in self.pieces:
            yield from piece
        if self.input is not None:
            yield self.input

    def messages(self) -> Iterator[Tensor]:
        """What was received and not used yet, and what is to be sent."""
        for pieces in self.received.values():
            yield from pieces.values()
        for tensor in (self.output, self.gradient):
            if tensor is not None:
                yield tensor
