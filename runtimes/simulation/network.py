"""Messages and reductions under way: what queues for which port of a cluster, and when it arrives.

A message passes the ports of its route in turn, cut-through: it queues at a port when it has begun
at the one before.  Each port serves what queues for it in order, and is busy with a message for
B / β seconds.  A message has arrived λ seconds after its last port is done with it.  So what waits
for one port holds up nothing at another, and no port is idle while a message queues for it.

A reduction queues at all ports of its ranks at once, begins when the last of them is free, and
keeps them all until it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

from runtimes.simulation.agenda import Agenda
from runtimes.simulation.cluster import Cluster, Port

__all__ = ["Message", "Network", "Route"]

Subject = TypeVar("Subject")


@dataclass(frozen=True, slots=True)
class Route:
    """From one rank to another: the numbers of its ports, and its link's β and λ."""

    sender: int
    receiver: int
    ports: tuple[int, ...]
    bandwidth_bytes_per_s: float
    latency_seconds: float


@dataclass(slots=True)
class Message(Generic[Subject]):
    """``subject``: what its sender knows it by; ``passed``: ports at which it has begun."""

    route: Route
    size: float
    seconds: float
    subject: Subject
    passed: int = 0


@dataclass(slots=True)
class _Reduction:
    """``load``: of each port, its number and the bytes that pass it; ``each``: of each rank, bytes
    that it sends and receives."""

    seconds: float
    load: tuple[tuple[int, float], ...]
    each: Mapping[int, float]


class Network(Generic[Subject]):
    """``arrives(message, time)`` is called as soon as it is known when a message will have arrived;
    ``steals(rank, seconds, now)`` when a transfer begins that takes a rank's time."""

    def __init__(
        self,
        cluster: Cluster,
        agenda: Agenda,
        arrives: Callable[[Message[Subject], float], None],
        steals: Callable[[int, float, float], None],
    ):
        self._cluster, self._agenda = cluster, agenda
        self._arrives, self._steals = arrives, steals
        self._stolen = cluster.stolen_seconds_per_byte
        self._numbers: dict[Port, int] = {}
        self._free: list[float] = []
        #: Messages that queue at each port, which one that takes no time must not overtake.
        self._queued: list[int] = []
        self._bytes: list[float] = []
        self.route = cache(self._route)
        self._reduction = cache(self._planned)

    def port_bytes(self) -> dict[Port, float]:
        """Bytes that have passed each port."""
        return {port: self._bytes[number] for port, number in self._numbers.items()}

    def _number(self, port: Port) -> int:
        if port not in self._numbers:
            self._numbers[port] = len(self._numbers)
            self._free.append(0.0)
            self._queued.append(0)
            self._bytes.append(0.0)
        return self._numbers[port]

    def _route(self, sender: int, receiver: int) -> Route:
        link = self._cluster.link(sender, receiver)
        ports = tuple(self._number(port) for port in self._cluster.ports(sender, receiver))
        return Route(sender, receiver, ports, link.bandwidth_bytes_per_s, link.latency_seconds)

    def send(self, route: Route, size: float, subject: Subject, now: float) -> None:
        """A message of ``size`` bytes is issued."""
        seconds = size / route.bandwidth_bytes_per_s
        message = Message(route, size, seconds, subject)
        if not self._queues(message, route.ports[0], now):
            self._pass(message, now)

    def _queues(self, message: Message[Subject], port: int, now: float) -> bool:
        """The port serves the message, now or, if it has to queue for it, later."""
        begin = self._free[port]
        if begin <= now and not self._queued[port]:
            self._free[port] = now + message.seconds
            return False
        self._free[port] = max(begin, now) + message.seconds
        self._queued[port] += 1
        self._agenda.at(max(begin, now), self._leave, message)
        return True

    def _leave(self, message: Message[Subject], now: float) -> None:
        """It is its turn at the port where it queued."""
        self._queued[message.route.ports[message.passed]] -= 1
        self._pass(message, now)

    def _pass(self, message: Message[Subject], now: float) -> None:
        """It begins at a port, and at those behind that are free."""
        route, seconds = message.route, message.seconds
        if self._stolen and not message.passed:
            self._steals(route.sender, message.size * self._stolen, now)
        while True:
            self._bytes[route.ports[message.passed]] += message.size
            message.passed += 1
            if message.passed == len(route.ports):
                break
            if self._queues(message, route.ports[message.passed], now):
                return
        if self._stolen:
            self._steals(route.receiver, message.size * self._stolen, now)
        self._arrives(message, now + seconds + route.latency_seconds)

    def _planned(self, ranks: tuple[int, ...], size: float, calls: int) -> _Reduction:
        traffic = self._cluster.all_reduce_traffic(ranks, size)
        return _Reduction(
            self._cluster.all_reduce_seconds(ranks, size, calls),
            tuple((self._number(port), passing) for port, passing in traffic.ports.items()),
            traffic.ranks,
        )

    def reduce(self, ranks: Sequence[int], size: float, calls: int, now: float) -> float:
        """All of ``ranks`` have joined; the time at which their reduction will have ended."""
        reduction = self._reduction(tuple(ranks), size, calls)
        begin = max((self._free[port] for port, _ in reduction.load), default=now)
        begin = max(begin, now)
        end = begin + reduction.seconds
        for port, passing in reduction.load:
            self._free[port] = end
            self._bytes[port] += passing
        if self._stolen:
            self._agenda.at(begin, self._take, reduction)
        return end

    def _take(self, reduction: _Reduction, now: float) -> None:
        for rank, passing in reduction.each.items():
            self._steals(rank, passing * self._stolen, now)
