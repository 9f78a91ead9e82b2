"""The instruction of a program, and its round-trip text form."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

__all__ = ["COMPUTE", "RECEIVES", "SENDS", "Action", "Op", "parse"]


class Op(StrEnum):
    """What an action does.  ``unit`` is a unit for computation and messages, an update's index
    for REDUCE, NORM, STEP and AVERAGE.

    R recomputes a forward whose activations were not kept.  It is an action of its own, so that
    it can be placed before the wait for the gradient, and so that the simulator sees it.
    NORM closes an update's gradients and starts to sum their squares over all stages, for
    clipping by the global norm; the update's STEP waits for the sum.
    AVERAGE ties the weights that an update has just produced to a stage's reference, which the
    rank's other pipelines are tied to as well.
    """

    F = "F"
    B = "B"
    R = "R"
    SEND_ACT = "SEND_ACT"
    RECV_ACT = "RECV_ACT"
    SEND_GRAD = "SEND_GRAD"
    RECV_GRAD = "RECV_GRAD"
    REDUCE = "REDUCE"
    NORM = "NORM"
    STEP = "STEP"
    AVERAGE = "AVERAGE"

    # Of the value, as equality is, and without a call in Python: actions are looked up a lot.
    __hash__ = str.__hash__


COMPUTE = frozenset({Op.F, Op.B, Op.R})
SENDS = frozenset({Op.SEND_ACT, Op.SEND_GRAD})
RECEIVES = frozenset({Op.RECV_ACT, Op.RECV_GRAD})


class Action(NamedTuple):
    """One instruction of one (pipeline, stage, replica).

    ``part``      of a B: the part of the backward, None for all of it; of a REDUCE: the part whose
                  gradients are reduced without being awaited, None for a blocking reduction of
                  the whole stage.
    ``version``   weight version, counted from the oldest there is after the last drain (see
                  ``Program.carried``); of a STEP: the one it produces;
                  of an AVERAGE: the one it changes.
    ``peer``      replica of the neighbouring stage a message goes to or comes from.
    ``interval``  samples of the unit in a message, half-open, counted within the unit.
    """

    pipeline: int
    stage: int
    replica: int
    op: Op
    unit: int
    part: int | None = None
    version: int | None = None
    peer: int | None = None
    interval: tuple[int, int] | None = None

    def __str__(self) -> str:
        text = f"p{self.pipeline}.s{self.stage}.r{self.replica}.{self.op.value}{self.unit}"
        if self.part is not None:
            text += f"/{self.part}"
        if self.peer is not None:
            text += f"{'>' if self.op in SENDS else '<'}r{self.peer}"
        if self.interval is not None:
            text += f"[{self.interval[0]}:{self.interval[1]}]"
        if self.version is not None:
            text += f"@{self.version}"
        return text


_TEXT = re.compile(
    r"p(\d+)\.s(\d+)\.r(\d+)\.([A-Z_]+)(\d+)(?:/(\d+))?(?:([<>])r(\d+))?(?:\[(\d+):(\d+)\])?(?:@(\d+))?"
)


def parse(text: str) -> Action:
    """The action whose ``str`` is ``text``; ValueError for anything else."""
    match = _TEXT.fullmatch(text)
    if match is None or match[4] not in Op.__members__:
        raise ValueError(f"not an action: {text!r} (expected a form like p0.s1.r0.B3/1@2)")
    pipeline, stage, replica, unit = (int(match[i]) for i in (1, 2, 3, 5))
    part, peer, low, high, version = (
        None if match[i] is None else int(match[i]) for i in (6, 8, 9, 10, 11)
    )
    interval = None if low is None or high is None else (low, high)
    op = Op[match[4]]
    action = Action(pipeline, stage, replica, op, unit, part, version, peer, interval)
    if str(action) != text:
        raise ValueError(f"not an action in its normal form: {text!r} (expected {action})")
    return action
