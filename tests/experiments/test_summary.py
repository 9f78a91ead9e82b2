"""result.json is a pure function of config, environment and events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from experiments.config import Config
from experiments.loading import load
from experiments.summary import contender_events, last_status, record_ids, summarise

ENVIRONMENT = {"evidence": "measured", "machine": {"cpu": "some", "cores": 2}}
LAUNCH = {"event": "launch", "t": 1.0, "attempt": 2, "resumed_from": 2}
OK = {"event": "end", "t": 9.0, "status": "ok", "error": None, "rank": None, "signal": None}


def step(number: int, loss: float | str) -> dict[str, Any]:
    return {"event": "step", "step": number, "epoch": number // 2, "loss": loss, "samples": 64}


def segment(first: int, wall: float) -> dict[str, Any]:
    return {"event": "segment", "kind": "train", "first": first, "last": first + 2} | {
        "wall_s": wall,
        "samples": 128,
        "ranks": [],
    }


TRAINING = [
    LAUNCH,
    step(0, 2.0),
    step(1, 1.5),
    segment(0, 3.0),
    {"event": "evaluation", "step": 2, "epoch": 0, "accuracy": 0.5, "loss": 1.4, "samples": 10},
    step(2, 1.25),
    step(3, 1.0),
    segment(2, 1.0),
    {"event": "evaluation", "step": 4, "epoch": 1, "accuracy": 0.75, "loss": 1.0, "samples": 10},
    OK,
]


@pytest.fixture
def config() -> Config:
    return load("smoke/digits-dapple")


def test_a_training_run(config: Config) -> None:
    result = summarise(config, "digits-dapple-s0-1", ENVIRONMENT, TRAINING)
    expected = {
        "schema": "pipebench.result/1",
        "id": "digits-dapple-s0-1",
        "name": "smoke/digits-dapple",
        "kind": "train",
        "system": "dapple",
        "label": "dapple",
        "seed": 0,
        "status": "ok",
        "error": None,
        "evidence": "measured",
        "machine": ENVIRONMENT["machine"],
        "transport": "distributed",
        "world_size": 2,
        "batch_size": 64,
        "micro_batches": 4,
        "stages": 2,
        "replicas": 1,
        "attempts": 2,
        "final_loss": 1.0,
        "accuracy": 0.75,
        "epochs": 2,
        "steps": 4,
        "train_wall_s": 4.0,
        "images_per_s": 64.0,
    }
    assert {key: result[key] for key in expected} == expected
    assert result.keys() == expected.keys() | {"config_hash"}


def test_a_run_without_an_end_is_unfinished(config: Config) -> None:
    result = summarise(config, "a", ENVIRONMENT, TRAINING[:4])
    assert (result["status"], result["accuracy"], result["steps"]) == ("unfinished", None, 2)
    assert last_status([]) == "unfinished"
    # An end that a resumed attempt has left behind does not count.
    assert last_status([*TRAINING, LAUNCH]) == "unfinished"


def test_a_failure_is_a_row_with_its_reason(config: Config) -> None:
    end = {**OK, "status": "failed", "error": "rank 1 …", "rank": 1, "signal": "SIGKILL"}
    result = summarise(config, "a", ENVIRONMENT, [LAUNCH, end])
    assert (result["status"], result["error"], result["rank"]) == ("failed", "rank 1 …", 1)
    assert (result["signal"], result["final_loss"], result["images_per_s"]) == (
        "SIGKILL",
        None,
        None,
    )


@pytest.mark.parametrize("loss", ["nan", "inf", float("nan")])
def test_a_loss_that_is_no_number_is_strict_json(config: Config, loss: float | str) -> None:
    result = summarise(config, "a", ENVIRONMENT, [LAUNCH, step(0, 2.0), step(1, loss)])
    assert result["final_loss"] is None
    json.dumps(result, allow_nan=False)


SWITCH = ["plan={stages=1, replicas=[2]}", "system={name='dp'}", "switch.epoch=3"]
SWITCH += ["switch.system.name=gpipe", "switch.plan={stages=2, micro_batches=8}"]


def test_a_run_that_switches_is_neither_system() -> None:
    config = load("smoke/digits-dapple", SWITCH)
    result = summarise(config, "a", ENVIRONMENT, TRAINING)
    assert (result["system"], result["label"]) == ("dp → gpipe", "dp → gpipe@3")
    assert (result["stages"], result["replicas"], result["micro_batches"]) == (1, 2, 1)
    then = {"system": "gpipe", "stages": 2, "replicas": 1, "micro_batches": 8}
    assert result["switch"] == then | {"step": None}
    switch = {"event": "switch", "step": 2, "from": "dp", "to": "gpipe", "reason": "after epoch 1"}
    events = [*TRAINING[:5], switch, *TRAINING[5:]]
    assert summarise(config, "a", ENVIRONMENT, events)["switch"] == then | {"step": 2}


def test_ranks_that_take_turns_have_no_time() -> None:
    config = load("smoke/digits-dapple", ["launch.transport=in-process"])
    untimed = [{k: v for k, v in event.items() if k != "wall_s"} for event in TRAINING]
    result = summarise(config, "a", ENVIRONMENT, untimed)
    assert (result["transport"], result["accuracy"], result["steps"]) == ("in-process", 0.75, 4)
    assert (result["train_wall_s"], result["images_per_s"]) == (None, None)


def timed(task: str, number: int, wall: float, compute: float) -> dict[str, Any]:
    ranks = [
        {"rank": rank, "stage": rank, "replica": 0, "wall": wall, "compute": compute + rank}
        for rank in range(2)
    ]
    return {"event": "round", "task": task, "round": number, "position": 0, "steps": 2} | {
        "samples": 64,
        "wall_s": wall,
        "compute_bound_s": None,
        "ranks": ranks,
    }


def test_a_contender_of_a_benchmark() -> None:
    config = load("smoke/throughput")
    events = [LAUNCH, timed("dp", 0, 2.0, 1.0), timed("gpipe", 0, 4.0, 3.0)]
    events += [timed("gpipe", 1, 8.0, 5.0), timed("dp", 1, 2.0, 1.0), OK]
    records = record_ids(config, "b")
    assert list(records)[:3] == ["b.dp", "b.torch-ddp", "b.gpipe"]
    own = contender_events(events, "gpipe")
    assert len(own) == 4
    result = summarise(config, "b.gpipe", ENVIRONMENT, own)
    assert (result["bench_id"], result["system"], result["stages"]) == ("b", "gpipe", 2)
    assert [entry["images_per_s"] for entry in result["rounds"]] == [16.0, 8.0]
    assert result["breakdown"]["1"] == {"stage": 1, "replica": 0, "wall": 6.0, "compute": 5.0}
    data_parallel = summarise(config, "b.dp", ENVIRONMENT, contender_events(events, "dp"))
    assert (data_parallel["stages"], data_parallel["replicas"], data_parallel["world_size"]) == (
        1,
        2,
        2,
    )
