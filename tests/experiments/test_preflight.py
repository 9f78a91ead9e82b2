"""What is said before minutes are spent."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from experiments import preflight
from experiments.errors import UserError
from experiments.loading import load
from experiments.preflight import check_launch, disk_bytes, missing_hardware, rank_bytes
from experiments.resolve import Layers, bucket_cuts, layers_of, plan_of, tasks_of

LAYERS = Layers(("a", "b", "c", "d"), (10, 20, 30, 40), 10)


def test_a_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"launch.port is {port}, .*already in use"):
            check_launch(load("smoke/digits-dp", [f"launch.port={port}"]))
    check_launch(load("smoke/digits-dp", [f"launch.port={port}"]))


def test_a_precision_that_the_device_lacks() -> None:
    with pytest.raises(UserError, match=r"'tf32', which only CUDA devices have"):
        check_launch(load("smoke/digits-dp", ["train.precision=tf32"]))


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        # Weights and gradients, and what the optimizer keeps.
        (["train.optimizer={name='sgd', momentum=0.9}"], 3),
        (["train.optimizer={name='sgd', momentum=0, lr=0.1}"], 2),
        (["train.optimizer={name='adamw'}"], 4),
    ],
)
def test_bytes_of_a_rank(settings: list[str], numbers: int) -> None:
    config = load("smoke/digits-gpipe", [*settings, "plan.layers=[2, 4]"])
    layers = layers_of(config)
    (task,) = tasks_of(config, layers)
    assert rank_bytes(config, task, layers, 0) == 4 * numbers * sum(layers.parameters[:2])
    assert rank_bytes(config, task, layers, 1) == 4 * numbers * sum(layers.parameters[2:])


def test_a_model_larger_than_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("vit_h14/throughput", ["launch.device=cpu", "train.precision=float32"])
    layers = layers_of(config)
    tasks = tasks_of(config, layers)
    monkeypatch.setattr(
        preflight.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 10**9)
    )
    reason = missing_hardware(config, tasks, layers)
    assert reason is not None
    assert "8 ranks need at least" in reason
    assert "8.0 GB are free" in reason
    assert "--set scale=smoke" in reason
    small = load("vit_h14/throughput", ["scale=smoke"])
    assert missing_hardware(small, tasks_of(small, layers_of(small)), layers_of(small)) is None


def memory(monkeypatch: pytest.MonkeyPatch, free: int, settings: list[str]) -> str | None:
    config = load("smoke/digits-dp", settings)
    layers = layers_of(config)
    found = SimpleNamespace(available=free)
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: found)
    return missing_hardware(config, tasks_of(config, layers), layers)


def test_ranks_in_one_process_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their models do; torch is loaded once."""
    alone = ["launch.transport=in-process"]
    model = 4 * 4 * sum(layers_of(load("smoke/digits-dp")).parameters)
    needed = 2 * model + preflight.PROCESS_BYTES
    assert memory(monkeypatch, needed, alone) is None
    assert memory(monkeypatch, needed, []) is not None
    assert "2 ranks need at least" in (memory(monkeypatch, needed - 1, alone) or "")


def test_of_two_systems_the_larger_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They follow each other: a replica of all is more than a stage."""
    switch = "switch={epoch=1, system={name='gpipe'}, plan={stages=2}}"
    model = 4 * 4 * sum(layers_of(load("smoke/digits-dp")).parameters)
    needed = 2 * model + 2 * preflight.PROCESS_BYTES
    assert memory(monkeypatch, needed, [switch]) is None
    assert memory(monkeypatch, needed - 1, [switch]) is not None


def test_a_checkpoint_needs_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("smoke/digits-dp")
    state = 4 * 3 * sum(layers_of(config).parameters)
    assert disk_bytes(config, layers_of(config)) > 2 * state
    bench = load("smoke/throughput")
    assert disk_bytes(bench, layers_of(bench)) < 10**7


@pytest.mark.parametrize(
    ("bucket", "cuts"),
    [
        (1000, ()),
        (60, (2,)),  # d and c fill one; b and a are the rest.
        (40, (1, 3)),
        (1, (1, 2, 3)),
        (100, ()),  # Full only with the first layer, where there is nothing left to cut.
    ],
)
def test_buckets_fill_from_the_last_layer(bucket: int, cuts: tuple[int, ...]) -> None:
    assert bucket_cuts((10, 20, 30, 40), 0, 4, bucket) == cuts


def test_buckets_count_from_each_stage_anew() -> None:
    assert bucket_cuts((10, 20, 30, 40), 0, 2, 15) == (1,)
    assert bucket_cuts((10, 20, 30, 40), 2, 4, 35) == (3,)


def test_only_replicas_have_buckets() -> None:
    section = load("smoke/digits-dp", ["plan={stages=2, replicas=[2, 1], bucket_mb=1e-5}"]).plan
    plan = plan_of(section, LAYERS, size=1, buckets=True)
    assert [stage.cuts for stage in plan.stages] == [(1,), ()]
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2,)]
    assert all(not s.cuts for s in plan_of(section, LAYERS, size=1, buckets=False).stages)


def test_blocking_data_parallelism_and_peers_have_no_buckets() -> None:
    for name, settings in [
        ("smoke/digits-dp", ["system.options.overlap=false"]),
        ("smoke/digits-torch-ddp", []),
    ]:
        config = load(name, ["plan.bucket_mb=0.01", *settings])
        (task,) = tasks_of(config, layers_of(config))
        assert task.plan.stages[0].cuts == ()
    config = load("smoke/digits-dp", ["plan.bucket_mb=0.01"])
    assert tasks_of(config, layers_of(config))[0].plan.stages[0].cuts


def test_contenders_need_equally_many_ranks() -> None:
    config = load("smoke/throughput", ["bench.contenders.0.plan.replicas=[3]"])
    with pytest.raises(UserError, match=r"equally many ranks, not dp 3, torch-ddp 2"):
        tasks_of(config, layers_of(config))


def test_a_benchmark_trains_whole_batches() -> None:
    config = load("smoke/throughput", ["data.sizes.train=40"])
    with pytest.raises(UserError, match=r"no multiple .* 32: set data.sizes.train = 32"):
        tasks_of(config, layers_of(config))
    config = load("smoke/throughput", ["bench.contenders.0.batch_size=48"])
    with pytest.raises(UserError, match=r"no multiple of dp's batch_size 48: set data.sizes"):
        tasks_of(config, layers_of(config))
    config = load("smoke/throughput", ["bench.contenders.0.batch_size=128"])
    with pytest.raises(UserError, match=r"no multiple of dp's batch_size 128"):
        tasks_of(config, layers_of(config))


def test_the_buckets_of_data_parallelism_are_its_peers_too() -> None:
    config = load("smoke/throughput", [])
    options = {task.label: task.options for task in tasks_of(config, layers_of(config))}
    assert options["torch-ddp"] == {"bucket_mb": config.plan.bucket_mb}
    assert options["dp"] == {}
