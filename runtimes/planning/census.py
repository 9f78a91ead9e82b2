"""What each rank holds between the actions of a program, counted in units and samples.

Bytes follow from it by a linear rule (``runtimes.planning.memory``), so a census of a system's
program serves any model and any layers of a stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from runtimes.job import Transport
from runtimes.plan import Plan
from runtimes.schedule.action import RECEIVES, SENDS, Action, Op
from runtimes.schedule.posting import Posting, posting
from runtimes.schedule.program import Program
from runtimes.schedule.replay import replay

__all__ = ["Holding", "census", "holdings"]


class Holding(NamedTuple):
    """Of one rank at one moment.  Numbers are samples, but for ``gradients``; *activation* is what
    comes in from the stage before, *gradient* from the stage after."""

    #: Of each unit whose forward (or recomputation) is kept for its backward.
    kept: tuple[int, ...] = ()
    #: Of the unit whose backward has begun, and how many of its parts are done.
    begun: tuple[int, int] = (0, 0)
    #: Inputs kept for recomputation.
    inputs: int = 0
    #: Sets of gradients, complete or not closed yet.
    gradients: int = 0
    #: Parts of which gradients were made in the backward that has begun, if it is the first of its
    #: update.
    parts: tuple[int, ...] = ()
    #: Parts copied into buckets that are being reduced.
    buckets: tuple[int, ...] = ()
    #: Receives posted, and tensors received that no computation has used.
    activations: int = 0
    gradients_in: int = 0
    #: To be sent or under way, and held by nothing else.
    outputs: int = 0
    gradients_out: int = 0


@dataclass
class _Unit:
    """At one rank.  ``done``: parts of its backward."""

    samples: int
    kept: bool = False
    done: int = 0
    input: bool = False
    unsent: Counter[Op] = field(default_factory=Counter)
    received: Counter[Op] = field(default_factory=Counter)


class _Message(NamedTuple):
    """Sent, and held by the sender; ``whole``: as a view of all that the unit sends this way."""

    op: Op
    unit: int
    peer: int | None
    samples: int
    of: int
    whole: bool


class _Rank:
    """Follows one rank's actions."""

    def __init__(self, program: Program, rank: int, transport: Transport, in_flight: int):
        self.program, self.in_flight = program, in_flight
        self.stage, self.replica = program.plan.place(rank)
        self.plan = program.plan.stages[self.stage]
        self.apart = transport == "distributed"
        self.units: dict[int, _Unit] = {}
        self.under_way: list[_Message] = []
        #: Update → parts of which there are gradients; parts in buckets.
        self.made: dict[int, set[int]] = defaultdict(set)
        self.buckets: dict[int, list[int]] = defaultdict(list)
        self.posted: Counter[Op] = Counter()
        self.posting: Posting | None = None
        if self.apart:
            (stream,) = program.of_rank(rank)
            self.posting = posting(stream, rendezvous=program.rendezvous)
            self._post(self.posting.begin())

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.program.plan.stages) - 1

    def _post(self, receives: Iterable[Action]) -> None:
        for action in receives:
            self.posted[action.op] += _samples(action)

    def act(self, action: Action) -> None:
        if action.op in RECEIVES | SENDS:
            if self.posting is not None:
                self._post(self.posting.before(action))
            (self._send if action.op in SENDS else self._receive)(action)
            if self.posting is not None:
                self._post(self.posting.after(action))
        elif action.op == Op.F:
            self._forward(action)
        elif action.op == Op.R:
            unit = self.units[action.unit]
            unit.input, unit.kept = False, True
        elif action.op == Op.B:
            self._backward(action)
        elif action.op == Op.REDUCE:
            every = range(len(self.plan.parts))
            self.made[action.unit].update(every if action.part is None else (action.part,))
            if action.part is not None and self.apart:
                self.buckets[action.unit].append(action.part)
        else:
            self.buckets.pop(action.unit, None)
            if action.op == Op.STEP:
                self.made.pop(action.unit, None)

    def _unit(self, action: Action) -> _Unit:
        if action.unit not in self.units:
            low, high = self.program.share(action.pipeline, self.stage, self.replica, action.unit)
            self.units[action.unit] = _Unit(high - low)
        return self.units[action.unit]

    def _forward(self, action: Action) -> None:
        unit = self._unit(action)
        unit.received.clear()
        unit.kept, unit.input = not self.plan.recompute, self.plan.recompute
        if not self.is_last:
            unit.unsent[Op.SEND_ACT] = unit.samples

    def _backward(self, action: Action) -> None:
        unit = self.units[action.unit]
        unit.received.clear()
        parts = len(self.plan.parts)
        done = range(parts) if action.part is None else (action.part,)
        self.made[self.program.update(self.stage, action.unit)].update(done)
        unit.done = done[-1] + 1
        if unit.done < parts:
            return
        unit.kept = False
        if self.is_first:
            del self.units[action.unit]
        else:
            unit.unsent[Op.SEND_GRAD] = unit.samples

    def _receive(self, action: Action) -> None:
        if self.apart:
            self.posted[action.op] -= _samples(action)
        self._unit(action).received[action.op] += _samples(action)
        if self.apart and action.op == Op.RECV_GRAD:
            # An activation has arrived when its gradient comes back.
            self.under_way = [
                message
                for message in self.under_way
                if (message.op, message.unit, message.peer)
                != (Op.SEND_ACT, action.unit, action.peer)
            ]

    def _send(self, action: Action) -> None:
        unit, samples = self.units[action.unit], _samples(action)
        unit.unsent[action.op] -= samples
        whole = self.apart or samples == unit.samples
        if not (self.program.rendezvous and self.apart and action.op == Op.SEND_ACT):
            self.under_way.append(
                _Message(action.op, action.unit, action.peer, samples, unit.samples, whole)
            )
        if action.op == Op.SEND_GRAD:
            if not unit.unsent[action.op]:
                del self.units[action.unit]
            if self.apart:
                mine = [m for m in self.under_way if (m.op, m.peer) == (action.op, action.peer)]
                for message in mine[: -self.in_flight]:
                    self.under_way.remove(message)

    def taken(self, action: Action) -> None:
        """In one process: the neighbour's replica ``action.replica`` has received from here."""
        op = Op.SEND_ACT if action.op == Op.RECV_ACT else Op.SEND_GRAD
        for message in self.under_way:
            if (message.op, message.unit, message.peer) == (op, action.unit, action.replica):
                self.under_way.remove(message)
                return

    def _outgoing(self, op: Op) -> int:
        """Samples of storages that hold outputs (or gradients of inputs) to be sent or under way,
        beside those that are kept for the backward anyhow."""
        whole = {m.unit: m.of for m in self.under_way if m.op == op and m.whole}
        whole |= {name: unit.samples for name, unit in self.units.items() if unit.unsent[op]}
        if op == Op.SEND_ACT and not self.plan.recompute:
            # A recomputed output is another tensor than the one that was sent.
            kept = {name for name, unit in self.units.items() if unit.kept}
            whole = {name: samples for name, samples in whole.items() if name not in kept}
        parts = sum(m.samples for m in self.under_way if m.op == op and not m.whole)
        return sum(whole.values()) + parts

    def holding(self) -> Holding:
        units, parts = self.units.values(), len(self.plan.parts)
        begun = next(((u.samples, u.done) for u in units if u.kept and u.done), (0, 0))
        received: Counter[Op] = sum((u.received for u in units), Counter())
        return Holding(
            kept=tuple(sorted(u.samples for u in units if u.kept and not u.done)),
            begun=begun,
            inputs=sum(u.samples for u in units if u.input),
            gradients=sum(len(made) == parts for made in self.made.values()),
            parts=next((tuple(sorted(m)) for m in self.made.values() if len(m) < parts), ()),
            buckets=tuple(sorted(part for buckets in self.buckets.values() for part in buckets)),
            activations=self.posted[Op.RECV_ACT] + received[Op.RECV_ACT],
            gradients_in=self.posted[Op.RECV_GRAD] + received[Op.RECV_GRAD],
            outputs=self._outgoing(Op.SEND_ACT),
            gradients_out=self._outgoing(Op.SEND_GRAD),
        )


def _samples(action: Action) -> int:
    assert action.interval is not None
    return action.interval[1] - action.interval[0]


def census(
    program: Program, transport: Transport, in_flight: Mapping[int, int]
) -> list[dict[Holding, Action]]:
    """By rank: everything it holds after some action, with the first action after which it does.

    ``in_flight``: by stage, the units that the system declares at most in flight there.
    """
    plan = program.plan
    before = [in_flight.get(plan.place(rank)[0] - 1, 0) for rank in range(plan.world_size)]
    found: list[dict[Holding, Action]] = [{} for _ in before]
    if transport == "distributed":
        for rank, most in enumerate(before):
            for action, holding in holdings(program, rank, most):
                found[rank].setdefault(holding, action)
        return found
    ranks = [_Rank(program, rank, transport, most) for rank, most in enumerate(before)]
    for action in replay(program):
        rank = plan.rank(action.stage, action.replica)
        ranks[rank].act(action)
        if action.op in RECEIVES:
            ranks[_neighbour(plan, action)].taken(action)
        found[rank].setdefault(ranks[rank].holding(), action)
    return found


def holdings(
    program: Program, rank: int, in_flight_before: int
) -> Iterator[tuple[Action, Holding]]:
    """Over torch.distributed, where it depends on its own stream only: what a rank holds after each
    of its actions.  ``in_flight_before``: units at most in flight at the stage before."""
    walker = _Rank(program, rank, "distributed", in_flight_before)
    (stream,) = program.of_rank(rank)
    for action in stream:
        walker.act(action)
        yield action, walker.holding()


def _neighbour(plan: Plan, receive: Action) -> int:
    assert receive.peer is not None
    stage = receive.stage + (-1 if receive.op == Op.RECV_ACT else 1)
    return plan.rank(stage, receive.peer)
