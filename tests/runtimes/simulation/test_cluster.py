"""Which ports messages queue for, what an all-reduce takes, and clusters that cannot be."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from runtimes.simulation.cluster import Cluster, Link, Node

NVLINK, ETHERNET = Link(100.0, 0.5), Link(10.0, 2.0)
HALF = Link(10.0, 2.0, full_duplex=False)


def two_nodes(**rest: Any) -> Cluster:
    return Cluster("two", (Node(2), Node(2)), NVLINK, **{"between": ETHERNET, **rest})


def test_ports_out_and_in_of_devices_and_of_nodes() -> None:
    assert two_nodes().ports(0, 1) == (("out", 0), ("in", 1))
    assert two_nodes().ports(0, 3) == (("nic-out", 0), ("nic-in", 1))
    assert two_nodes(shared_nic=False).ports(0, 3) == (("far-out", 0), ("far-in", 3))
    assert two_nodes(between=HALF).ports(3, 0) == (("nic-both", 1), ("nic-both", 0))
    assert two_nodes(between=HALF, shared_nic=False).ports(3, 0) == (
        ("far-both", 3),
        ("far-both", 0),
    )


def test_ranks_are_dealt_out_node_after_node() -> None:
    cluster = Cluster("odd", (Node(1, 5.0), Node(3, 7.0)), NVLINK, ETHERNET)
    assert [cluster.node_of(rank) for rank in range(cluster.devices)] == [0, 1, 1, 1]
    assert [cluster.memory_bytes(rank) for rank in (0, 3)] == [5.0, 7.0]
    assert cluster.link(0, 1) is ETHERNET
    assert cluster.link(1, 2) is NVLINK


def test_an_all_reduce_takes_its_formula() -> None:
    cluster = two_nodes()
    assert cluster.all_reduce_seconds([2], 80.0) == 0.0
    assert cluster.all_reduce_seconds([0, 1], 80.0) == 2 / 2 * 80 / 100 + 2 * 0.5
    assert cluster.all_reduce_seconds([0, 1], 80.0, calls=5) == 2 / 2 * 80 / 100 + 5 * 2 * 0.5
    assert cluster.all_reduce_seconds([0, 1], 80.0, calls=0) == 0.0
    # Ranks of one device each in two nodes use the link between them only.
    assert cluster.all_reduce_seconds([0, 2], 80.0) == 2 / 2 * 80 / 10 + 2 * 2.0
    assert cluster.all_reduce_seconds([0, 1, 2, 3], 80.0) == 6 / 4 * 80 / 10 + 6 * 2.0
    half = two_nodes(between=HALF)
    assert half.all_reduce_seconds([0, 2], 80.0) == 2 * (2 / 2 * 80 / 10) + 2 * 2.0


@pytest.mark.parametrize(("shared_nic", "across"), [(True, 80.0), (False, 40.0)])
def test_a_hierarchical_one_crosses_between_nodes_once(shared_nic: bool, across: float) -> None:
    cluster = two_nodes(all_reduce="hierarchical", shared_nic=shared_nic)
    inside, between = 2 / 2 * 80 / 100 + 2 * 0.5, 2 / 2 * across / 10 + 2 * 2.0
    assert cluster.all_reduce_seconds([0, 1, 2, 3], 80.0) == inside + between
    # Nodes that hold unlike numbers of ranks make a plain ring.
    assert cluster.all_reduce_seconds([0, 1, 2], 80.0) == 4 / 3 * 80 / 10 + 4 * 2.0


def test_what_passes_the_ports() -> None:
    ring = two_nodes().all_reduce_traffic([3, 0, 2, 1], 80.0)
    assert ring.ports == {
        **dict.fromkeys([("out", 0), ("in", 1), ("out", 2), ("in", 3)], 120.0),
        **{(kind, node): 120.0 for kind in ("nic-out", "nic-in") for node in (0, 1)},
    }
    assert ring.ranks == dict.fromkeys(range(4), 240.0)
    levels = two_nodes(all_reduce="hierarchical").all_reduce_traffic([0, 1, 2, 3], 80.0)
    assert levels.ports == {
        **{(kind, rank): 80.0 for kind in ("out", "in") for rank in range(4)},
        **{(kind, node): 2 * 40.0 for kind in ("nic-out", "nic-in") for node in (0, 1)},
    }


def test_a_measured_curve_stands_in_the_place_of_the_formula() -> None:
    """Linear between what was measured, its last slope beyond, and never faster than the last."""
    cluster = Cluster("measured", (Node(4),), NVLINK, curves={2: {10: 1.0, 20: 3.0, 40: 5.0}})
    sizes = (5.0, 10.0, 15.0, 30.0, 40.0, 60.0)
    found = [cluster.all_reduce_seconds([0, 1], size) for size in sizes]
    assert found == [1.0, 1.0, 2.0, 4.0, 5.0, 7.0]
    assert cluster.all_reduce_seconds([0, 1], 30.0, calls=2) == 2 * 2.0
    assert cluster.all_reduce_seconds([0, 1, 2], 90.0) == 4 / 3 * 90 / 100 + 4 * 0.5
    falling = Cluster("falling", (Node(2),), NVLINK, curves={2: {10: 2.0, 20: 1.0}})
    assert falling.all_reduce_seconds([0, 1], 1000.0) == 1.0
    single = Cluster("single", (Node(2),), NVLINK, curves={2: {10: 2.0}})
    assert single.all_reduce_seconds([0, 1], 30.0) == 6.0


def test_as_json_and_back() -> None:
    cluster = two_nodes(curves={2: {10: 1.0}}, action_seconds={"F": 0.5}, all_reduce="hierarchical")
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Link(0.0), "a link of 0.0 bytes/s carries nothing"),
        (lambda: Link(-1.0), "its bandwidth must be above 0"),
        (lambda: Link(math.nan), "carries nothing"),
        (lambda: Link(1.0, -0.5), "latency is -0.5 s, but must be 0 s or more"),
        (lambda: Node(0), "at least 1 device, not 0"),
        (lambda: Node(1, 0.0), "a device needs memory, not 0.0 bytes"),
        (lambda: Cluster("none", (), NVLINK), "at least one node"),
        (lambda: two_nodes(between=None), "two has 2 nodes, but no link between them"),
        (
            lambda: two_nodes(all_reduce="tree"),
            "all_reduce is 'tree', but is one of ring, hierarch",
        ),
        (lambda: two_nodes(stolen_seconds_per_byte=-1.0), "stolen_seconds_per_byte is -1.0 s"),
        (lambda: two_nodes(action_seconds={"F": -1.0}), "action_seconds of F is -1.0 s"),
        (lambda: two_nodes(action_seconds={"FWD": 1.0}), "'FWD', which is no action (known: F, B"),
        (lambda: two_nodes(curves={2: {10: -1.0}}), "of 10 bytes over 2 ranks is -1.0 s"),
        (lambda: two_nodes(curves={2: {}}), "the curve of 2 ranks needs times"),
        (lambda: two_nodes().check(5), "the plan has 5 ranks, but two has 4 devices"),
        (lambda: Cluster.from_json({"name": "x"}), "a cluster that lacks something: 'nodes'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(wrong: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        wrong()
    assert "\n" not in str(error.value)
