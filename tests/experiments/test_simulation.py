"""`pipebench simulate`: what its rows say, and what it refuses in one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import simulation
from experiments.errors import UserError
from experiments.identity import run_id
from experiments.loading import config_names, load
from experiments.profiles import load_profile
from experiments.resolve import image_of, layers_of
from experiments.simulation import Request, simulated, simulation_rows
from runtimes.job import ModelSpec
from runtimes.planning.profile import LayerProfile, Profile, Spread
from runtimes.tracing import read_trace, write_trace

CONFIG = "peers/schedules-m4"


def simulation_document(request: Request) -> dict[str, Any]:
    return simulated(request).document


def uniform(path: Path, sizes: Sequence[int] = (1, 64), **changes: Any) -> str:
    """A profile of the config's model: every layer 1 ms forward and 2 ms back a sample."""
    config = load(CONFIG)
    times = {n: (Spread(*[n * 1e-3] * 3), Spread(*[n * 2e-3] * 3)) for n in sizes}
    layers = [
        LayerProfile(
            name,
            {n: forward for n, (forward, _) in times.items()},
            {n: backward for n, (_, backward) in times.items()},
            output_bytes=1000,
            kept_bytes=1000,
            parameter_bytes=4_000_000,
            parameter_tensors=4,
        )
        for name in layers_of(config).names
    ]
    profile = Profile(
        ModelSpec(config.model.name, config.model.args),
        image_of(config),
        config.train.precision,
        "made up",
        "analytic",
        {},
        tuple(layers),
        1000,
        {"sgd": 0.0, "sgd-momentum": 0.0, "adamw": 0.0},
    )
    path.write_text(json.dumps(replace(profile, **changes).to_json()))
    return str(path)


def test_without_a_profile_the_devices_are_computed(tmp_path: Path) -> None:
    known = cluster(tmp_path / "c.toml", 'device = "a100-80gb"')
    small = ("model.args.depth=2", "train.batch_size=8", "data.sizes.train=64")
    document = simulation_document(Request(CONFIG, small, known))
    assert document["profile"]["source"] == "analytic"
    assert document["profile"]["provenance"]["compute_efficiency"] < 1
    with pytest.raises(UserError, match="set nodes.device, or give --profile"):
        simulation_document(Request(CONFIG, (), cluster(tmp_path / "d.toml")))


def cluster(path: Path, memory: str = "memory_bytes = 1e12", devices: int = 2) -> str:
    text = f'name = "c"\n[[nodes]]\ndevices = {devices}\n{memory}\n'
    path.write_text(f"{text}[inside]\nbandwidth_bytes_per_s = 1e15\n")
    return str(path)


def test_a_flush_schedule_takes_its_bubble(tmp_path: Path) -> None:
    profile = uniform(tmp_path / "p.json")
    request = Request(CONFIG, (), cluster(tmp_path / "c.toml"), profile)
    rows = {row["label"]: row for row in simulation_document(request)["rows"]}
    batch, plan = rows["dapple"]["batch_size"], rows["dapple"]["plan"]
    layers = [stage["last"] - stage["first"] for stage in plan["stages"]]
    units = plan["micro_batches"]
    seconds = 3e-3 * batch / units
    # All units at the longest stage, and one unit at the others.
    expected = seconds * (units * max(layers) + sum(layers) - max(layers))
    assert rows["dapple"]["batch_seconds"] == pytest.approx(expected, rel=1e-6)
    assert rows["dapple"]["images_per_s"] == pytest.approx(batch / expected, rel=1e-6)
    # A peer is taken for the system whose schedule it runs.
    assert rows["torch-1f1b"]["batch_seconds"] == rows["dapple"]["batch_seconds"]
    assert all(row["status"] == "ok" for row in rows.values())
    assert sum(rows["gpipe"]["parts"].values()) == pytest.approx(1)


def test_batch_sizes_and_bandwidths_make_a_grid(tmp_path: Path) -> None:
    profile = uniform(tmp_path / "p.json")
    request = Request(CONFIG, (), cluster(tmp_path / "c.toml"), profile, (16, 32), (1.0, 1e-6))
    document = simulation_document(request)
    rows = [row for row in document["rows"] if row["label"] == "dapple"]
    assert [(r["batch_size"], r["bandwidth_share"]) for r in rows] == [
        (16, 1.0),
        (16, 1e-6),
        (32, 1.0),
        (32, 1e-6),
    ]
    assert rows[1]["batch_seconds"] > rows[0]["batch_seconds"]
    assert rows[0]["run"] != rows[2]["run"] == rows[3]["run"]
    assert document["evidence"] == "simulated"
    assert len(simulation_rows(document)) == 1 + len(document["rows"])


def test_what_does_not_fit_is_a_row_with_the_way_out(tmp_path: Path) -> None:
    profile = uniform(tmp_path / "p.json", (1, 2, 64))
    whole = Request(CONFIG, (), cluster(tmp_path / "c.toml"), profile, (8, 32))
    peaks = [
        max(row["memory_bytes"])
        for row in simulation_document(whole)["rows"]
        if row["label"] == "gpipe"
    ]
    between = cluster(tmp_path / "small.toml", f"memory_bytes = {sum(peaks) // 2}")
    rows = simulation_document(replace(whole, cluster=between))["rows"]
    small, large = (row for row in rows if row["label"] == "gpipe")
    assert (small["status"], large["status"]) == ("ok", "oom")
    assert "the largest batch that fits is" in large["why"]
    assert "images_per_s" not in large


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "bf16"}, "the profile is of precision bf16, but the config has"),
        ({"image": (3, 8, 8)}, "the profile is of images 3×8×8, but the config has"),
        ({"model": ModelSpec("vit_tiny_patch16_224")}, "the profile is of model vit_tiny"),
        ({"optimizer_seconds_per_byte": {}}, "the profile has no step of"),
    ],
)
def test_a_profile_of_something_else(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    profile = uniform(tmp_path / "p.json", **changes)
    with pytest.raises(UserError) as caught:
        simulation_document(Request(CONFIG, (), cluster(tmp_path / "c.toml"), profile))
    assert said in str(caught.value)


def test_sizes_clusters_and_files_that_cannot_be(tmp_path: Path) -> None:
    good = Request(CONFIG, (), cluster(tmp_path / "c.toml"), uniform(tmp_path / "p.json"))
    cut = tmp_path / "cut.json"
    assert good.profile is not None
    cut.write_text(Path(good.profile).read_text()[:-20])
    for request, said in (
        (replace(good, profile=uniform(tmp_path / "q.json", (64, 128))), "profiled for 64, 128"),
        (replace(good, profile=str(cut)), "is no whole JSON document"),
        (replace(good, profile=str(tmp_path / "none.json")), "cannot read "),
        (replace(good, cluster=cluster(tmp_path / "1.toml", devices=1)), "c has 1 devices"),
        (
            replace(good, cluster=cluster(tmp_path / "2.toml", "memory_bytes = 1e6")),
            "no batch fits",
        ),
        (replace(good, bandwidth_shares=(0.0,)), "bandwidth must be above 0"),
    ):
        with pytest.raises(UserError) as caught:
            simulation_document(request)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_emulated_config_brings_its_own_profile_and_links() -> None:
    names = [name for name in config_names() if name.startswith("emulated/")]
    assert "emulated/compute-s4" in names
    for name in names:
        if load(name).launch.profile == "uniform-nothing":
            with pytest.raises(UserError, match="a batch takes no time at all"):
                simulation_document(Request(name, ()))
            continue
        document = simulation_document(Request(name, ()))
        config = load(name)
        assert {row["run"] for row in document["rows"]} == {run_id(config)}
        assert {row["label"] for row in document["rows"]} == {
            contender.label for contender in config.contenders()
        }


def test_a_profile_is_made_once_for_rows_and_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(name: str) -> Profile:
        read.append(name)
        return load_profile(name)

    monkeypatch.setattr(simulation, "load_profile", counted)
    profile = uniform(tmp_path / "p.json")
    simulated(Request(CONFIG, (), cluster(tmp_path / "c.toml"), profile), traced=True)
    assert read == [profile]


def test_the_trace_is_of_the_segment_that_a_benchmark_times(tmp_path: Path) -> None:
    request = Request(CONFIG, (), cluster(tmp_path / "c.toml"), uniform(tmp_path / "p.json"))
    found = simulated(request, traced=True)
    rows = {row["label"]: row for row in found.document["rows"]}
    timelines = found.timelines
    assert [timeline.label for timeline in timelines] == list(rows)
    for timeline in timelines:
        row = rows[timeline.label]
        assert timeline.evidence == "simulated"
        assert timeline.makespan_seconds == pytest.approx(row["segment_seconds"])
        assert len(timeline.batches.sizes) == row["segment_batches"]
    write_trace(tmp_path / "t.json", timelines)
    assert [timeline.plan for timeline in read_trace(tmp_path / "t.json")] == [
        timeline.plan for timeline in timelines
    ]
