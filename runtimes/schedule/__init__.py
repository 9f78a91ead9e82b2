"""Schedules as pure data: actions, orders, lowering and validation.  No torch."""

from runtimes.schedule.action import Action, Op, parse
from runtimes.schedule.batches import Batches
from runtimes.schedule.lowering import lower
from runtimes.schedule.orders import (
    Compute,
    Order,
    double_buffered,
    flush,
    forward_only,
    one_step_a_unit,
    warm_up,
)
from runtimes.schedule.program import Program, Stream
from runtimes.schedule.rules import Declared, ScheduleError
from runtimes.schedule.validation import validate

__all__ = [
    "Action",
    "Batches",
    "Compute",
    "Declared",
    "Op",
    "Order",
    "Program",
    "ScheduleError",
    "Stream",
    "double_buffered",
    "flush",
    "forward_only",
    "lower",
    "one_step_a_unit",
    "parse",
    "validate",
    "warm_up",
]
