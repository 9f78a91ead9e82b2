"""Which of a rank's streams goes on when several can: the rule of worker, simulator and replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from runtimes.schedule.action import Action, Op
from runtimes.schedule.batches import Batches

__all__ = ["in_turn", "urgency"]

_FORWARD = frozenset({Op.F, Op.RECV_ACT})


def urgency(action: Action, batches: Batches) -> tuple[bool, int]:
    """The least goes first, and of equals the earlier stream.

    Whatever is no forward goes before one: a gradient frees the stages before for their backwards,
    and a message that lies here keeps another rank waiting.  Then the older update: else the first
    pipeline would run through a whole segment with the others in its gaps, and leave them to end
    it one after the other.
    """
    of_update = action.op in (Op.REDUCE, Op.NORM, Op.STEP, Op.AVERAGE)
    return action.op in _FORWARD, action.unit if of_update else batches.batch(action.unit)


class _Head(Protocol):
    """A stream being walked; ``action``: its next, None at its end."""

    action: Action | None


H = TypeVar("H", bound=_Head)


def in_turn(heads: Sequence[H], batches: Batches) -> Sequence[H]:
    """Those that have not ended, the most urgent first; a single stream as it is."""
    if len(heads) == 1:
        return heads
    coming = [(urgency(head.action, batches), head) for head in heads if head.action is not None]
    return [head for _, head in sorted(coming, key=lambda entry: entry[0])]
