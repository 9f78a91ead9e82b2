"""How the ranks of a program exchange tensors: what a worker asks of a transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from runtimes.schedule.action import Action
from runtimes.schedule.program import Program

__all__ = ["Endpoint"]


class Endpoint(Protocol):
    """One rank's end.  Streams are walked in order, so messages of a channel never overtake."""

    def open(self, program: Program) -> None:
        """A program is about to run."""

    def ready(self, action: Action) -> bool:
        """Whether a receive, or a norm or step that waits for reductions, can be performed now.
        A transport that blocks instead answers True."""

    def send(self, action: Action, tensor: Tensor) -> None:
        """Hand over; never waits for the receiver.  The tensor must not be changed any more."""

    def receive(self, action: Action, shape: Sequence[int]) -> Tensor:
        """The message's tensor of this shape, which the receiver owns."""

    def reduce(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Start to sum these over the replicas of the action's stage, in place (or, for an
        action without part, sum them one by one before returning)."""

    def finish_reduce(self, action: Action) -> None:
        """Return when all reductions of a step's update are done."""

    def norm(self, action: Action, squares: Tensor) -> None:
        """Start to sum () ``squares`` over all ranks of the pipeline."""

    def finish_norm(self, action: Action) -> Tensor:
        """The sum of an update's squares, when all ranks have given theirs."""

    def messages(self) -> Iterator[Tensor]:
        """What this end keeps of messages: to receive into, and until they have arrived."""

    def reductions(self) -> Iterator[Tensor]:
        """What it keeps of reductions under way, beside the gradients."""

    def close(self) -> None:
        """The program has run: nothing of it is under way any more."""
