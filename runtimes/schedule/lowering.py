"""From compute orders to a program: communication, recomputation, parts and reductions.

Each stream is generated lazily from its own order and those of its neighbours, so a program
of millions of actions costs only what walks it, and its first actions are generated only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from runtimes.plan import Plan
from runtimes.schedule.action import Action, Op
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
) -> Program:
    """Insert what the compute orders leave out; ``rendezvous`` and ``carried`` as of Program.

    - The messages of a channel follow the *sender's* order: a receiver that computes in another
      order takes a message in when its turn comes, so sends and receives can never cross.
    - Units of which a replica holds no sample are dropped from its stream.
    - The backward before a REDUCE is cut into the plan's parts, each reduced while the next is
      computed; the input's gradient leaves before the last reduction starts.  With
      ``blocking_reduce`` the backward stays whole and one blocking reduction follows it.
    - A stage that recomputes does so (R) before it waits for the gradient.
    - With ``rendezvous`` a gradient leaves only after the step that follows its backward.
    """

    def stream(pipeline: int, stage: int, replica: int) -> Stream:
        lowered = _Lowering(order, plan, batches, training, blocking_reduce, rendezvous)
        rank = plan.rank(stage, replica)
        generated = _Generated(lambda: lowered.actions(pipeline, stage, replica))
        return Stream(rank, pipeline, generated.walk)

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
    )


#: Actions of a stream that are kept: about 1 MB, enough for hundreds of batches.
_KEPT = 4096


class _Generated:
    """A stream that is walked more than once: a transport looks ahead of its worker, and segments
    of the same batches have the same program.  What lies beyond the actions kept is generated anew
    by each walk."""

    def __init__(self, source: Callable[[], Iterator[Action]]):
        self._source = source
        self._kept: list[Action] = []
        self._coming = islice(source(), _KEPT)

    def walk(self) -> Iterator[Action]:
        position = 0
        while True:
            # Another walk may have brought more in the meantime.
            while position < len(self._kept):
                yield self._kept[position]
                position += 1
            action = next(self._coming, None)
            if action is None:
                break
            self._kept.append(action)
        if position == _KEPT:
            yield from islice(self._source(), _KEPT, None)


class _Inbox:
    """The messages of one channel in the sender's order, drawn up to the one that is needed."""

    def __init__(self, units: Iterator[int]):
        self._units = units
        self._early: set[int] = set()

    def until(self, wanted: int) -> Iterator[int]:
        if wanted in self._early:
            self._early.remove(wanted)
            return
        for unit in self._units:
            yield unit
            if unit == wanted:
                return
            self._early.add(unit)


class _Lowering:
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

    def share(self, pipeline: int, stage: int, replica: int, unit: int) -> tuple[int, int]:
        replicas = self.plan.stages[stage].replicas
        return self.batches.share(pipeline, unit, replicas, replica)

    def computed(self, pipeline: int, stage: int, replica: int) -> Iterator[Compute]:
        """The replica's order without the units of which it holds nothing."""
        for step in self.order(pipeline, stage, replica):
            if step.op in (Op.F, Op.B):
                low, high = self.share(pipeline, stage, replica, step.unit)
                if low == high:
                    continue
            yield step

    def overlap(
        self, pipeline: int, here: tuple[int, int], there: tuple[int, int], unit: int
    ) -> tuple[int, int] | None:
        low, high = self.share(pipeline, *here, unit)
        first, last = self.share(pipeline, *there, unit)
        both = max(low, first), min(high, last)
        return both if both[0] < both[1] else None

    def inboxes(self, pipeline: int, here: tuple[int, int], stage: int, op: Op) -> list[_Inbox]:
        """One for each replica of a neighbouring stage, whose ``op`` produces the messages."""

        def units(replica: int) -> Iterator[int]:
            for step in self.computed(pipeline, stage, replica):
                if step.op == op and self.overlap(pipeline, here, (stage, replica), step.unit):
                    yield step.unit

        if not 0 <= stage < len(self.plan.stages):
            return []
        return [_Inbox(units(replica)) for replica in range(self.plan.stages[stage].replicas)]

    def messages(
        self, op: Op, place: tuple[int, int, int], stage: int, step: Compute
    ) -> Iterator[Action]:
        """Sends of a unit to every replica of a neighbouring stage that shares samples with it."""
        pipeline, *here = place
        if not 0 <= stage < len(self.plan.stages):
            return
        for peer in range(self.plan.stages[stage].replicas):
            both = self.overlap(pipeline, (here[0], here[1]), (stage, peer), step.unit)
            if both:
                yield Action(*place, op, step.unit, None, step.version, peer, both)

    def receives(
        self,
        op: Op,
        place: tuple[int, int, int],
        stage: int,
        inboxes: Iterable[_Inbox],
        step: Compute,
    ) -> Iterator[Action]:
        pipeline, *here = place
        for peer, inbox in enumerate(inboxes):
            if not self.overlap(pipeline, (here[0], here[1]), (stage, peer), step.unit):
                continue
            for unit in inbox.until(step.unit):
                both = self.overlap(pipeline, (here[0], here[1]), (stage, peer), unit)
                # A message taken in early carries no version: its user's is not known here.
                version = step.version if unit == step.unit else None
                yield Action(*place, op, unit, None, version, peer, both)

    def actions(self, pipeline: int, stage: int, replica: int) -> Iterator[Action]:
        place = (pipeline, stage, replica)
        here = (stage, replica)
        activations = self.inboxes(pipeline, here, stage - 1, Op.F)
        gradients = self.inboxes(pipeline, here, stage + 1, Op.B)
        recompute = self.plan.stages[stage].recompute and self.training
        steps = self.computed(pipeline, stage, replica)
        step = next(steps, None)
        held: list[Action] = []
        while step is not None:
            following = next(steps, None)
            if step.op == Op.F:
                yield from self.receives(Op.RECV_ACT, place, stage - 1, activations, step)
                yield Action(*place, Op.F, step.unit, None, step.version)
                yield from self.messages(Op.SEND_ACT, place, stage + 1, step)
            elif step.op == Op.B:
                if recompute:
                    yield Action(*place, Op.R, step.unit, None, step.version)
                yield from self.receives(Op.RECV_GRAD, place, stage + 1, gradients, step)
                if following is not None and following.op == Op.REDUCE:
                    sends = list(self.messages(Op.SEND_GRAD, place, stage - 1, step))
                    if self.rendezvous:
                        held, sends = sends, []
                    yield from self.last_backward(place, step, following, sends)
                    following = next(steps, None)
                else:
                    yield Action(*place, Op.B, step.unit, None, step.version)
                    yield from self.messages(Op.SEND_GRAD, place, stage - 1, step)
            elif step.op == Op.REDUCE:
                yield from self.reductions(place, step)
            else:
                yield Action(*place, step.op, step.unit, None, step.version)
                if step.op == Op.STEP:
                    yield from held
                    held = []
            step = following

    def last_backward(
        self,
        place: tuple[int, int, int],
        backward: Compute,
        reduce: Compute,
        sends: Iterable[Action],
    ) -> Iterator[Action]:
        """The backward that completes an update's gradients, with their reduction."""
        stage = self.plan.stages[place[1]]
        if stage.replicas == 1 or self.blocking or not stage.cuts:
            yield Action(*place, Op.B, backward.unit, None, backward.version)
            yield from sends
            yield from self.reductions(place, reduce)
            return
        last = len(stage.parts) - 1
        for part in range(len(stage.parts)):
            yield Action(*place, Op.B, backward.unit, part, backward.version)
            if part == last:
                yield from sends
            yield Action(*place, Op.REDUCE, reduce.unit, part, reduce.version)

    def reductions(self, place: tuple[int, int, int], reduce: Compute) -> Iterator[Action]:
        stage = self.plan.stages[place[1]]
        if stage.replicas == 1:
            return
        parts = [None] if self.blocking else list(range(len(stage.parts)))
        for part in parts:
            yield Action(*place, Op.REDUCE, reduce.unit, part, reduce.version)
