"""What is read of a results directory, and what is said of broken files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from analysis.evidence import Evidence
from analysis.records import load_records
from tests.analysis.builder import Results


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


def test_a_training_run(results: Results) -> None:
    path = results.train("gpipe", seed=3, losses=[2.5, 2.0, 1.5, 1.0], accuracy=0.96)
    with (path / "events.jsonl").open("a") as file:
        file.write('{"event": "evaluation", "step": 3, "epoch": 0, "accuracy": 0.5, "loss": 2}\n')
    (record,) = load_records(results.root)
    assert (record.id, record.system, record.seed, record.status) == (
        "digits-gpipe-s3",
        "gpipe",
        3,
        "ok",
    )
    assert record.evidence is Evidence.MEASURED
    assert [(step.index, step.epoch, step.loss) for step in record.steps] == [
        (0, 0, 2.5),
        (1, 0, 2.0),
        (2, 0, 1.5),
        (3, 1, 1.0),
    ]
    (evaluation,) = record.evaluations
    assert (evaluation.updates, evaluation.accuracy) == (3, 0.5)
    assert record.accuracy == 0.96
    assert record.config["data"]["set"] == "digits"


def test_a_contender_of_a_benchmark(results: Results) -> None:
    seconds = {"wall": 2.0, "compute": 1.5, "optimizer": 0.25, "live_versions": 1}
    results.bench("gpipe", [2.0, 4.0], bounds=[1.0, None], breakdown={"0": seconds, "1": {}})
    (record,) = load_records(results.root)
    assert [timed.images_per_s for timed in record.rounds] == [50.0, 25.0]
    assert [timed.compute_bound_s for timed in record.rounds] == [1.0, None]
    assert record.breakdown == {0: {"wall": 2.0, "compute": 1.5, "optimizer": 0.25}, 1: {}}


@pytest.mark.parametrize("status", ["failed", "oom", "timeout", "diverged", "skipped_hardware"])
def test_failures_are_records(results: Results, status: str) -> None:
    results.train("dp", status=status, error="rank 1: SIGKILL", accuracy=None, losses=[2.0])
    (record,) = load_records(results.root)
    assert (record.status, record.error, record.ok) == (status, "rank 1: SIGKILL", False)


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
    found = [(record.system, record.source) for record in load_records(results.root)]
    assert found == [("gpipe", ""), ("dp", "machine-a")]


# ---- runs that were cut off ----------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 12, 30])
def test_a_last_event_cut_short_is_left_out(results: Results, cut: int) -> None:
    path = results.train("dp", losses=[2.5, 2.0]) / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:cut])
    (record,) = load_records(results.root)
    assert [step.loss for step in record.steps] == [2.5]


def test_a_last_event_cut_within_a_letter_is_left_out(results: Results) -> None:
    path = results.train("dp", losses=[2.5]) / "events.jsonl"
    path.write_bytes(path.read_bytes() + '{"event": "ö'.encode()[:-1])
    assert len(load_records(results.root)[0].steps) == 1


def test_a_run_without_a_result_is_unfinished(results: Results) -> None:
    path = results.train("dapple", seed=2, losses=[2.5, 2.0])
    (path / "result.json").unlink()
    (record,) = load_records(results.root)
    assert (record.system, record.seed, record.status) == ("dapple", 2, "unfinished")
    assert (record.stages, record.micro_batches, len(record.steps)) == (2, 4, 2)


def test_contenders_without_a_record_are_unfinished_and_others_are_not_doubled(
    results: Results,
) -> None:
    results.bench("dp", [1.0], bench_id="bench-1")
    path = results.directory("bench-1")
    results.bench_config(path, ["dp", "gpipe"])
    found = {record.label: record for record in load_records(results.root)}
    assert {label: record.status for label, record in found.items()} == {
        "dp": "ok",
        "gpipe": "unfinished",
    }
    assert found["gpipe"].bench_id == "bench-1"


def test_a_loss_that_is_no_number_is_kept_as_nan(results: Results) -> None:
    path = results.train("dp", losses=[2.5, 2.0], status="diverged") / "events.jsonl"
    path.write_text(path.read_text().replace("2.0", "null", 1).replace("2.5", "NaN", 1))
    (record,) = load_records(results.root)
    assert all(math.isnan(step.loss) for step in record.steps)


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
        ({"status": "fine"}, "unknown status 'fine': one of ok, "),
        ({"evidence": "guessed"}, "unknown evidence class 'guessed'"),
        ({"name": None}, "name is None, but must be of type str"),
        ({"batch_size": "many"}, "batch_size is 'many'"),
        ({"rounds": [{"round": 0, "position": 0, "wall_s": 0.0, "samples": 1}]}, "took 0.0 s"),
        ({"rounds": [{"round": 0}]}, "'position' is missing"),
        ({"breakdown": {"first": {}}}, "first"),
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
    assert len(load_records(results.root)) == 1
    assert json.loads((path / "result.json").read_text())["system"] == "dp"
