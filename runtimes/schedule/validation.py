"""Proof that a program is right before anything runs: the rules of :mod:`runtimes.schedule.rules`.

The whole job is walked once with messages that carry no data.  Streams advance by the executor's
own rule, so a program that passes here cannot deadlock there.
"""

from __future__ import annotations

from collections import deque

from runtimes.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Op
from runtimes.schedule.averaging import Averaging
from runtimes.schedule.cursor import Cursor, Unit
from runtimes.schedule.program import Channel, Program, channel
from runtimes.schedule.rendering import marked_grid
from runtimes.schedule.rules import Declared, ScheduleError

__all__ = ["validate"]


def validate(
    program: Program, declared: Declared | None = None, *, sample_bytes: tuple[int, ...] = ()
) -> None:
    """Raise :class:`ScheduleError` at the first action that breaks a rule.

    ``sample_bytes[s]`` is the size of one sample between stages s and s + 1; it only makes
    error messages speak in bytes.
    """
    _DryRun(program, declared, sample_bytes).run()


class _DryRun:
    def __init__(
        self, program: Program, declared: Declared | None, sample_bytes: tuple[int, ...]
    ) -> None:
        self.program, self.declared, self.sample_bytes = program, declared, sample_bytes
        self.plan, self.batches = program.plan, program.batches
        self.cursors = [Cursor(stream, iter(stream)) for stream in program.streams]
        self.channels: dict[Channel, deque[Action]] = {}
        # Per (pipeline, stage): the order in which its first replica reduced, and who is where.
        self.collectives: dict[tuple[int, int], list[tuple[int, int | None]]] = {}
        self.joined: dict[tuple[int, int, int], int] = {}
        self.finished: set[Action] = set()
        self.awaited = {edge for edges in program.after.values() for edge in edges}
        averages = None if declared is None else declared.averages
        self.averaging = Averaging(program, averages, self.fail)

    def fail(self, rule: int, cursor: Cursor, action: Action, what: str) -> ScheduleError:
        grid = marked_grid(self.program, cursor.stream, cursor.position)
        return ScheduleError(rule, cursor.stream.rank, action, what, grid)

    def run(self) -> None:
        for cursor in self.cursors:
            cursor.advance()
            stage, _ = self.plan.place(cursor.stream.rank)
            cursor.update = self.program.next_update(cursor.stream.pipeline, stage, 0)
        moved = True
        while moved:
            moved = False
            for cursor in self.cursors:
                while cursor.head is not None and self.take(cursor, cursor.head):
                    if cursor.head in self.awaited:
                        self.finished.add(cursor.head)
                    cursor.advance()
                    moved = True
        self.nothing_left()

    def take(self, cursor: Cursor, action: Action) -> bool:
        """Perform the action, or return False if it must wait."""
        self.belongs(cursor, action)
        if any(edge not in self.finished for edge in self.program.after.get(action, ())):
            return False
        if action.op in RECEIVES:
            return self.receive(cursor, action)
        if action.op in SENDS:
            return self.send(cursor, action)
        if action.op == Op.F:
            self.forward(cursor, action)
        elif action.op in COMPUTE:
            self.backward(cursor, action)
        elif action.op == Op.REDUCE:
            self.reduce(cursor, action)
        elif action.op == Op.NORM:
            return self.norm(cursor, action)
        elif action.op == Op.STEP:
            return self.step(cursor, action)
        return action.op != Op.AVERAGE or self.averaging.average(cursor, action)

    def belongs(self, cursor: Cursor, action: Action) -> None:
        stages = self.plan.stages
        if (
            action.stage >= len(stages)
            or action.replica >= stages[action.stage].replicas
            or self.plan.rank(action.stage, action.replica) != cursor.stream.rank
            or action.pipeline != cursor.stream.pipeline
        ):
            raise self.fail(1, cursor, action, "this stream is not of that stage and replica")
        if action.op in COMPUTE | SENDS | RECEIVES:
            size = self.batches.size(action.pipeline, action.unit)
            low, high = (0, 0) if size == 0 else self.own(action)
            if low == high:
                raise self.fail(1, cursor, action, "the unit is empty here")
        elif action.unit >= (updates := self.program.updates(action.stage)):
            raise self.fail(1, cursor, action, f"only {updates} updates exist")

    def own(self, action: Action) -> tuple[int, int]:
        return self.program.share(action.pipeline, action.stage, action.replica, action.unit)

    def bytes_of(self, action: Action) -> str:
        assert action.interval is not None
        samples = action.interval[1] - action.interval[0]
        boundary = action.stage - (action.op in (Op.RECV_ACT, Op.SEND_GRAD))
        if boundary >= len(self.sample_bytes):
            return f"{samples} samples"
        return f"{samples * self.sample_bytes[boundary]:,} bytes ({samples} samples)"

    def message(self, cursor: Cursor, action: Action) -> Channel:
        ahead = action.op in (Op.SEND_ACT, Op.RECV_GRAD)
        stage = action.stage + (1 if ahead else -1)
        if action.peer is None or action.interval is None:
            raise self.fail(1, cursor, action, "a message needs a peer and an interval")
        if not 0 <= stage < len(self.plan.stages):
            raise self.fail(1, cursor, action, f"there is no stage {stage} to exchange with")
        if action.peer >= self.plan.stages[stage].replicas:
            raise self.fail(1, cursor, action, f"stage {stage} has no replica {action.peer}")
        low, high = self.own(action)
        if not low <= action.interval[0] < action.interval[1] <= high:
            raise self.fail(
                3, cursor, action, f"the message leaves this replica's samples [{low}:{high}]"
            )
        return channel(action, self.plan)

    def send(self, cursor: Cursor, action: Action) -> bool:
        key = self.message(cursor, action)
        unit = cursor.units.get(action.unit, Unit())
        if action.op == Op.SEND_ACT:
            sendable = unit.forward
        else:
            update = self.program.update(action.stage, action.unit)
            sendable = action.unit in cursor.done.get(update, cursor.stepped)
        if not sendable:
            producer = "F" if action.op == Op.SEND_ACT else "B"
            raise self.fail(5, cursor, action, f"sent before the {producer} it carries")
        waits = self.program.rendezvous and action.op == Op.SEND_ACT
        if waits and not self.posted(key):
            return False
        self.channels.setdefault(key, deque()).append(action)
        return True

    def posted(self, key: Channel) -> bool:
        """Whether the receive of a rendezvous is posted, as Program.rendezvous has it."""
        for cursor in self.cursors:
            if (cursor.stream.rank, cursor.stream.pipeline) != (key.receiver, key.pipeline):
                continue
            for action in cursor.upcoming():
                if action.op == Op.RECV_ACT and channel(action, self.plan) == key:
                    return True
                if action.op not in RECEIVES | {Op.R, Op.SEND_GRAD}:
                    break
        return False

    def receive(self, cursor: Cursor, action: Action) -> bool:
        key = self.message(cursor, action)
        queue = self.channels.get(key)
        if not queue:
            return False
        sent = queue.popleft()
        if sent.unit != action.unit:
            raise self.fail(
                4, cursor, action, f"crossed: rank {key.sender} sends {sent} next on this channel"
            )
        if sent.interval != action.interval:
            raise self.fail(
                3,
                cursor,
                action,
                f"expects {self.bytes_of(action)}, but rank {key.sender} sends "
                f"{self.bytes_of(sent)} ({sent})",
            )
        assert action.interval is not None
        unit = cursor.units.setdefault(action.unit, Unit())
        unit.received.setdefault(action.op, []).append(action.interval)
        return True

    def needs(self, cursor: Cursor, action: Action, op: Op, unit: Unit) -> None:
        neighbour = action.stage - 1 if op == Op.RECV_ACT else action.stage + 1
        if not 0 <= neighbour < len(self.plan.stages):
            return
        low, high = self.own(action)
        at = low
        for first, last in sorted(unit.received.get(op, [])):
            if first < at:
                raise self.fail(5, cursor, action, f"{op} of sample {first} came twice before it")
            if first > at:
                break
            at = last
        if at != high:
            raise self.fail(
                5,
                cursor,
                action,
                f"{op} of {at - low} of its {high - low} samples came before it: "
                "a receive is missing",
            )

    def forward(self, cursor: Cursor, action: Action) -> None:
        unit = cursor.units.setdefault(action.unit, Unit())
        update = self.program.update(action.stage, action.unit)
        if unit.forward or action.unit in cursor.done.get(update, ()):
            raise self.fail(2, cursor, action, "a second forward of this unit")
        self.needs(cursor, action, Op.RECV_ACT, unit)
        if not self.program.training:
            unit.forward = True
            cursor.done.setdefault(update, set()).add(action.unit)
            return
        self.averaging.forward(cursor, action, update)
        latest = self.program.carried + cursor.steps
        if action.version is None or not 0 <= action.version <= latest:
            raise self.fail(8, cursor, action, f"only versions up to @{latest} exist at this point")
        if self.declared is not None:
            delay = self.declared.delay(action.stage, update)
            between = range(cursor.update, update)
            steps = sum(self.program.steps(action.pipeline, action.stage, u) for u in between)
            age = latest + steps - action.version
            if age != delay:
                raise self.fail(
                    8,
                    cursor,
                    action,
                    f"its gradient is {age} updates old at update {update}, declared is {delay}",
                )
        unit.forward, unit.version = True, action.version
        cursor.in_flight += 1
        if self.declared is not None:
            bound = self.declared.in_flight(action.stage)
            if cursor.in_flight > bound:
                raise self.fail(
                    9, cursor, action, f"{cursor.in_flight} units in flight, declared are {bound}"
                )

    def backward(self, cursor: Cursor, action: Action) -> None:
        unit = cursor.units.get(action.unit)
        update = self.program.update(action.stage, action.unit)
        if action.unit in cursor.done.get(update, ()):
            raise self.fail(2, cursor, action, "a second backward of this unit")
        if unit is None or not unit.forward:
            raise self.fail(2, cursor, action, f"{action.op} before its F")
        if action.version != unit.version:
            raise self.fail(7, cursor, action, f"its forward used version @{unit.version}")
        stage = self.plan.stages[action.stage]
        if action.op == Op.R:
            if not stage.recompute or unit.recomputed:
                raise self.fail(2, cursor, action, "this recomputation is not asked for")
            unit.recomputed = True
            return
        if stage.recompute and not unit.recomputed:
            raise self.fail(2, cursor, action, "B before its R: the stage recomputes")
        self.needs(cursor, action, Op.RECV_GRAD, unit)
        parts = len(stage.parts)
        if action.part is not None and action.part != unit.parts:
            raise self.fail(2, cursor, action, f"part {unit.parts} of this backward is next")
        if action.part is None and unit.parts:
            raise self.fail(2, cursor, action, f"part {unit.parts} of this backward is next")
        unit.parts = parts if action.part is None else unit.parts + 1
        if unit.parts == parts:
            cursor.done.setdefault(update, set()).add(action.unit)
            cursor.versions[update] = unit.version
            cursor.in_flight -= 1
            del cursor.units[action.unit]

    def reduce(self, cursor: Cursor, action: Action) -> None:
        stage = self.plan.stages[action.stage]
        parts = cursor.reduced.setdefault(action.unit, [])
        if stage.replicas == 1:
            raise self.fail(11, cursor, action, "there is no other replica to reduce with")
        twice = action.part in parts or None in parts or (action.part is None and parts)
        if twice or (action.part is not None and action.part >= len(stage.parts)):
            raise self.fail(11, cursor, action, "this part does not exist or is reduced twice")
        used = cursor.versions.get(action.unit)
        if used is not None and action.version != used:
            raise self.fail(
                11, cursor, action, f"the gradients of this update are those of version @{used}"
            )
        if not self.complete(cursor, action, action.part):
            raise self.fail(11, cursor, action, "reduced before its backward")
        parts.append(action.part)
        key = (action.pipeline, action.stage)
        order = self.collectives.setdefault(key, [])
        mine = self.joined.get((*key, action.replica), 0)
        this = (action.unit, action.part)
        if mine == len(order):
            order.append(this)
        elif order[mine] != this:
            update, part = order[mine]
            name = f"update {update}" + ("" if part is None else f" part {part}")
            raise self.fail(11, cursor, action, f"another replica reduces {name} at this place")
        self.joined[(*key, action.replica)] = mine + 1

    def complete(self, cursor: Cursor, action: Action, part: int | None = None) -> bool:
        """Whether this replica's backwards of the update are done, at least down to ``part``."""
        done = cursor.done.get(action.unit, set())
        for unit in self.program.units(action.pipeline, action.stage, action.unit):
            low, high = self.program.share(action.pipeline, action.stage, action.replica, unit)
            if low == high or unit in done:
                continue
            begun = cursor.units.get(unit)
            if part is None or begun is None or begun.parts <= part:
                return False
        return True

    def closed(self, cursor: Cursor, action: Action) -> bool:
        """Whether the update's gradients are there and reduced, or False: other replicas have to
        join in first."""
        if not self.complete(cursor, action):
            raise self.fail(10, cursor, action, "a sample of the batch has no gradient yet")
        stage = self.plan.stages[action.stage]
        if stage.replicas == 1 or action.unit in cursor.normed:
            return True
        parts = cursor.reduced.get(action.unit, [])
        if parts != [None] and set(parts) != set(range(len(stage.parts))):
            raise self.fail(11, cursor, action, f"a {action.op} before its gradients are reduced")
        key = (action.pipeline, action.stage)
        mine = self.joined[(*key, action.replica)]
        return all(self.joined.get((*key, j), 0) >= mine for j in range(stage.replicas))

    def norm(self, cursor: Cursor, action: Action) -> bool:
        if action.unit in cursor.normed:
            raise self.fail(12, cursor, action, "a second norm of this update")
        if action.unit < cursor.update:
            raise self.fail(12, cursor, action, "this update's step came before it")
        if not self.closed(cursor, action):
            return False
        cursor.normed.add(action.unit)
        return True

    def step(self, cursor: Cursor, action: Action) -> bool:
        latest = self.program.carried + cursor.steps
        if action.unit != cursor.update or action.version != latest + 1:
            raise self.fail(8, cursor, action, f"update {cursor.update} to @{latest + 1} is next")
        if not self.closed(cursor, action):
            return False
        others = [c for c in self.cursors if c.stream.pipeline == cursor.stream.pipeline]
        if any(action.unit in other.normed for other in others):
            if action.unit not in cursor.normed:
                raise self.fail(12, cursor, action, "other ranks take this update's norm")
            if not all(action.unit in other.normed for other in others):
                return False
        cursor.steps += 1
        cursor.update = self.program.next_update(action.pipeline, action.stage, action.unit + 1)
        self.averaging.stepped(cursor, action)
        cursor.stepped = cursor.done.pop(action.unit, set())
        cursor.reduced.pop(action.unit, None)
        cursor.versions.pop(action.unit, None)
        return True

    def nothing_left(self) -> None:
        """Everything ran: nothing waits, nothing was sent in vain, no update is missing."""
        stuck = [cursor for cursor in self.cursors if cursor.head is not None]
        if stuck:
            self.explain(stuck)
        for cursor in self.cursors:
            for action in cursor.stream:
                if action.op in SENDS and action in self.channels.get(
                    channel(action, self.plan), ()
                ):
                    raise self.fail(3, cursor, action, "sent, but no receive takes it in")
            stage, replica = self.plan.place(cursor.stream.rank)
            if self.program.training and cursor.update != self.program.updates(stage):
                missing = Action(cursor.stream.pipeline, stage, replica, Op.STEP, cursor.update)
                raise self.fail(10, cursor, missing, "the stream ends without this step")
        self.norms_of_all()
        self.averaging.nothing_left(self.cursors)
        if not self.program.training:
            self.all_evaluated()

    def norms_of_all(self) -> None:
        """No rank has stepped an update without the norm that another one takes."""
        for cursor in self.cursors:
            others = (c for c in self.cursors if c.stream.pipeline == cursor.stream.pipeline)
            left_out = set[int]().union(*(c.normed for c in others)) - cursor.normed
            stepped = [update for update in left_out if update < cursor.update]
            if stepped:
                stage, replica = self.plan.place(cursor.stream.rank)
                place = (cursor.stream.pipeline, stage, replica)
                missing = Action(*place, Op.NORM, min(stepped))
                raise self.fail(12, cursor, missing, "other ranks take this update's norm")

    def explain(self, stuck: list[Cursor]) -> None:
        """Name the cause of a standstill: a send that never comes, or a circle of waits."""
        for cursor in stuck:
            action = cursor.head
            assert action is not None
            if action.op in RECEIVES and not self.is_sent(action):
                sender = channel(action, self.plan).sender
                raise self.fail(3, cursor, action, f"rank {sender} has no send for it")
        self.norms_of_all()
        waits = "; ".join(f"rank {cursor.stream.rank} at {cursor.head}" for cursor in stuck)
        action = stuck[0].head
        assert action is not None
        raise self.fail(6, stuck[0], action, f"deadlock, all wait: {waits}")

    def is_sent(self, receive: Action) -> bool:
        key = channel(receive, self.plan)
        return any(
            action.op in SENDS and action.unit == receive.unit and channel(action, self.plan) == key
            for stream in self.program.of_rank(key.sender)
            for action in stream
        )

    def all_evaluated(self) -> None:
        for cursor in self.cursors:
            stage, replica = self.plan.place(cursor.stream.rank)
            pipeline = cursor.stream.pipeline
            for update in range(self.program.updates(stage)):
                for unit in self.program.units(pipeline, stage, update):
                    low, high = self.program.share(pipeline, stage, replica, unit)
                    if low < high and unit not in cursor.done.get(update, ()):
                        action = Action(pipeline, stage, replica, Op.F, unit)
                        raise self.fail(10, cursor, action, "these samples are never evaluated")
