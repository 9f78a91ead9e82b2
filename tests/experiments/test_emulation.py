"""Configs of runs on hardware that is not here: what they are, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from analysis.records import load_records
from experiments.config import Config
from experiments.emulation import emulation_of
from experiments.errors import UserError
from experiments.identity import config_hash, run_id
from experiments.loading import load
from experiments.memory import memory_needed
from experiments.profiles import load_profile, profile_names
from experiments.resolve import job_of, layers_of, tasks_of
from experiments.runner import _data, _document, prepare
from experiments.summary import summarise
from runtimes.emulation.layers import EmulatedStack
from runtimes.emulation.uniform import uniform_profile
from runtimes.job import DataSpec, Job

NAME = "emulated/compute-s4"
OURS = "bench.contenders=[{label='dapple', system='dapple'}]"
CLUSTER = """
name = "two"
[[nodes]]
devices = 4
[inside]
bandwidth_bytes_per_s = 1e9
latency_seconds = 1e-3
"""


def profile_at(folder: Path, name: str = "own", **arguments: Any) -> str:
    file = folder / f"{name}.json"
    settings = {"forward_seconds": 1e-3, "backward_seconds": 2e-3, **arguments}
    file.write_text(json.dumps(uniform_profile(8, **settings).to_json()))
    return str(file)


def cluster_at(folder: Path, text: str = CLUSTER, name: str = "own") -> str:
    file = folder / f"{name}.toml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("name", profile_names())
def test_committed_profiles_are_what_they_say(name: str) -> None:
    profile = load_profile(name)
    if profile.provenance.get("synthetic") == "uniform layers":
        made = uniform_profile(**profile.provenance["arguments"])
        assert json.dumps(made.to_json()) == json.dumps(profile.to_json())


REFUSED = {
    "launch.profile=unifrm-nothing": "unknown profile 'unifrm-nothing'; did you mean",
    "launch.profile=/no/where.json": "cannot read the profile /no/where.json",
    "launch.device=cpu": 'profile is for device "emulated", but device is "cpu": leave it out',
    "launch.truncation=0": "launch.truncation is 0, but must be at least 1",
    "launch.nodes=2": "what is emulated takes one host",
    "data.channels=2": "is of images 1×1×1, but the config has 2×1×1",
    "model.args.layers=9": 'is of model uniform {"layers": 8}, but the config has',
    "model.name=other": "but the config has other",
    "train.precision=bf16": "is of precision float32, but the config has bf16",
    "plan.stages=9": "plan.stages is 9, but the model has 8 layers",
    "data.classes=7": "random bytes (synthetic) has 7 classes: set data.classes = 10",
    "launch.cluster=v100-3x2": "torch-1f1b is a peer, whose messages launch.cluster does not",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_be_emulated_is_said_in_one_line(setting: str) -> None:
    settings = [setting, *(["launch.port=29500"] if "nodes" in setting else [])]
    with pytest.raises(UserError) as caught:
        prepare(load(NAME, settings))
    assert REFUSED[setting] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_device_without_a_profile_and_a_profile_without_one() -> None:
    with pytest.raises(UserError, match='device "emulated" waits as a profile says: give one'):
        load("smoke/throughput", ["launch.device=emulated"])
    with pytest.raises(UserError, match=r"launch\.device is 'gpu', which is unknown"):
        load("smoke/throughput", ["launch.device=gpu"])


@pytest.mark.parametrize(
    "setting", ["launch={device='emulated', profile='uniform-nothing'}", "launch.cluster=v100-3x2"]
)
def test_layers_that_only_wait_learn_nothing(setting: str) -> None:
    with pytest.raises(UserError, match=r"is for benchmarks, and this is a training run"):
        load("smoke/digits-dapple", [setting])


def test_units_that_the_profile_does_not_reach() -> None:
    with pytest.raises(UserError, match="units of dapple: .* not for 2048: profile it with"):
        prepare(load(NAME, ["train.batch_size=16384", "data.sizes.train=16384"]))


def test_steps_that_the_profile_does_not_know(tmp_path: Path) -> None:
    path = Path(profile_at(tmp_path))
    document = json.loads(path.read_text())
    del document["optimizer_seconds_per_byte"]["sgd-momentum"]
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="what a step of sgd-momentum takes, but of sgd, adamw"):
        prepare(load(NAME, [f"launch.profile={path}"]))


def test_a_cluster_that_is_too_small_or_takes_time_from_devices(tmp_path: Path) -> None:
    small = cluster_at(tmp_path, CLUSTER.replace("= 4", "= 2"), "small")
    with pytest.raises(UserError, match="has 4 ranks, but two has 2 devices"):
        prepare(load(NAME, [OURS, f"launch.cluster={small}"]))
    steals = cluster_at(tmp_path, CLUSTER.replace("[[", "stolen_seconds_per_byte = 1e-9\n[["), "s")
    with pytest.raises(UserError, match="take 1e-09 s a byte from devices"):
        prepare(load(NAME, [OURS, f"launch.cluster={steals}"]))


# -- identity ---------------------------------------------------------------------------------


def test_a_run_is_the_content_of_its_profile_wherever_that_lies(tmp_path: Path) -> None:
    def hash_of(path: str) -> str:
        return config_hash(load(NAME, [f"launch.profile={path}"]))

    first = hash_of(profile_at(tmp_path, "a"))
    assert hash_of(profile_at(tmp_path, "b")) == first
    assert hash_of(profile_at(tmp_path, "a", forward_seconds=1.1e-3)) != first
    document = json.loads((tmp_path / "b.json").read_text())
    document["provenance"] = {"by": "somebody else"}
    (tmp_path / "b.json").write_text(json.dumps(document))
    assert hash_of(str(tmp_path / "b.json")) == first


def test_a_run_is_the_content_of_its_cluster(tmp_path: Path) -> None:
    def hash_of(path: str) -> str:
        return config_hash(load(NAME, [OURS, f"launch.cluster={path}"]))

    first = hash_of(cluster_at(tmp_path))
    assert first != config_hash(load(NAME, [OURS]))
    assert hash_of(cluster_at(tmp_path, "# the same\n" + CLUSTER, "other")) == first
    assert hash_of(cluster_at(tmp_path, CLUSTER.replace("1e-3", "2e-3"))) != first


def test_the_truncation_is_part_of_the_run() -> None:
    assert run_id(load(NAME, ["launch.truncation=1000"])) == run_id(load(NAME))
    assert run_id(load(NAME, ["launch.truncation=100"])) != run_id(load(NAME))


def test_runs_on_what_is_there_are_what_they_were() -> None:
    """Keys of emulation are nothing to them: this is the id of a committed record."""
    assert run_id(load("smoke/digits-dapple")) == "digits-dapple-s0-5769bd31"


def record(folder: Path) -> tuple[Config, Path]:
    """As a launcher leaves one."""
    path = profile_at(folder)
    config = load(NAME, [f"launch.profile={path}"])
    file = folder / "config.toml"
    file.write_text(tomli_w.dumps(_document(config)))
    return config, Path(path)


def test_a_record_outlives_its_profile(tmp_path: Path) -> None:
    config, path = record(tmp_path)
    path.unlink()
    again = load(str(tmp_path / "config.toml"))
    assert config_hash(again) == config_hash(config)
    environment = {"evidence": again.evidence, "machine": {}}
    result = summarise(again, f"{run_id(again)}.dapple", environment, [])
    assert (result["evidence"], result["status"]) == ("emulated", "unfinished")


def test_a_record_is_not_run_again_on_another_profile(tmp_path: Path) -> None:
    config, path = record(tmp_path)
    assert emulation_of(load(str(tmp_path / "config.toml"))) == emulation_of(config)
    profile_at(tmp_path, path.stem, forward_seconds=5e-3)
    with pytest.raises(UserError, match=r"launch\.profile .* is not what it was when this run"):
        emulation_of(load(str(tmp_path / "config.toml")))


# -- what runs --------------------------------------------------------------------------------


def test_the_job_has_it_all_and_survives_json(tmp_path: Path) -> None:
    config = load(NAME, [OURS, f"launch.cluster={cluster_at(tmp_path)}"])
    job = job_of(config, tasks_of(config, layers_of(config)), DataSpec("", ""))
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    assert job.device == "cpu"
    assert job.emulation is not None
    assert job.emulation.truncation == 1000


def test_layers_are_cut_at_their_real_sizes_and_held_at_their_truncated_ones() -> None:
    plan = "plan={stages=1, replicas=[2], bucket_mb=100}"
    ours = "bench.contenders=[{label='dp', system='dp'}]"
    config = load(NAME, [plan, ours])
    layers = layers_of(config)
    assert layers.parameters == (10_000_000,) * 8
    tasks = tasks_of(config, layers)
    assert tasks[0].plan.stages[0].cuts == (2, 5)
    needed = memory_needed(config, tasks, config.train.batch_size)
    assert needed["weights"] == 2 * 8 * 10_000 * 4


def test_ranks_read_one_pixel_an_image(tmp_path: Path) -> None:
    path = Path(profile_at(tmp_path))
    document = json.loads(path.read_text())
    document["image"] = [3, 32, 32]
    path.write_text(json.dumps(document))
    settings = [f"launch.profile={path}", "data.image_size=32", "data.channels=3"]
    config = load(NAME, settings)
    prepare(config)
    data = _data(config, tmp_path / "data")
    images = config.data.sizes.train
    assert images is not None
    assert (Path(data.train) / "images.npy").stat().st_size < images + 200


def test_a_run_that_has_not_ended_is_of_its_class_too(tmp_path: Path) -> None:
    for name in (NAME, "smoke/throughput"):
        folder = tmp_path / "runs" / run_id(load(name))
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(tomli_w.dumps(_document(load(name))))
    runs = load_records(tmp_path).runs
    classes = runs.groupby("name")["evidence"].unique().map(list).to_dict()
    assert classes == {NAME: ["emulated"], "smoke/throughput": ["measured"]}


def test_a_stack_for_questions_of_memory_takes_no_time() -> None:
    from experiments.resolve import stack_of

    stack = stack_of(load(NAME))
    assert isinstance(stack, EmulatedStack)
    assert stack.device is None
