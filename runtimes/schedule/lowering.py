"""From compute orders to a program: communication, recomputation, parts and reductions.

Each stream is generated lazily from its own order and those of its neighbours, so a program
of millions of actions costs only what walks it, and its first actions are generated only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import chain, islice
from typing import Generic, TypeVar

from runtimes.plan import Plan, share, split
from runtimes.schedule.action import COMPUTE, Action, Op
from runtimes.schedule.batches import Batches
from runtimes.schedule.orders import Compute, Order
from runtimes.schedule.program import Program, Stream

__all__ = ["lower"]


def lower(
    order: Order,
    plan: Plan,
    batches: Batches,
    *,
    training: bool = True,
    blocking_reduce: bool = False,
    rendezvous: bool = False,
    carried: int = 0,
    joint_average: bool = True,
    phase: int = 0,
) -> Program:
    """Insert what the compute orders leave out; ``rendezvous`` and what follows as of Program.

    - The messages of a channel follow the *sender's* order: a receiver that computes in another
      order takes a message in when its turn comes, so sends and receives can never cross.
    - Units of which a replica holds no sample are dropped from its stream.
    - The backward before a REDUCE is cut into the plan's parts, each reduced while the next is
      computed; the input's gradient leaves before the last reduction starts.  With
      ``blocking_reduce`` the backward stays whole and one blocking reduction follows it.
    - A stage that recomputes does so (R) before it waits for the gradient.
    - With ``rendezvous`` a gradient leaves only after the step that follows its backward.
    """

    lowered = _Lowering(order, plan, batches, training, blocking_reduce, rendezvous)

    def stream(pipeline: int, stage: int, replica: int) -> Stream:
        rank = plan.rank(stage, replica)
        actions = partial(lowered.actions, pipeline, stage, replica)
        return Stream(rank, pipeline, _Generated(actions).walk, actions)

    return Program(
        plan,
        batches,
        tuple(
            stream(pipeline, stage, replica)
            for stage in range(len(plan.stages))
            for replica in range(plan.stages[stage].replicas)
            for pipeline in range(batches.pipelines)
        ),
        training,
        rendezvous=rendezvous,
        carried=carried,
        joint_average=joint_average,
        phase=phase,
    )


#: Actions of a stream that are kept: about 1 MB, enough for hundreds of batches.
_KEPT = 4096
#: So many are generated at a time.
_CHUNK = 32

Item = TypeVar("Item")


class _Generated(Generic[Item]):
    """A stream, or an order, that is walked more than once: a transport looks ahead of its worker,
    segments of the same batches have the same program, and neighbours have to know an order.  What
    lies beyond the items kept is generated anew by each walk."""

    def __init__(self, source: Callable[[], Iterator[Item]]):
        self._source = source
        self._kept: list[Item] = []
        self._coming = islice(source(), _KEPT)

    def walk(self) -> Iterator[Item]:
        # Chained, items are handed on without a call in Python for each.
        return chain.from_iterable(self._chunks())

    def _chunks(self) -> Iterator[Iterable[Item]]:
        position = 0
        # Another walk may have brought more in the meantime.
        while chunk := self._kept[position : position + _CHUNK] or self._more():
            yield chunk
            position += len(chunk)
        if position == _KEPT:
            yield islice(self._source(), _KEPT, None)

    def _more(self) -> list[Item]:
        chunk = list(islice(self._coming, _CHUNK))
        self._kept += chunk
        return chunk


class _Inbox:
    """The messages of one channel in the sender's order, drawn up to the one that is needed."""

    def __init__(self, units: Iterator[int]):
        self._units = units
        self._early: set[int] = set()

    def until(self, wanted: int) -> Sequence[int]:
        """Those to be taken in now."""
        if wanted in self._early:
            self._early.remove(wanted)
            return ()
        units: list[int] = []
        for unit in self._units:
            units.append(unit)
            if unit == wanted:
                break
            self._early.add(unit)
        return units


#: What two replicas exchange of a unit: by peer, the samples, counted within the unit.
_Shared = Mapping[int, tuple[int, int]]


class _Lowering:
    """What all streams have in common."""

    def __init__(
        self,
        order: Order,
        plan: Plan,
        batches: Batches,
        training: bool,
        blocking_reduce: bool,
        rendezvous: bool,
    ):
        self.order, self.plan, self.batches = order, plan, batches
        self.training, self.blocking, self.rendezvous = training, blocking_reduce, rendezvous
        self._overlaps = lru_cache(maxsize=1 << 16)(_overlaps)
        self.unit_size = cache(batches.unit_size)
        self._orders: dict[tuple[int, int, int], _Generated[Compute]] = {}

    def ordered(self, pipeline: int, stage: int, replica: int) -> Iterator[Compute]:
        """The replica's order, which its neighbours walk as well."""
        place = pipeline, stage, replica
        if place not in self._orders:
            self._orders[place] = _Generated(lambda: self.order(*place))
        return self._orders[place].walk()

    def computed(self, pipeline: int, stage: int, replica: int) -> Iterator[Compute]:
        """The replica's order without the units of which it holds nothing."""
        steps, replicas = self.ordered(pipeline, stage, replica), self.plan.stages[stage].replicas
        if (self.unit_size(pipeline) or 0) >= replicas:
            return steps
        batches = self.batches
        return (
            step
            for step in steps
            if step.op not in COMPUTE or batches.is_shared(pipeline, step.unit, replicas, replica)
        )

    def shared(self, place: tuple[int, int, int], stage: int, unit: int) -> _Shared:
        """With which replicas of a neighbouring stage a replica shares samples of a unit."""
        pipeline, here, replica = place
        mine, theirs = self.plan.stages[here].replicas, self.plan.stages[stage].replicas
        size = self.batches.size(pipeline, unit)
        if self.batches.rounds:
            whole = unit % mine == replica and size > 0
            return {unit % theirs: (0, size)} if whole else {}
        return self._overlaps(size, mine, replica, theirs)

    def actions(self, pipeline: int, stage: int, replica: int) -> Iterator[Action]:
        return chain.from_iterable(self._by_step(pipeline, stage, replica))

    def _by_step(self, pipeline: int, stage: int, replica: int) -> Iterator[Sequence[Action]]:
        """The actions that each step of the replica's order becomes."""
        place = pipeline, stage, replica
        before = _Neighbour(self, place, stage - 1, Op.SEND_GRAD, Op.RECV_ACT, Op.F)
        behind = _Neighbour(self, place, stage + 1, Op.SEND_ACT, Op.RECV_GRAD, Op.B)
        recompute = self.plan.stages[stage].recompute and self.training
        alone = self.plan.stages[stage].replicas == 1
        steps = self.computed(pipeline, stage, replica)
        step = next(steps, None)
        held: Sequence[Action] = ()
        while step is not None:
            following = next(steps, None)
            op, unit, version = step
            act = _new(Action, (pipeline, stage, replica, op, unit, None, version, None, None))
            if op is Op.F:
                yield [*before.receives(step), act, *behind.sends(step)]
            elif op is Op.B:
                if recompute:
                    yield [act._replace(op=Op.R)]
                sends = before.sends(step)
                if following is None or following.op is not Op.REDUCE:
                    yield [*behind.receives(step), act, *sends]
                else:
                    yield behind.receives(step)
                    if self.rendezvous:
                        held, sends = sends, []
                    if alone:
                        yield [act, *sends]
                    else:
                        yield self.last_backward(place, act, following, sends)
                    following = next(steps, None)
            elif op is Op.REDUCE:
                yield self.reductions(place, step)
            elif op is Op.STEP:
                yield [act, *held]
                held = ()
            else:
                yield [act]
            step = following

    def last_backward(
        self,
        place: tuple[int, int, int],
        backward: Action,
        reduce: Compute,
        sends: Sequence[Action],
    ) -> Sequence[Action]:
        """The backward that completes an update's gradients, with their reduction."""
        reductions = self.reductions(place, reduce)
        if self.blocking or not self.plan.stages[place[1]].cuts:
            return [backward, *sends, *reductions]
        actions = list[Action]()
        for part, reduction in enumerate(reductions):
            actions.append(backward._replace(part=part))
            if part == len(reductions) - 1:
                actions += sends
            actions.append(reduction)
        return actions

    def reductions(self, place: tuple[int, int, int], reduce: Compute) -> list[Action]:
        stage = self.plan.stages[place[1]]
        if stage.replicas == 1:
            return []
        parts = (None,) if self.blocking else range(len(stage.cuts) + 1)
        _, unit, version = reduce
        return [
            _new(Action, (*place, Op.REDUCE, unit, part, version, None, None)) for part in parts
        ]


#: NamedTuple's own constructor, which sorts its arguments out first, takes twice as long.
_new = tuple.__new__


class _Neighbour:
    """The replicas of the stage before or behind, as one replica exchanges messages with them.

    ``made`` is what they compute before they send.
    """

    def __init__(
        self,
        lowering: _Lowering,
        place: tuple[int, int, int],
        stage: int,
        send: Op,
        receive: Op,
        made: Op,
    ):
        self._lowering, self._place, self._stage = lowering, place, stage
        self._send, self._receive, self._made = send, receive, made
        self._inboxes: dict[int, _Inbox] = {}
        #: What is shared of every unit, if that is always the same.
        self._always: _Shared | None = None
        if not 0 <= stage < len(lowering.plan.stages):
            self._always = {}
        elif lowering.unit_size(place[0]) is not None:
            self._always = lowering.shared(place, stage, 0)

    def _shared(self, unit: int) -> _Shared:
        if self._always is not None:
            return self._always
        return self._lowering.shared(self._place, self._stage, unit)

    def sends(self, step: Compute) -> list[Action]:
        """Of a unit to every replica that shares samples with it."""
        (pipeline, stage, replica), op, (_, unit, version) = self._place, self._send, step
        return [
            _new(Action, (pipeline, stage, replica, op, unit, None, version, peer, both))
            for peer, both in self._shared(unit).items()
        ]

    def receives(self, step: Compute) -> list[Action]:
        """From every such replica, with what it sends before."""
        received: list[Action] = []
        (pipeline, stage, replica), op, (_, wanted, version) = self._place, self._receive, step
        for peer, both in self._shared(wanted).items():
            inbox = self._inboxes.get(peer)
            if inbox is None:
                inbox = self._inboxes[peer] = _Inbox(self._units(peer))
            for unit in inbox.until(wanted):
                # A message taken in early carries no version: its user's is not known here.
                samples, used = (
                    (both, version) if unit == wanted else (self._shared(unit)[peer], None)
                )
                received.append(
                    _new(Action, (pipeline, stage, replica, op, unit, None, used, peer, samples))
                )
        return received

    def _units(self, peer: int) -> Iterator[int]:
        """Those of which a replica sends something here, in its order."""
        made, shared = self._made, self._shared
        for op, unit, _ in self._lowering.ordered(self._place[0], self._stage, peer):
            if op is made and peer in shared(unit):
                yield unit


def _overlaps(size: int, mine: int, replica: int, theirs: int) -> _Shared:
    """Of a unit of that size, between replica ``replica`` of ``mine`` and each of ``theirs``."""
    low, high = share(size, mine, replica)
    found = {}
    for peer, (first, last) in enumerate(split(size, theirs)):
        both = max(low, first), min(high, last)
        if both[0] < both[1]:
            found[peer] = both
    return found
