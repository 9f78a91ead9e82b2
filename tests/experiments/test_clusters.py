"""Cluster files: those that ship mean something, and what is wrong is said in one line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from experiments.clusters import cluster_names, load_cluster
from experiments.errors import UserError
from experiments.this_machine import cluster_document, write_cluster
from runtimes.planning.profile import Links
from tests.runtimes.planning.profiles import profile_of

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


def test_a_machine_that_was_measured_is_a_cluster(tmp_path: Path) -> None:
    curves = {2: {1000: 1e-3, 8000: 4e-3}}
    links = Links(2, 1e-4, 1e9, curves, stolen_seconds_per_byte=1e-10)
    profile = profile_of(links=links, action_seconds={"F": 1e-4, "REDUCE": 2e-4})
    write_cluster(profile, tmp_path / "mine.toml")
    cluster = load_cluster(str(tmp_path / "mine.toml"))
    assert (cluster.name, cluster.devices) == ("mine", 2)
    assert cluster.link(0, 1).seconds(1e6) == pytest.approx(1.1e-3)
    assert cluster.all_reduce_seconds((0, 1), 4500) == pytest.approx(2.5e-3)
    assert cluster.stolen_seconds_per_byte == 1e-10
    assert cluster.action_seconds == {"F": 1e-4, "REDUCE": 2e-4}
    document = cluster_document(profile, "mine", 24e9)
    assert document["nodes"] == [{"devices": 2, "memory_bytes": 12e9}]


def test_without_links_there_is_no_cluster() -> None:
    with pytest.raises(UserError, match="add --ranks 2"):
        cluster_document(profile_of(links=None), "mine", 24e9)
