"""What each rank holds between the actions of a program, counted in units and samples.

Bytes follow from it by a linear rule (``runtimes.planning.memory``), so a census of a system's
program serves any model and any layers of a stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from runtimes.job import Transport
from runtimes.plan import Plan
from runtimes.schedule.action import RECEIVES, SENDS, Action, Op
from runtimes.schedule.posting import Posting, posting
from runtimes.schedule.program import Program, Stream
from runtimes.schedule.replay import replay

__all__ = ["Holding", "census", "holdings"]


class Holding(NamedTuple):
    """Of one rank, or one stream of it, at one moment.  Numbers are samples, but for ``gradients``;
    *activation* is what comes in from the stage before, *gradient* from the stage after."""

    #: Of each unit whose forward (or recomputation) is kept for its backward.
    kept: tuple[int, ...] = ()
    #: Of the unit (one a stream) whose backward has begun, and how many of its parts are done.
    begun: tuple[tuple[int, int], ...] = ()
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


class _Walk:
    """Follows one stream's actions; ``in_flight``: as of :func:`holdings`."""

    def __init__(
        self, program: Program, rank: int, stream: Stream, transport: Transport, in_flight: int
    ):
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
        elif action.op in (Op.NORM, Op.STEP):
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
        begun = tuple((u.samples, u.done) for u in units if u.kept and u.done)
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


def _together(held: Collection[Holding]) -> Holding:
    """What a rank holds for all its streams."""
    if len(held) == 1:
        (alone,) = held
        return alone
    kept, begun, inputs, gradients, parts, buckets, *messages = zip(*held, strict=True)
    return Holding(
        tuple(sorted(chain.from_iterable(kept))),
        tuple(sorted(chain.from_iterable(begun))),
        sum(inputs),
        sum(gradients),
        tuple(sorted(chain.from_iterable(parts))),
        tuple(sorted(chain.from_iterable(buckets))),
        *map(sum, messages),
    )


class _Rank:
    """All walks of a rank."""

    def __init__(self, program: Program, rank: int, transport: Transport, in_flight: int):
        self.walks = {
            stream.pipeline: _Walk(program, rank, stream, transport, in_flight)
            for stream in program.of_rank(rank)
        }
        self._held = {pipeline: walk.holding() for pipeline, walk in self.walks.items()}

    def act(self, action: Action) -> None:
        self.walks[action.pipeline].act(action)

    def holding(self, pipeline: int) -> Holding:
        """Now, when only what is held for this pipeline has changed."""
        self._held[pipeline] = self.walks[pipeline].holding()
        return _together(self._held.values())

    def taken(self, action: Action) -> None:
        self.walks[action.pipeline].taken(action)
        self._held[action.pipeline] = self.walks[action.pipeline].holding()


#: What is held after some action, with the first action after which it is.
_Found = dict[Holding, Action]


def census(
    program: Program, transport: Transport, in_flight: Mapping[int, int]
) -> list[list[_Found]]:
    """By rank: everything it holds after some action.  Over torch.distributed how a rank's streams
    interleave depends on times, so there it is what is held for each stream by itself; in one
    process it is the rank's.

    ``in_flight``: by stage, the units that the system declares at most in flight there in a
    pipeline.
    """
    plan = program.plan
    before = [in_flight.get(plan.place(rank)[0] - 1, 0) for rank in range(plan.world_size)]
    if transport == "distributed":
        return [
            [_of_stream(program, rank, stream, most) for stream in program.of_rank(rank)]
            for rank, most in enumerate(before)
        ]
    found: list[_Found] = [{} for _ in before]
    ranks = [_Rank(program, rank, transport, most) for rank, most in enumerate(before)]
    for action in replay(program):
        rank = plan.rank(action.stage, action.replica)
        ranks[rank].act(action)
        if action.op in RECEIVES:
            ranks[_neighbour(plan, action)].taken(action)
        found[rank].setdefault(ranks[rank].holding(action.pipeline), action)
    return [[of_rank] for of_rank in found]


def _of_stream(program: Program, rank: int, stream: Stream, most: int) -> _Found:
    walk, found = _Walk(program, rank, stream, "distributed", most), _Found()
    for action in stream:
        walk.act(action)
        found.setdefault(walk.holding(), action)
    return found


def holdings(
    program: Program, rank: int, in_flight_before: int, actions: Iterable[Action]
) -> Iterator[Holding]:
    """Over torch.distributed, where it depends on its own actions only: what a rank holds after
    each of them, in the order in which it performs them.  ``in_flight_before``: units at most in
    flight at the stage before in a pipeline."""
    walker = _Rank(program, rank, "distributed", in_flight_before)
    for action in actions:
        walker.act(action)
        yield walker.holding(action.pipeline)


def _neighbour(plan: Plan, receive: Action) -> int:
    assert receive.peer is not None
    stage = receive.stage + (-1 if receive.op == Op.RECV_ACT else 1)
    return plan.rank(stage, receive.peer)
