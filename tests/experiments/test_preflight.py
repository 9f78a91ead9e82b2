"""What is said before minutes are spent."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace

import pytest

from experiments import preflight
from experiments.errors import UserError
from experiments.loading import load
from experiments.memory import PROCESS_BYTES, memory_needed
from experiments.preflight import check_launch, disk_bytes, missing_hardware
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
    ("settings", "states"),
    [
        (["train.optimizer={name='sgd', momentum=0.9}"], 1),
        (["train.optimizer={name='sgd', momentum=0, lr=0.1}"], 0),
        (["train.optimizer={name='adamw'}"], 2),
    ],
)
def test_bytes_needed(settings: list[str], states: int) -> None:
    config = load("smoke/digits-gpipe", [*settings, "plan.layers=[2, 4]"])
    layers = layers_of(config)
    size = config.train.batch_size
    needed = memory_needed(config, tasks_of(config, layers), size)
    weights = 4 * sum(layers.parameters)
    assert needed["weights"] == weights
    assert needed["optimizer"] == pytest.approx(states * weights, rel=0.01)
    assert needed["processes"] == 2 * PROCESS_BYTES
    # Half the batch, half the activations.
    half = memory_needed(config, tasks_of(config, layers), size // 2)
    assert half["activations"] == pytest.approx(needed["activations"] / 2, rel=0.05)


def test_contenders_keep_their_weights_but_train_in_turn() -> None:
    config = load("smoke/throughput")
    layers = layers_of(config)
    tasks, size = tasks_of(config, layers), config.train.batch_size
    alone = [memory_needed(config, [task], size) for task in tasks]
    needed = memory_needed(config, tasks, size)
    for kind in ("weights", "optimizer"):
        assert needed[kind] == sum(share[kind] for share in alone)
    assert needed["activations"] < sum(share["activations"] for share in alone)


def test_a_model_larger_than_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("vit_h14/throughput", ["launch.device=cpu", "train.precision=float32"])
    tasks = tasks_of(config, layers_of(config))
    monkeypatch.setattr(
        preflight.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 10**9)
    )
    reason = missing_hardware(config, tasks)
    assert reason is not None
    assert re.search(r"8 ranks need \d+\.\d GB of memory here \(.*weights \d+\.\d", reason)
    assert "8.0 GB are free: a smaller twin runs with --set scale=smoke" in reason
    small = load("vit_h14/throughput", ["scale=smoke"])
    assert missing_hardware(small, tasks_of(small, layers_of(small))) is None


def memory(monkeypatch: pytest.MonkeyPatch, free: int, settings: list[str]) -> str | None:
    config = load("smoke/digits-dp", settings)
    found = SimpleNamespace(available=free)
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: found)
    return missing_hardware(config, tasks_of(config, layers_of(config)))


def needed(settings: list[str]) -> int:
    config = load("smoke/digits-dp", settings)
    tasks = tasks_of(config, layers_of(config))
    return memory_needed(config, tasks, config.train.batch_size).total()


def test_memory_that_is_just_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory(monkeypatch, needed([]), []) is None
    assert "2 ranks need" in (memory(monkeypatch, needed([]) - 1, []) or "")


def test_the_largest_batch_that_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = memory(monkeypatch, needed([]) - 1, [])
    found = re.search(r"set train\.batch_size = (\d+), the largest that fits", reason or "")
    assert found is not None
    size = int(found[1])
    fits, too_large = f"train.batch_size={size}", f"train.batch_size={size + 1}"
    assert memory(monkeypatch, needed([]) - 1, [fits]) is None
    assert memory(monkeypatch, needed([]) - 1, [too_large]) is not None


def test_ranks_in_one_process_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their models do; torch is loaded once."""
    alone = ["launch.transport=in-process"]
    assert memory(monkeypatch, needed(alone), alone) is None
    assert memory(monkeypatch, needed(alone), []) is not None
    assert needed([]) - needed(alone) >= PROCESS_BYTES


def test_of_two_systems_the_larger_counts() -> None:
    """They follow each other: a replica of all is more than a stage."""
    switch = "switch={epoch=1, system={name='gpipe'}, plan={stages=2}}"
    assert needed([switch]) == needed([])


def test_a_checkpoint_needs_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("smoke/digits-dp")
    state = 4 * 3 * sum(layers_of(config).parameters)
    assert disk_bytes(config, layers_of(config)) > 2 * state
    several = load("smoke/digits-dp", ["system.name=avgpipe", "plan.pipelines=3"])
    assert disk_bytes(several, layers_of(several)) > 3 * 2 * state
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
    with pytest.raises(UserError, match=r"no whole number of batches of 128"):
        tasks_of(config, layers_of(config))


def test_the_buckets_of_data_parallelism_are_its_peers_too() -> None:
    config = load("smoke/throughput", [])
    options = {task.label: task.options for task in tasks_of(config, layers_of(config))}
    assert options["torch-ddp"] == {"bucket_mb": config.plan.bucket_mb}
    assert options["dp"] == {}
