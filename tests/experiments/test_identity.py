"""Which changes make another run."""

from __future__ import annotations

import pytest

from experiments.identity import bench_of, config_hash, contender_id, run_id
from experiments.loading import load
from experiments.paths import REPOSITORY

NAME = "smoke/digits-dapple"
REFERENCE = REPOSITORY / "results" / "reference"

COSMETIC = [
    "name=other",
    'tiers=["x"]',
    "tracking.mode=off",
    "train.action_timeout_s=3",
    "train.seeds=[0]",
    "data.root=/elsewhere",
    "data.download=true",
    "launch.port=29500",
    "launch.address=10.0.0.1",
    "launch.local_address=10.0.0.1",
    # The default, written down.
    "system.options.policy=A",
]
ESSENTIAL = [
    "train.seed=1",
    "train.epochs=2",
    "train.precision=bf16",
    "train.evaluate_every=1",
    "train.checkpoint_every=2",
    "train.optimizer.lr=0.01",
    "train.learning_rate.floor=0.1",
    "plan.micro_batches=2",
    "plan.layers=[2, 4]",
    "plan.recompute=true",
    "model.args.depth=5",
    "model.batch_norm=per-unit",
    "data.seed=1",
    "data.augmentation.flip=true",
    "system.options.policy=B",
    "launch.pin_cores=true",
    "launch.transport=in-process",
    "train.start_from=some-run",
    "switch={epoch=1, system={name='dp'}, plan={replicas=[2]}}",
]


@pytest.mark.parametrize("setting", COSMETIC)
def test_cosmetic_keys_leave_the_run_as_it_is(setting: str) -> None:
    assert run_id(load(NAME, [setting])) == run_id(load(NAME))


@pytest.mark.parametrize("setting", ESSENTIAL)
def test_every_other_key_makes_another_run(setting: str) -> None:
    assert config_hash(load(NAME, [setting])) != config_hash(load(NAME))


def test_keys_that_came_later_leave_earlier_runs_their_names() -> None:
    """Records of before name their runs by the hash of a config without the key."""
    known = {path.name for path in REFERENCE.glob("*/*")}
    for name in ("digits-dapple", "digits-ashpipe", "digits-ashpipe-sp", "digits-torch-ddp"):
        assert run_id(load(f"smoke/{name}")) in known


def test_the_id_says_what_it_is() -> None:
    config = load(NAME)
    assert run_id(config) == f"digits-dapple-s0-{config_hash(config)[:8]}"
    assert run_id(load("smoke/throughput")).startswith("random-bench-s0-")


def test_a_benchmark_is_what_its_contenders_do() -> None:
    name = "smoke/throughput"
    explicit = load(name, ["bench.contenders.2.plan.micro_batches=4"])
    assert run_id(explicit) == run_id(load(name)), "the plan's own value, written down"
    changed = load(name, ["bench.contenders.2.plan.micro_batches=2"])
    assert run_id(changed) != run_id(load(name))
    assert run_id(load(name, ["bench.contenders.2.label=other"])) != run_id(load(name))


def test_a_switch_is_part_of_the_run() -> None:
    switch = "switch={{epoch={}, system={{name='dapple'{}}}, plan={{stages=2}}}}"
    one = load(NAME, [switch.format(1, "")])
    assert run_id(one).startswith("digits-dapple-dapple-s0-")
    assert run_id(load(NAME, [switch.format(1, ", options={policy='A'}")])) == run_id(one)
    assert run_id(load(NAME, [switch.format(1, ", options={policy='B'}")])) != run_id(one)
    assert run_id(load(NAME, [switch.format(2, "")])) != run_id(one)


def test_contenders_know_their_benchmark() -> None:
    assert bench_of(contender_id("random-bench-s0-12345678", "dp")) == "random-bench-s0-12345678"
    assert bench_of("digits-dapple-s0-12345678") is None
