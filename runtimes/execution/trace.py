"""What a rank did and when, and where its wall time went.

compute        thread CPU time inside F, B and R, and what an emulated device waited there
interference   wall − compute inside them: what background transfers (or neighbours) stole, and by
               how much waits overshot
communication  sends, and waits for a message after its sender had computed it
idle           waits for a message that its sender had not computed yet: the bubble
reduce         issuing reductions, and waiting for them before a step
optimizer      the step itself, and averaging of parallel pipelines' copies
overhead       the rest, so that the parts add up to the wall

A rank of several streams waits for all of them when none can go on.  As in the simulator that wait
belongs to the action that ends it, which begins with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns, thread_time_ns
from typing import NamedTuple

from runtimes.plan import Plan
from runtimes.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Op
from runtimes.schedule.program import Channel, channel

__all__ = ["PARTS", "Clocked", "Trace", "breakdown"]

PARTS = ("compute", "interference", "communication", "reduce", "optimizer", "idle", "overhead")

#: A message is known on both sides by this: channel, unit, first sample.
MessageKey = tuple[Channel, int, int]


class Clocked(NamedTuple):
    """One action's times in nanoseconds."""

    action: Action
    start: int
    end: int
    #: F, B, R: what the thread computed in between.
    cpu: int = 0
    #: NORM, STEP: nanoseconds of it spent waiting for reductions.
    waited: int = 0


@dataclass
class Trace:
    """The actions of one rank in one segment; none where nobody is to read them (``kept``).
    ``busy_ns``: a clock of what the rank computes."""

    start: int = 0
    end: int = 0
    clocked: list[Clocked] = field(default_factory=list)
    kept: bool = True
    busy_ns: Callable[[], int] = thread_time_ns

    def begin(self, *, kept: bool = True) -> None:
        self.clocked, self.kept = [], kept
        self.start = perf_counter_ns()

    def finish(self) -> None:
        self.end = perf_counter_ns()

    def add(self, action: Action, start: int, cpu: int | None, waited: int = 0) -> None:
        """It began at ``start``, and if it computes at ``cpu`` by that clock, and ends now."""
        end = perf_counter_ns()
        used = 0 if cpu is None else self.busy_ns() - cpu
        self.clocked.append(Clocked(action, start, end, used, waited))

    def sent(self, plan: Plan) -> dict[MessageKey, int]:
        """When each message was handed to the transport."""
        return {
            _key(item.action, plan): item.start for item in self.clocked if item.action.op in SENDS
        }


def _key(action: Action, plan: Plan) -> MessageKey:
    assert action.interval is not None
    return channel(action, plan), action.unit, action.interval[0]


def breakdown(
    trace: Trace,
    sent: Mapping[MessageKey, int],
    plan: Plan,
    clock_offsets: Iterable[int] | None = None,
) -> dict[str, float]:
    """Seconds of each part, and "wall"; they add up.

    ``sent`` merges :meth:`Trace.sent` of all ranks, ``clock_offsets[r]`` is what to add to rank
    r's clock to read ours.
    """
    offsets = list(clock_offsets) if clock_offsets is not None else []
    total = dict.fromkeys(PARTS, 0)
    for item in trace.clocked:
        wall = item.end - item.start
        op = item.action.op
        if op in COMPUTE:
            cpu = min(item.cpu, wall)
            total["compute"] += cpu
            total["interference"] += wall - cpu
        elif op in RECEIVES:
            key = _key(item.action, plan)
            ready = sent[key] + (offsets[key[0].sender] if offsets else 0)
            idle = min(max(ready - item.start, 0), wall)
            total["idle"] += idle
            total["communication"] += wall - idle
        elif op in SENDS:
            total["communication"] += wall
        elif op == Op.REDUCE:
            total["reduce"] += wall
        elif op == Op.NORM:
            total["reduce"] += item.waited
        elif op in (Op.NORM, Op.STEP):
            total["reduce"] += item.waited
            total["optimizer"] += wall - item.waited if op == Op.STEP else 0
        elif op == Op.AVERAGE:
            total["optimizer"] += wall
    wall = trace.end - trace.start
    total["overhead"] = wall - sum(total.values())
    return {name: value / 1e9 for name, value in total.items()} | {"wall": wall / 1e9}
