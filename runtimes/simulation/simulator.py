"""A program executed on a cluster without hardware: discrete events in the order of time.

A rank does what ``runtimes.execution.worker`` does: of its streams the most urgent that can go on
does, one action at a time.

F, B, R, STEP  take the device for their cost.
AVERAGE        begins as of ``runtimes.schedule.joining``.  The first of a rank takes the device for
               the cost of all its copies, as that is when they are tied; alone each takes its own.
sends          are issued, and travel (``runtimes.simulation.network``) while the rank goes on.  As
               of ``Program.rendezvous`` a SEND_ACT is issued when its receive is posted, and ends
               when the message has arrived.
receives       end when their message has arrived.
REDUCE         of a part begins when all replicas have issued it, and only NORM and STEP of its
               update wait for it; without a part the rank waits for its end.
NORM           begins when all ranks of the pipeline have issued it, and its STEP waits for it.

Every action takes, besides, its op's overhead of the device: the cluster's, or else the costs'.
What transfers steal of a device's time makes it compute longer; while idle it makes up for that.

A list schedule has anomalies (Graham 1969): where the times decide which of two transfers passes a
port first, or which stream goes on first, a shorter time may lead to a longer whole.  Where they do
not (one stream a rank, nothing stolen, and links on which no transfer ever queues for another one,
or those of one channel for each other), every time is a maximum over sums of costs, so the makespan
never falls when a cost grows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from runtimes.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Op
from runtimes.schedule.choice import in_turn
from runtimes.schedule.joining import Joining
from runtimes.schedule.posting import posting
from runtimes.schedule.program import Channel, Program, channel
from runtimes.simulation.agenda import Agenda
from runtimes.simulation.cluster import Cluster, Port
from runtimes.simulation.collectives import Collectives
from runtimes.simulation.costs import Costs, checked
from runtimes.simulation.network import Message, Network
from runtimes.simulation.state import Head, Lane, Rank, Sent, Timed

__all__ = ["Simulation", "Timed", "simulate"]

#: What takes the device for more than an overhead, and what may have to wait for others.
_BUSY = COMPUTE | {Op.STEP, Op.AVERAGE}
_WAITING = RECEIVES | {Op.NORM, Op.STEP, Op.AVERAGE}
#: Actions that a deadlock names.
_NAMED = 8


@dataclass(frozen=True)
class Simulation:
    """``end_seconds[r]``: when rank r has done all.  ``parts[r]``: its seconds by kind, as of
    ``runtimes.execution.trace``; they add up to the makespan, since a rank that is done is idle.
    ``timed[r]``: its actions in the order in which they ended, if they were kept."""

    program: Program
    makespan_seconds: float
    end_seconds: tuple[float, ...]
    parts: tuple[dict[str, float], ...]
    port_bytes: dict[Port, float]
    timed: tuple[list[Timed], ...] = ()


def simulate(program: Program, cluster: Cluster, costs: Costs, *, keep: bool = True) -> Simulation:
    """ValueError for a cluster that is too small, for costs that are no times, and, naming the
    actions that wait, for a program that cannot go on."""
    cluster.check(program.plan.world_size)
    return _Simulator(program, cluster, costs, keep).run()


class _Simulator:
    def __init__(self, program: Program, cluster: Cluster, costs: Costs, keep: bool):
        self.program, self.plan, self.keep = program, program.plan, keep
        self.costs, self.agenda = costs, Agenda()
        self.network: Network[Sent] = Network(cluster, self.agenda, self._arrives, self._steals)
        self.overheads = {
            op: checked(
                f"the overhead of {op}",
                cluster.action_seconds.get(op.value, costs.overhead_seconds(op)),
            )
            for op in Op
        }
        self.lanes: dict[Channel, Lane] = {}
        self.collectives = Collectives(program.plan, cluster, costs, self.network)
        #: Neither edges nor rendezvous: then only what is _WAITING can be held up.
        self.simple = not program.after and not program.rendezvous
        self.done: set[Action] = set()
        #: Ranks of the actions that wait for one, by the edges of the program.
        self.dependents: dict[Action, list[Rank]] = defaultdict(list)
        places = {
            self.plan.rank(stage, replica): (stage, replica)
            for stage, planned in enumerate(self.plan.stages)
            for replica in range(planned.replicas)
        }
        self.ranks = [
            Rank(number, *places[number], Joining(program, number)) for number in range(len(places))
        ]

    def run(self) -> Simulation:
        for stream in self.program.streams:
            rank = self.ranks[stream.rank]
            following = posting(stream, rendezvous=True) if self.program.rendezvous else None
            actions = iter(stream) if self.program.rendezvous else stream.once()
            rank.heads.append(Head(actions, following, self._share(rank, stream.pipeline)))
        for action, edges in self.program.after.items():
            for edge in edges:
                rank = self.ranks[self.plan.rank(action.stage, action.replica)]
                self.dependents[edge].append(rank)
        for rank in self.ranks:
            for head in rank.heads:
                self._next(head)
                if head.posting is not None:
                    self._post(head, head.posting.begin(), 0.0)
            self.agenda.at(0.0, self._wake, rank)
        self.agenda.run()
        self._check_all_done()
        makespan = max((rank.since for rank in self.ranks), default=0.0)
        for rank in self.ranks:
            rank.parts["idle"] += makespan - rank.since
        return Simulation(
            self.program,
            makespan,
            tuple(rank.since for rank in self.ranks),
            tuple(rank.parts for rank in self.ranks),
            self.network.port_bytes(),
            tuple(rank.timed for rank in self.ranks) if self.keep else (),
        )

    def _share(self, rank: Rank, pipeline: int) -> int | None:
        """Samples of every unit that the rank computes, if they are always as many."""
        if self.program.batches.unit_size(pipeline) is None:
            return None
        low, high = self.program.share(pipeline, rank.stage, rank.replica, 0)
        return high - low

    def _check_all_done(self) -> None:
        waiting = [
            f"rank {rank.number} at {head.action}"
            for rank in self.ranks
            for head in rank.heads
            if head.action is not None
        ]
        if waiting:
            named = "; ".join(waiting[:_NAMED])
            more = f"; and {len(waiting) - _NAMED} more" if len(waiting) > _NAMED else ""
            raise ValueError(f"the program is in a deadlock, all wait: {named}{more}")

    # -- a rank's way through its streams --------------------------------------------------------

    def _next(self, head: Head) -> None:
        """The stream's next action comes up."""
        action = head.action = next(head.actions, None)
        head.come = False
        if action is None or action.peer is None:
            head.lane = None
        else:
            head.lane = head.lanes.get((action.op, action.peer)) or self._lane(head, action)
        head.at_once = self.simple and action is not None and action.op not in _WAITING

    def _wake(self, rank: Rank, now: float) -> None:
        if rank.waits:
            self._go_on(rank, now)

    def _go_on(self, rank: Rank, now: float) -> None:
        """The rank is free: it performs what is ready until it is busy, blocked, or has to wait."""
        while True:
            for head in in_turn(rank.heads, self.program.batches):
                action = head.action
                if action is not None and (head.at_once or self._ready(rank, head, action, now)):
                    break
            else:
                rank.waits = True
                return
            rank.waits, rank.current = False, head
            if now > rank.since:
                self._waited(rank, head, action, now)
            seconds = self.overheads[action.op]
            if seconds or action.op in _BUSY:
                seconds = self._seconds(rank, head, action)
            if seconds > 0:
                if rank.debt:
                    rank.settle(now)
                rank.busy = True
                self.agenda.at(now + seconds, self._finish, rank)
                return
            if not self._perform(rank, head, action, now):
                return

    def _finish(self, rank: Rank, now: float) -> None:
        """The rank has been busy long enough, but for what was stolen meanwhile."""
        if rank.debt:
            stolen, rank.debt = rank.debt, 0.0
            rank.parts["interference"] += stolen
            self.agenda.at(now + stolen, self._finish, rank)
            return
        rank.busy, rank.debt_at = False, now
        head = rank.current
        assert head is not None
        assert head.action is not None
        if self._perform(rank, head, head.action, now):
            self._go_on(rank, now)

    def _release(self, rank: Rank, now: float) -> None:
        """What the rank is blocked in has ended."""
        head = rank.current
        assert head is not None
        action = head.action
        assert action is not None
        blocked = now - rank.blocked_at
        rank.waited += blocked
        rank.parts["communication" if action.op in SENDS else "reduce"] += blocked
        self._through(rank, head, action, now)
        self._go_on(rank, now)

    def _ready(self, rank: Rank, head: Head, action: Action, now: float) -> bool:
        """Whether the action can begin; if it is known when it can, the rank is woken then."""
        if self.dependents and not self.done.issuperset(self.program.after.get(action, ())):
            return False
        lane, op = head.lane, action.op
        if lane is not None:
            if head.posting is not None and not head.come:
                head.come = True
                self._post(head, head.posting.before(action), now)
            if op is Op.SEND_ACT or op is Op.SEND_GRAD:
                return True
            ready = lane.arrivals[0][0] if lane.arrivals else math.inf
        elif op is Op.STEP or op is Op.NORM:
            ready = self._joined(rank, action)
        elif op is Op.AVERAGE:
            return rank.joining.ready(action)
        else:
            return True
        if now < ready < math.inf:
            self.agenda.at(ready, self._wake, rank)
        return ready <= now

    def _joined(self, rank: Rank, action: Action) -> float:
        """When all reductions of the update, and its norm, will have ended."""
        update = action.pipeline, action.unit
        joints = rank.reductions.get(update, [])
        if update in rank.norms:
            joints = [*joints, rank.norms[update]]
        if len(joints) == 1:
            return joints[0].ends
        return max((joint.ends for joint in joints), default=0.0)

    def _waited(self, rank: Rank, head: Head, action: Action, now: float) -> None:
        """The rank has waited for the action until now."""
        rank.waited = waited = now - rank.since
        op, parts = action.op, rank.parts
        if op in RECEIVES:
            assert head.lane is not None
            sent = head.lane.arrivals[0][1].began
            idle = min(max(sent - rank.since, 0.0), waited)
            parts["idle"] += idle
            parts["communication"] += waited - idle
        else:
            parts["reduce" if op in (Op.NORM, Op.STEP) else "idle"] += waited

    def _seconds(self, rank: Rank, head: Head, action: Action) -> float:
        """What the action takes of the device."""
        op, parts = action.op, rank.parts
        seconds = self.overheads[op]
        if seconds:
            parts["overhead"] += seconds
        if op in _BUSY:
            cost = self._cost(rank, head, action)
            parts["compute" if op in COMPUTE else "optimizer"] += cost
            seconds += cost
        return seconds

    def _cost(self, rank: Rank, head: Head, action: Action) -> float:
        """Of a computation, step or averaging."""
        if action.op is Op.AVERAGE:
            return self._averaging(rank, action)
        samples = 0 if action.op is Op.STEP else head.samples
        if samples is None:
            low, high = self.program.share(action.pipeline, rank.stage, rank.replica, action.unit)
            samples = high - low
        key = action.op, action.part, samples
        seconds = rank.seconds.get(key)
        if seconds is None:
            if action.op is Op.STEP:
                seconds = self.costs.step_seconds(rank.stage, rank.replica)
            else:
                seconds = self.costs.compute_seconds(
                    action.op, rank.stage, rank.replica, action.part, samples
                )
            rank.seconds[key] = checked(str(action), seconds)
        return seconds

    def _averaging(self, rank: Rank, action: Action) -> float:
        copies = len(rank.heads) if self.program.joint_average else 1
        if self.program.joint_average and action.unit <= rank.averaged:
            copies = 0
        rank.averaged = action.unit
        if not copies:
            return 0.0
        seconds = self.costs.average_seconds(rank.stage, rank.replica, copies)
        return checked(str(action), seconds)

    def _perform(self, rank: Rank, head: Head, action: Action, now: float) -> bool:
        """What the action does when it has had its time; False if the rank is blocked in it."""
        op, lane = action.op, head.lane
        through = True
        if lane is not None:
            if op in RECEIVES:
                self._take(lane, action)
            else:
                through = self._send(rank, lane, action, now)
        elif op is Op.REDUCE or op is Op.NORM:
            through = self._join(rank, action, now)
        elif op is Op.STEP:
            rank.reductions.pop((action.pipeline, action.unit), None)
            rank.norms.pop((action.pipeline, action.unit), None)
            rank.joining.made(action)
        if through:
            self._through(rank, head, action, now)
        else:
            rank.blocked_at = now
        return through

    def _through(self, rank: Rank, head: Head, action: Action, now: float) -> None:
        if self.keep:
            rank.timed.append(Timed(action, rank.since, now, rank.waited))
        rank.since, rank.waited = now, 0.0
        if self.dependents and action in self.dependents:
            self.done.add(action)
            for other in self.dependents[action]:
                self.agenda.at(now, self._wake, other)
        if head.posting is not None and head.lane is not None:
            self._post(head, head.posting.after(action), now)
        self._next(head)

    # -- messages --------------------------------------------------------------------------------

    def _lane(self, head: Head, action: Action) -> Lane:
        """Of a message of the stream; both of its ends know the same one."""
        key = channel(action, self.plan)
        lane = self.lanes.get(key)
        if lane is None:
            receiver = self.ranks[key.receiver]
            boundary = receiver.stage - (key.kind == "ACT")
            size = checked("a message", self.costs.message_bytes(boundary), "bytes")
            route = self.network.route(key.sender, key.receiver)
            lane = self.lanes[key] = Lane(route, receiver, size)
        head.lanes[action.op, action.peer] = lane
        return lane

    def _post(self, head: Head, receives: Iterable[Action], now: float) -> None:
        """Receives of activations, for which sends may wait."""
        for action in receives:
            if action.op is Op.RECV_ACT:
                lane = self._lane(head, action)
                lane.posted += 1
                if lane.held is not None:
                    sent, lane.held = lane.held, None
                    self._issue(sent, now)

    def _send(self, rank: Rank, lane: Lane, action: Action, now: float) -> bool:
        assert action.interval is not None
        low, high = action.interval
        waits = self.program.rendezvous and action.op is Op.SEND_ACT
        began = rank.since + rank.waited
        sent = Sent(lane, action.unit, high - low, began, rank if waits else None)
        if waits and not lane.posted:
            lane.held = sent
        else:
            self._issue(sent, now)
        return not waits

    def _issue(self, sent: Sent, now: float) -> None:
        lane = sent.lane
        if sent.blocked is not None:
            lane.posted -= 1
        self.network.send(lane.route, lane.sample_bytes * sent.samples, sent, now)

    def _arrives(self, message: Message[Sent], time: float) -> None:
        sent = message.subject
        lane = sent.lane
        lane.arrivals.append((time, sent))
        if lane.receiver.waits:
            self.agenda.at(time, self._wake, lane.receiver)
        if sent.blocked is not None:
            self.agenda.at(time, self._release, sent.blocked)

    def _take(self, lane: Lane, action: Action) -> None:
        _, sent = lane.arrivals.popleft()
        assert action.interval is not None
        if sent.unit != action.unit or sent.samples != action.interval[1] - action.interval[0]:
            raise ValueError(
                f"{action} meets {sent.samples} samples of unit {sent.unit}: messages cross"
            )

    def _steals(self, rank: int, seconds: float, now: float) -> None:
        self.ranks[rank].robbed(seconds, now)

    def _join(self, rank: Rank, action: Action, now: float) -> bool:
        """A reduction or norm; False for one that the rank waits for itself."""
        joint = self.collectives.join(rank, action, now)
        blocks = action.op is Op.REDUCE and action.part is None
        if joint.ends < math.inf:
            for other in joint.joined:
                self.agenda.at(joint.ends, self._release if blocks else self._wake, other)
        return not blocks
