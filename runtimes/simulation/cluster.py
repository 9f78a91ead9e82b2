"""A cluster: nodes of devices, the links between them, what a collective takes.  Plain data.

B  bytes of a message or of what is all-reduced    β  bytes/s of a link    λ  its latency in seconds
n  ranks of a group, k of them in each of m nodes
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

from runtimes.schedule.action import Op

__all__ = ["Cluster", "Link", "Node", "Port", "Traffic"]

#: What messages queue for: (kind, index); kind "out" or "in" of a device to its node, "far-out" or
#: "far-in" to other nodes, "nic-out" or "nic-in" of a node; "both", "far-both" or "nic-both" where
#: a link is half-duplex.
Port = tuple[str, int]

AllReduce = Literal["ring", "hierarchical"]


class Traffic(NamedTuple):
    """Bytes of an all-reduce that pass each port, and that each rank sends and receives."""

    ports: Mapping[Port, float]
    ranks: Mapping[int, float]


@dataclass(frozen=True)
class Link:
    """``full_duplex``: a message out does not slow down one that comes in."""

    bandwidth_bytes_per_s: float
    latency_seconds: float = 0.0
    full_duplex: bool = True

    def __post_init__(self) -> None:
        # An infinite bandwidth is a link that costs nothing but its latency.
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(
                f"a link of {self.bandwidth_bytes_per_s} bytes/s carries nothing: its bandwidth "
                "must be above 0"
            )
        _check_seconds("a link's latency", self.latency_seconds)

    def with_bandwidth(self, share: float) -> Link:
        """The link that reaches this share of its bandwidth."""
        return replace(self, bandwidth_bytes_per_s=share * self.bandwidth_bytes_per_s)

    def seconds(self, size: float) -> float:
        """λ + B / β."""
        return self.latency_seconds + size / self.bandwidth_bytes_per_s

    @property
    def both_ways_bytes_per_s(self) -> float:
        """β of either direction while both are used."""
        return self.bandwidth_bytes_per_s / (1 if self.full_duplex else 2)


@dataclass(frozen=True)
class Node:
    devices: int
    #: Of each device.
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"a node needs at least 1 device, not {self.devices}")
        if not self.memory_bytes > 0:
            raise ValueError(f"a device needs memory, not {self.memory_bytes} bytes")


@dataclass(frozen=True)
class Cluster:
    """Ranks are dealt out node after node.

    ``inside`` links two devices of a node, each with its own port; ``between`` links two of
    different nodes, over one port a node if ``shared_nic``, else over one a device.
    ``all_reduce``: "ring" over all ranks, or "hierarchical", which reduces inside each node first.
    ``curves``: measured seconds of an all-reduce inside a node by number of ranks and bytes, which
    then stand in the place of the formula.
    ``stolen_seconds_per_byte``: what a device computes longer for every byte that it sends or
    receives meanwhile; ``action_seconds``: what the runtime takes for an action, by op.
    """

    name: str
    nodes: tuple[Node, ...]
    inside: Link
    between: Link | None = None
    shared_nic: bool = True
    all_reduce: AllReduce = "ring"
    curves: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    stolen_seconds_per_byte: float = 0.0
    action_seconds: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    _node_of: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("a cluster needs at least one node")
        if len(self.nodes) > 1 and self.between is None:
            raise ValueError(f"{self.name} has {len(self.nodes)} nodes, but no link between them")
        if self.all_reduce not in get_args(AllReduce):
            raise ValueError(
                f"all_reduce is {self.all_reduce!r}, but is one of {', '.join(get_args(AllReduce))}"
            )
        _check_seconds("stolen_seconds_per_byte", self.stolen_seconds_per_byte)
        for op, seconds in self.action_seconds.items():
            if op not in Op.__members__:
                known = ", ".join(Op.__members__)
                raise ValueError(f"action_seconds of {op!r}, which is no action (known: {known})")
            _check_seconds(f"action_seconds of {op}", seconds)
        for ranks, curve in self.curves.items():
            if not curve or min(curve) < 1:
                raise ValueError(f"the curve of {ranks} ranks needs times of 1 byte or more")
            for size, seconds in curve.items():
                _check_seconds(f"an all-reduce of {size} bytes over {ranks} ranks", seconds)
        placed = [number for number, node in enumerate(self.nodes) for _ in range(node.devices)]
        object.__setattr__(self, "_node_of", tuple(placed))

    @classmethod
    def ideal(cls, devices: int) -> Cluster:
        """Links that cost nothing."""
        return cls("free links", (Node(devices),), Link(math.inf))

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        del document["_node_of"]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Cluster:
        """ValueError for a document that is no cluster."""
        values = dict(document)
        try:
            values["nodes"] = tuple(Node(**node) for node in values["nodes"])
            for key in ("inside", "between"):
                if values.get(key) is not None:
                    values[key] = Link(**values[key])
            # JSON has only texts for keys.
            values["curves"] = {
                int(n): {int(size): seconds for size, seconds in curve.items()}
                for n, curve in values.get("curves", {}).items()
            }
            return cls(**values)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"a cluster that lacks something: {error}") from error

    def with_bandwidth(self, share: float) -> Cluster:
        """The cluster whose links reach this share of their bandwidth."""
        between = None if self.between is None else self.between.with_bandwidth(share)
        return replace(self, inside=self.inside.with_bandwidth(share), between=between)

    @property
    def devices(self) -> int:
        return len(self._node_of)

    def node_of(self, rank: int) -> int:
        return self._node_of[rank]

    def memory_bytes(self, rank: int) -> float:
        return self.nodes[self._node_of[rank]].memory_bytes

    def check(self, ranks: int) -> None:
        """ValueError if the cluster has not that many devices."""
        if ranks > self.devices:
            raise ValueError(
                f"the plan has {ranks} ranks, but {self.name} has {self.devices} devices: choose a "
                "larger cluster, or fewer stages or replicas"
            )

    def link(self, sender: int, receiver: int) -> Link:
        if self._node_of[sender] == self._node_of[receiver]:
            return self.inside
        assert self.between is not None
        return self.between

    def ports(self, sender: int, receiver: int) -> tuple[Port, ...]:
        """What a message occupies, in the order in which it passes them."""
        here, there = self._node_of[sender], self._node_of[receiver]
        link = self.link(sender, receiver)
        if here != there and self.shared_nic:
            return (
                ("nic-out" if link.full_duplex else "nic-both", here),
                ("nic-in" if link.full_duplex else "nic-both", there),
            )
        # Ports to other nodes are not those to neighbours of the same node.
        far = "far-" if here != there else ""
        return (
            (far + ("out" if link.full_duplex else "both"), sender),
            (far + ("in" if link.full_duplex else "both"), receiver),
        )

    def _levels(self, ranks: Sequence[int]) -> list[list[int]]:
        """The ranks of each node, if an all-reduce of them is hierarchical; else all of them."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for rank in sorted(ranks):
            nodes[self._node_of[rank]].append(rank)
        alike = len({len(node) for node in nodes.values()}) == 1
        if self.all_reduce == "hierarchical" and alike:
            return list(nodes.values())
        return [[rank for node in nodes.values() for rank in node]]

    def all_reduce_seconds(self, ranks: Sequence[int], size: float, calls: int = 1) -> float:
        """Of ``size`` bytes in ``calls`` equal pieces, one after the other.

        ring          2 (n − 1) / n · B / β + 2 (n − 1) λ a call, over the slowest link
        hierarchical  reduce-scatter and all-gather inside, (k − 1) / k · B / β + (k − 1) λ each,
                      and between them a ring of the m nodes over B / k a device, whose k devices
                      share a node's port if there is one only

        Every rank sends and receives at once, so half-duplex links have half of their β.
        """
        n = len(ranks)
        if n == 1 or calls == 0:
            return 0.0
        here = Counter(self._node_of[rank] for rank in ranks)
        if len(here) == 1:
            if n in self.curves:
                return calls * _on_curve(self.curves[n], size / calls)
            return _ring(self.inside, n, size, calls)
        assert self.between is not None
        levels = self._levels(ranks)
        if len(levels) > 1:
            k = len(levels[0])
            across = size if self.shared_nic else size / k
            return (_ring(self.inside, k, size, calls) if k > 1 else 0.0) + _ring(
                self.between, len(levels), across, calls
            )
        used = [self.between] + ([self.inside] if max(here.values()) > 1 else [])
        steps = 2 * (n - 1)
        slowest = min(link.both_ways_bytes_per_s for link in used)
        latency = max(link.latency_seconds for link in used)
        return steps / n * size / slowest + calls * steps * latency

    def all_reduce_traffic(self, ranks: Sequence[int], size: float) -> Traffic:
        """2 (n − 1) / n · B from every rank of a ring to the next."""
        ports: dict[Port, float] = defaultdict(float)
        each: dict[int, float] = defaultdict(float)
        for ring, share in self._rings(ranks, size):
            passing = 2 * (len(ring) - 1) / len(ring) * share
            for sender, receiver in pairwise((*ring, ring[0])):
                for port in self.ports(sender, receiver):
                    ports[port] += passing
                each[sender] += passing
                each[receiver] += passing
        return Traffic(dict(ports), dict(each))

    def _rings(self, ranks: Sequence[int], size: float) -> Iterator[tuple[Sequence[int], float]]:
        """The rings of an all-reduce, and what each reduces."""
        levels = self._levels(ranks)
        for level in levels:
            if len(level) > 1:
                yield level, size
        if len(levels) > 1:
            for across in zip(*levels, strict=True):
                yield across, size / len(levels[0])


def _check_seconds(what: str, seconds: float) -> None:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{what} is {seconds} s, but must be 0 s or more")


def _ring(link: Link, n: int, size: float, calls: int) -> float:
    steps = 2 * (n - 1)
    return steps / n * size / link.both_ways_bytes_per_s + calls * steps * link.latency_seconds


def _on_curve(curve: Mapping[int, float], size: float) -> float:
    """Linear between measured sizes; below the smallest its time, beyond the largest its slope."""
    sizes = sorted(curve)
    if size <= sizes[0]:
        return curve[sizes[0]]
    if len(sizes) == 1:
        return curve[sizes[0]] * size / sizes[0]
    above = min(bisect_left(sizes, size), len(sizes) - 1)
    low, high = sizes[above - 1], sizes[above]
    slope = (curve[high] - curve[low]) / (high - low)
    if size > high:
        return curve[high] + (size - high) * max(slope, 0.0)
    return curve[low] + (size - low) * slope
