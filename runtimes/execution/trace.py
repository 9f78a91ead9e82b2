"""What a rank did and when, and where its wall time went.

compute        thread CPU time inside F, B and R
interference   wall − CPU time inside them: what background transfers (or neighbours) stole
communication  sends, and waits for a message after its sender had computed it
idle           waits for a message that its sender had not computed yet: the bubble
reduce         issuing reductions, and waiting for them before a step
optimizer      the step itself
overhead       the rest, so that the parts add up to the wall
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns, thread_time_ns
from typing import NamedTuple

from runtimes.schedule.action import Action, Op

__all__ = ["PARTS", "Clocked", "Trace", "breakdown"]

PARTS = ("compute", "interference", "communication", "reduce", "optimizer", "idle", "overhead")

#: A message is known on both sides by this: pipeline, kind, unit, first sample, sender, receiver.
MessageKey = tuple[int, str, int, int, int, int]


class Clocked(NamedTuple):
    """One action's times in nanoseconds."""

    action: Action
    start: int
    end: int
    #: F, B, R: the thread's CPU time in between.
    cpu: int = 0
    #: STEP: nanoseconds of it spent waiting for reductions.
    waited: int = 0


@dataclass
class Trace:
    """The actions of one rank in one segment."""

    rank: int
    start: int = 0
    end: int = 0
    clocked: list[Clocked] = field(default_factory=list)

    def begin(self) -> None:
        self.clocked = []
        self.start = perf_counter_ns()

    def finish(self) -> None:
        self.end = perf_counter_ns()

    def add(self, action: Action, start: int, cpu: int | None, waited: int = 0) -> None:
        """It began at ``start``, and if it computes at thread CPU time ``cpu``, and ends now."""
        end = perf_counter_ns()
        used = 0 if cpu is None else thread_time_ns() - cpu
        self.clocked.append(Clocked(action, start, end, used, waited))

    def sent(self, peers: Mapping[tuple[int, int], int]) -> dict[MessageKey, int]:
        """When each message was handed to the transport; ``peers`` maps (stage, replica) → rank."""
        times = {}
        for item in self.clocked:
            if item.action.op in (Op.SEND_ACT, Op.SEND_GRAD):
                times[_key(item.action, self.rank, peers)] = item.start
        return times


def _key(action: Action, rank: int, peers: Mapping[tuple[int, int], int]) -> MessageKey:
    ahead = action.op in (Op.SEND_ACT, Op.RECV_GRAD)
    assert action.peer is not None
    assert action.interval is not None
    other = peers[action.stage + (1 if ahead else -1), action.peer]
    sends = action.op in (Op.SEND_ACT, Op.SEND_GRAD)
    kind = "ACT" if action.op in (Op.SEND_ACT, Op.RECV_ACT) else "GRAD"
    ends = (rank, other) if sends else (other, rank)
    return (action.pipeline, kind, action.unit, action.interval[0], *ends)


def breakdown(
    trace: Trace,
    sent: Mapping[MessageKey, int],
    peers: Mapping[tuple[int, int], int],
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
        if op in (Op.F, Op.B, Op.R):
            cpu = min(item.cpu, wall)
            total["compute"] += cpu
            total["interference"] += wall - cpu
        elif op in (Op.RECV_ACT, Op.RECV_GRAD):
            key = _key(item.action, trace.rank, peers)
            sender = key[4]
            ready = sent[key] + (offsets[sender] if offsets else 0)
            idle = min(max(ready - item.start, 0), wall)
            total["idle"] += idle
            total["communication"] += wall - idle
        elif op in (Op.SEND_ACT, Op.SEND_GRAD):
            total["communication"] += wall
        elif op == Op.REDUCE:
            total["reduce"] += wall
        elif op == Op.STEP:
            total["reduce"] += item.waited
            total["optimizer"] += wall - item.waited
    wall = trace.end - trace.start
    total["overhead"] = wall - sum(total.values())
    return {name: value / 1e9 for name, value in total.items()} | {"wall": wall / 1e9}
