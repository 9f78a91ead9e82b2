"""Programs whose makespan follows from a formula: what the simulator finds, beside the formula.

Times are multiples of powers of two, so that sums of them are exact.

t  seconds of a unit at a stage    d  delay of a link    S, M, R  stages, units, replicas
n  batches    λ, β  latency and bandwidth of a link    B  bytes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from runtimes.plan import Plan
from runtimes.simulation.cluster import Cluster, Link, Node
from runtimes.simulation.costs import UniformCosts
from runtimes.simulation.simulator import Simulation, simulate
from runtimes.system import evaluation_program
from runtimes.systems import get_system

__all__ = ["CHECKS", "Found", "bubble_of", "forwards", "single_node"]

#: What was simulated, and what the formula says.
Found = tuple[float, float]
TIMES = (1.0, 2.5, 0.5, 2.0)
UNITS = 6


def single_node(devices: int, link: Link, **rest: object) -> Cluster:
    return Cluster("one node", (Node(devices),), link, **rest)  # type: ignore[arg-type]


def forwards(
    cluster: Cluster, times: Sequence[float] = TIMES, *, rendezvous: bool = False, size: float = 0.0
) -> Simulation:
    """UNITS units of one sample forward through stages of these times."""
    plan = Plan.even(len(times), len(times))
    program = replace(evaluation_program(plan, UNITS, 1), rendezvous=rendezvous)
    return simulate(program, cluster, UniformCosts(plan, times, sample_bytes=size))


def free_links() -> Found:
    """(M − 1) · max t + Σ t."""
    found = forwards(Cluster.ideal(4)).makespan_seconds
    return found, (UNITS - 1) * max(TIMES) + sum(TIMES)


def asynchronous_links() -> Found:
    """Σ d more: two links of a node, and a slower one between nodes; B / β < t, so none queues."""
    inside, between = Link(64.0, 0.25), Link(16.0, 2.0)
    cluster = Cluster("two nodes", (Node(2), Node(2)), inside, between)
    delays = [inside.seconds(8.0), between.seconds(8.0), inside.seconds(8.0)]
    found = forwards(cluster, size=8.0).makespan_seconds
    return found, (UNITS - 1) * max(TIMES) + sum(TIMES) + sum(delays)


def blocking_links() -> Found:
    """t + d in the place of t, but for the last stage, which sends nothing.  The sender is busy for
    the whole delay of a send, and the receiver takes the message in whatever it does meanwhile:
    that is an overhead of every send on free links, not Program.rendezvous, where both wait."""
    delay = 0.75
    cluster = single_node(4, Link(math.inf), action_seconds={"SEND_ACT": delay})
    taken = [t + delay for t in TIMES[:-1]] + [TIMES[-1]]
    found = forwards(cluster).makespan_seconds
    return found, (UNITS - 1) * max(taken) + sum(taken)


def rendezvous() -> Found:
    """A transfer takes both its ends, since no receive is posted before its stage is through with
    the unit before: by recursion over stages and units."""
    link = Link(16.0, 0.25)
    delay = link.seconds(8.0)
    through = [[0.0] * (UNITS + 1) for _ in TIMES]
    for unit in range(UNITS):
        arrived = through[0][unit - 1] if unit else 0.0
        for stage, seconds in enumerate(TIMES):
            through[stage][unit] = arrived + seconds
            if stage < len(TIMES) - 1:
                posted = through[stage + 1][unit - 1] if unit else 0.0
                arrived = max(through[stage][unit], posted) + delay
                through[stage][unit] = arrived
    found = forwards(single_node(4, link), rendezvous=True, size=8.0).makespan_seconds
    return found, max(stage[UNITS - 1] for stage in through)


def saturated_link() -> Found:
    """Messages that take longer than a unit: t, then M transfers in a row, λ, and t."""
    found = forwards(single_node(2, Link(2.0, 0.5)), (1.0, 1.0), size=8.0).makespan_seconds
    return found, 1.0 + UNITS * 4.0 + 0.5 + 1.0


def full_duplex() -> Found:
    """Dapple, S = M = 2, every message on its way for 4 s: the gradient of unit 0 leaves at 8,
    while unit 1 (5 … 9) comes in.  F, ACT0, F0, B0, GRAD0, and GRAD1 behind it, B1."""
    return _crossing(full_duplex=True), 1.0 + 4.0 + 1.0 + 2.0 + 4.0 + 4.0 + 2.0


def half_duplex() -> Found:
    """It has to wait for unit 1, until 9."""
    return _crossing(full_duplex=False), 1.0 + 4.0 + 4.0 + 4.0 + 4.0 + 2.0


def _crossing(*, full_duplex: bool) -> float:
    plan = Plan.even(2, 2, micro_batches=2)
    cluster = single_node(2, Link(2.0, 0.0, full_duplex))
    costs = UniformCosts(plan, sample_bytes=8.0)
    program = get_system("dapple").program(plan, (2,))
    return simulate(program, cluster, costs).makespan_seconds


def shared_nic() -> Found:
    """Two stages of two replicas, on nodes of one port: what the replicas send goes one by one."""
    return _two_replicas(shared_nic=True), 1.0 + 2 * 2.0 + 0.5 + 1.0


def own_nics() -> Found:
    return _two_replicas(shared_nic=False), 1.0 + 2.0 + 0.5 + 1.0


def _two_replicas(*, shared_nic: bool) -> float:
    plan = Plan.even(2, 2, (2, 2))
    cluster = Cluster(
        "two nodes", (Node(2), Node(2)), Link(math.inf), Link(4.0, 0.5), shared_nic=shared_nic
    )
    costs = UniformCosts(plan, sample_bytes=8.0)
    return simulate(evaluation_program(plan, 2, 2), cluster, costs).makespan_seconds


RING = Link(8.0, 0.25)


def _data_parallel(
    cluster: Cluster, replicas: int, *, overlap: bool, parts: int = 1, tensors: int = 1
) -> float:
    """One batch: F of 1 s, B of 4 s, a step of 0.5 s, 64 bytes of gradients."""
    plan = Plan.even(4, 1, (replicas,), cuts=range(1, parts))
    program = get_system("dp", {"overlap": overlap}).program(plan, (replicas,))
    costs = UniformCosts(
        plan, 1.0, 4.0, optimizer_seconds=0.5, parameter_bytes=64.0, tensors=tensors
    )
    return simulate(program, cluster, costs).makespan_seconds


def bubble_of(system: str, stages: int, units: int) -> Found:
    """(S − 1) / (M + S − 1) of the time."""
    plan = Plan.even(stages, stages, micro_batches=units)
    program = get_system(system).program(plan, (units,))
    found = simulate(program, Cluster.ideal(stages), UniformCosts(plan))
    idle = sum(parts["idle"] for parts in found.parts)
    return idle / (stages * found.makespan_seconds), (stages - 1) / (units + stages - 1)


def ring() -> Found:
    """2 (n − 1) / n · B / β + 2 (n − 1) λ between backward and step."""
    n = 4
    reduced = 2 * (n - 1) / n * 64.0 / 8.0 + 2 * (n - 1) * 0.25
    return _data_parallel(single_node(n, RING), n, overlap=True), 1.0 + 4.0 + reduced + 0.5


def half_duplex_ring() -> Found:
    """Every rank sends and receives at once, which takes such a link twice as long."""
    n, link = 4, replace(RING, full_duplex=False)
    reduced = 2 * (2 * (n - 1) / n * 64.0 / 8.0) + 2 * (n - 1) * 0.25
    return _data_parallel(single_node(n, link), n, overlap=True), 1.0 + 4.0 + reduced + 0.5


def hierarchical() -> Found:
    """k = 2 in each of m = 2 nodes: reduce-scatter, a ring over the node's port, all-gather."""
    between = Link(2.0, 1.0)
    cluster = Cluster("two nodes", (Node(2), Node(2)), RING, between, all_reduce="hierarchical")
    inside = 2 * (64.0 / 2 / 8.0 + 0.25)
    across = 2 * (1 / 2 * 64.0 / 2.0 + 1.0)
    return _data_parallel(cluster, 4, overlap=True), 1.0 + 4.0 + inside + across + 0.5


def ring_between_nodes() -> Found:
    """Over the slowest link, of the largest latency."""
    cluster = Cluster("two nodes", (Node(2), Node(2)), RING, Link(2.0, 1.0))
    reduced = 2 * 3 / 4 * 64.0 / 2.0 + 2 * 3 * 1.0
    return _data_parallel(cluster, 4, overlap=True), 1.0 + 4.0 + reduced + 0.5


def one_reduction_a_tensor() -> Found:
    """Blocking: the bytes are the same, the latencies those of eight calls."""
    reduced = 2 / 2 * 64.0 / 8.0 + 8 * 2 * 0.25
    found = _data_parallel(single_node(2, RING), 2, overlap=False, parts=4, tensors=8)
    return found, 1.0 + 4.0 + reduced + 0.5


def overlapped_short_reductions() -> Found:
    """b seconds of each of p parts, r of its reduction: b + (p − 1) · max(b, r) + r."""
    link = Link(64.0, 0.125)
    b, r = 1.0, 2 / 2 * 16.0 / 64.0 + 2 * 0.125
    found = _data_parallel(single_node(2, link), 2, overlap=True, parts=4)
    return found, 1.0 + b + 3 * max(b, r) + r + 0.5


def overlapped_long_reductions() -> Found:
    b, r = 1.0, 2 / 2 * 16.0 / 8.0 + 2 * 0.25
    found = _data_parallel(single_node(2, RING), 2, overlap=True, parts=4, tensors=8)
    return found, 1.0 + b + 3 * max(b, r) + r + 0.5


def norm() -> Found:
    """A scalar all-reduce over all ranks stands between the last gradient and every step."""
    plan = Plan.even(2, 2, micro_batches=2)
    program = get_system("gpipe").program(plan, (2,), norm=True)
    costs = UniformCosts(plan, optimizer_seconds=0.5)
    found = simulate(program, single_node(2, Link(16.0, 0.25)), costs).makespan_seconds
    # A message of each kind is exposed; then come 2 (n − 1) / n · 4 / β + 2 (n − 1) λ.
    return found, (2 + 2 - 1) * 3.0 + 2 * 0.25 + (4 / 16.0 + 2 * 0.25) + 0.5


CHECKS: dict[str, Callable[[], Found]] = {
    check.__name__: check
    for check in (
        free_links,
        asynchronous_links,
        blocking_links,
        rendezvous,
        saturated_link,
        full_duplex,
        half_duplex,
        shared_nic,
        own_nics,
        ring,
        half_duplex_ring,
        hierarchical,
        ring_between_nodes,
        one_reduction_a_tensor,
        overlapped_short_reductions,
        overlapped_long_reductions,
        norm,
    )
}
