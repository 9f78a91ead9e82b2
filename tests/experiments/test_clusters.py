"""Cluster files: those that ship mean something, and what is wrong is said in one line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from experiments.clusters import cluster_names, load_cluster
from experiments.errors import UserError

GOOD = """
name = "x"
[[nodes]]
count = 2
devices = 2
[inside]
bandwidth_bytes_per_s = 1e9
[between]
bandwidth_bytes_per_s = 1e8
latency_seconds = 1e-3
"""


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_that_ships_loads(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.devices >= 1
    if name != "template":
        assert cluster.name == name
        assert cluster.provenance, "where its numbers come from"


def test_the_published_cluster_of_ashpipe() -> None:
    cluster = load_cluster("a100-2x4")
    assert [cluster.node_of(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert cluster.link(0, 3).bandwidth_bytes_per_s == 300e9
    assert cluster.link(3, 4).bandwidth_bytes_per_s == 25e9
    assert cluster.memory_bytes(7) == 80e9


def test_without_memory_there_is_no_limit(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(GOOD)
    assert load_cluster(str(file)).memory_bytes(0) == math.inf


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("1e9", "0", "inside.bandwidth_bytes_per_s is 0, but must be above 0"),
        ("1e-3", "-1e-3", "between.latency_seconds is -0.001, but must be at least 0"),
        ("devices = 2", "devices = 0", "nodes.0.devices is 0, but must be at least 1"),
        ("devices = 2", "device = 2", "nodes.0.devices is missing"),
        ("[between]", "[betwen]", "unknown key 'betwen'; did you mean 'between'?"),
        ("bandwidth_bytes_per_s = 1e8\n", "", "between.bandwidth_bytes_per_s is missing"),
        ("1e8", "inf", "between.bandwidth_bytes_per_s is inf, but must be a finite number"),
        (GOOD[GOOD.index("[between]") :], "", "x has 2 nodes, but no link between them"),
        ("[inside]", "[inside", "is not TOML"),
        ('name = "x"', 'name = "x"\naction_seconds = { Q = 1.0 }', "action_seconds.Q"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    file = tmp_path / "x.toml"
    assert old in GOOD
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(UserError) as caught:
        load_cluster(str(file))
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_near() -> None:
    with pytest.raises(UserError, match="did you mean 'a100-2x4'"):
        load_cluster("a100-2x44")
    with pytest.raises(UserError, match="cannot read cluster file nowhere.toml"):
        load_cluster("nowhere.toml")
