"""What is read of a results directory, and what is said of broken files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.records import PARTS, Records, load_records
from tests.analysis.builder import Results


def only(records: Records) -> Any:
    """The one run there is."""
    (run,) = records.runs.to_dict("records")
    return SimpleNamespace(**run)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


def test_a_training_run(results: Results) -> None:
    path = results.train("gpipe", seed=3, losses=[2.5, 2.0, 1.5, 1.0], accuracy=0.96)
    with (path / "events.jsonl").open("a") as file:
        file.write('{"event": "evaluation", "step": 3, "epoch": 0, "accuracy": 0.5, "loss": 2}\n')
    records = load_records(results.root)
    record = only(records)
    assert (record.id, record.system, record.seed, record.status) == (
        "digits-gpipe-s3",
        "gpipe",
        3,
        "ok",
    )
    assert record.evidence == "measured"
    assert records.steps.to_dict("split")["data"] == [
        [0, 0, 0, 2.5, 90],
        [0, 1, 0, 2.0, 90],
        [0, 2, 0, 1.5, 90],
        [0, 3, 1, 1.0, 90],
    ]
    assert records.steps.columns.tolist() == ["run", "step", "epoch", "loss", "samples"]
    (evaluation,) = records.evaluations.itertuples()
    assert (evaluation.step, evaluation.accuracy) == (3, 0.5)
    assert record.accuracy == 0.96
    assert record.config["data"]["set"] == "digits"


def test_a_contender_of_a_benchmark(results: Results) -> None:
    seconds = {"wall": 2.0, "compute": 1.5, "optimizer": 0.25, "live_versions": 1}
    results.bench("gpipe", [2.0, 4.0], bounds=[1.0, None], breakdown={"0": seconds, "1": {}})
    records = load_records(results.root)
    assert records.rounds["images_per_s"].tolist() == [50.0, 25.0]
    assert records.rounds["compute_bound_s"].tolist() == pytest.approx([1.0, math.nan], nan_ok=True)
    assert records.ranks.columns.tolist() == ["run", "rank", "wall", *PARTS]
    known, unknown = (rank.dropna().to_dict() for _, rank in records.ranks.iterrows())
    assert known == {"run": 0, "rank": 0, "wall": 2.0, "compute": 1.5, "optimizer": 0.25}
    assert unknown == {"run": 0, "rank": 1}


def test_of_a_round_that_is_there_twice_the_last_counts(results: Results) -> None:
    path = results.bench("dp", [2.0, 4.0]) / "result.json"
    path.write_text(path.read_text().replace('"round": 1', '"round": 0'))
    (timed,) = load_records(results.root).rounds.itertuples()
    assert (timed.round, timed.wall_s) == (0, 4.0)


@pytest.mark.parametrize("status", ["failed", "oom", "timeout", "diverged", "skipped_hardware"])
def test_failures_are_records(results: Results, status: str) -> None:
    results.train("dp", status=status, error="rank 1: SIGKILL", accuracy=None, losses=[2.0])
    record = only(load_records(results.root))
    assert (record.status, record.error) == (status, "rank 1: SIGKILL")


@pytest.mark.parametrize("results_dir", ["nothing", "empty", "file"])
def test_no_runs_says_what_to_do(tmp_path: Path, results_dir: str) -> None:
    path = tmp_path / results_dir
    if results_dir == "empty":
        (path / "runs").mkdir(parents=True)
    elif results_dir == "file":
        path.write_text("")
    with pytest.raises(ValueError, match=f"no runs in {path}: run ./reproduce.sh first"):
        load_records(path)


def test_fresh_runs_come_first_and_references_say_whose_they_are(results: Results) -> None:
    results.train("dp", source="machine-a")
    results.train("gpipe")
    runs = load_records(results.root).runs
    assert runs[["system", "source"]].values.tolist() == [["gpipe", ""], ["dp", "machine-a"]]


# ---- runs that were cut off ----------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 12, 30])
def test_a_last_event_cut_short_is_left_out(results: Results, cut: int) -> None:
    path = results.train("dp", losses=[2.5, 2.0]) / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:cut])
    assert load_records(results.root).steps["loss"].tolist() == [2.5]


def test_a_last_event_cut_within_a_letter_is_left_out(results: Results) -> None:
    path = results.train("dp", losses=[2.5]) / "events.jsonl"
    path.write_bytes(path.read_bytes() + '{"event": "ö'.encode()[:-1])
    assert len(load_records(results.root).steps) == 1


def test_a_run_without_a_result_is_unfinished(results: Results) -> None:
    path = results.train("dapple", seed=2, losses=[2.5, 2.0])
    (path / "result.json").unlink()
    records = load_records(results.root)
    record = only(records)
    assert (record.system, record.seed, record.status) == ("dapple", 2, "unfinished")
    assert (record.stages, record.micro_batches, len(records.steps)) == (2, 4, 2)


SWITCH = """
[switch]
epoch = 3
[switch.system]
name = "gpipe"
[switch.plan]
stages = 2
micro_batches = 8
"""


def test_a_run_that_switches_has_two_plans_and_a_label(results: Results) -> None:
    then = {"system": "gpipe", "stages": 2, "replicas": 1, "micro_batches": 8, "step": 9}
    told = {"label": "dp → gpipe@3", "switch": then}
    path = results.train("dp → gpipe", **told, stages=1, replicas=2, micro_batches=1)
    (path / "config.toml").write_text((path / "config.toml").read_text() + SWITCH)
    finished = only(load_records(results.root))
    assert finished.plan == "R=2 → S=2 M=8"
    (path / "result.json").unlink()
    config = (path / "config.toml").read_text().replace("dp → gpipe", "dp")
    (path / "config.toml").write_text(config)
    unfinished = only(load_records(results.root))
    assert (unfinished.system, unfinished.label) == (finished.system, finished.label)
    assert unfinished.plan.endswith(" → S=2 M=8")


def test_contenders_without_a_record_are_unfinished_and_others_are_not_doubled(
    results: Results,
) -> None:
    results.bench("dp", [1.0], bench_id="bench-1")
    path = results.directory("bench-1")
    results.bench_config(path, ["dp", "gpipe"])
    found = load_records(results.root).runs.set_index("label")
    assert found["status"].to_dict() == {"dp": "ok", "gpipe": "unfinished"}
    assert found["bench_id"]["gpipe"] == "bench-1"


def test_a_loss_that_is_no_number_is_kept_as_nan(results: Results) -> None:
    path = results.train("dp", losses=[2.5, 2.0, 1.5], status="diverged") / "events.jsonl"
    for loss, text in (("2.5", "NaN"), ("2.0", "null"), ("1.5", '"nan"')):
        path.write_text(path.read_text().replace(loss, text, 1))
    assert load_records(results.root).steps["loss"].isna().tolist() == [True, True, True]


# ---- broken files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("result.json", b"{", "Expecting property name"),
        ("result.json", b"[]", "list"),
        ("result.json", b"\xff\xfe", "decode"),
        ("result.json", b"{}", "'schema' is missing"),
        ("config.toml", b"a = ", "Invalid value"),
        ("config.toml", b"\xff", "decode"),
        ("events.jsonl", b'{"event": "step"\n{"event": "end"}\n', "line 1 is not JSON"),
        ("events.jsonl", b'{"event": "end"}\n{"event": "step"}\n', "line 2 is not a valid event"),
        ("events.jsonl", b"[1]\n{}\n", "line 1 is not a valid event"),
    ],
)
def test_a_broken_file_is_named_in_one_line(
    results: Results, name: str, content: bytes, reason: str
) -> None:
    path = results.train("dp") / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is broken: .*{reason}") as caught:
        load_records(results.root)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": "pipebench.result/0"}, "pipebench.result/1"),
        ({"status": "fine"}, "status is 'fine', but must be 'ok', 'failed', "),
        ({"evidence": "guessed"}, "unknown evidence class 'guessed'"),
        ({"name": None}, "name is None, but must be a valid string"),
        ({"batch_size": "many"}, "batch_size is 'many', but must be a valid integer"),
        (
            {"rounds": [{"round": 0, "position": 0, "wall_s": 0.0, "samples": 1}]},
            "rounds.0.wall_s is 0.0, but must be greater than 0",
        ),
        ({"rounds": [{"round": 0}]}, "'position' is missing"),
        ({"breakdown": {"first": {}}}, "first"),
        ({"seed": True}, "seed is True, but must be a valid integer"),
        ({"accuracy": "0.9"}, "accuracy is '0.9', but must be a valid number"),
    ],
)
def test_a_result_that_says_what_cannot_be_is_named(
    results: Results, changes: dict[str, object], reason: str
) -> None:
    path = results.bench("dp", [1.0], **changes) / "result.json"
    with pytest.raises(ValueError, match=f"{path} is broken: .*{reason}"):
        load_records(results.root)


def test_a_file_that_cannot_be_read_is_named(results: Results) -> None:
    path = results.train("dp") / "events.jsonl"
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=f"{path} is broken"):
        load_records(results.root)


def test_other_files_are_not_looked_at(results: Results) -> None:
    path = results.train("dp")
    (path / "job.json").write_text("{")
    (path / "ranks").mkdir()
    (results.root / "runs" / ".probe").write_text("")
    assert len(load_records(results.root).runs) == 1
    assert json.loads((path / "result.json").read_text())["system"] == "dp"
