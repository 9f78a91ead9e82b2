"""The command line as its user sees it: stdout, stderr, exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import commands, runner
from experiments.cli import main
from experiments.outcome import Outcome
from tests.runtimes.planning.profiles import profile_of

ROOT = Path(__file__).resolve().parents[2]


class Answer:
    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def pipebench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Any:
    """Calls the command in this process, ranks being stood in for by nothing."""
    monkeypatch.setenv("PIPEBENCH_RESULTS", str(tmp_path / "results"))
    # Signals belong to pytest here.
    monkeypatch.setattr(commands.Interruption, "install", lambda self: None)
    monkeypatch.setattr(runner, "launch", lambda *_, **__: Outcome("ok"))

    def call(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["pipebench", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return Answer(ended.value.code, *capfd.readouterr())

    return call


TINY = ["--set", "tracking.mode=off", "--set", "model.args.embed_dim=8"]
TINY += ["--set", "model.args.num_heads=1"]


def test_systems(pipebench: Any) -> None:
    answer = pipebench("systems", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert answer.document["schema"] == "pipebench.systems/1"
    systems = {system["name"]: system for system in answer.document["systems"]}
    assert systems["torch-1f1b"]["peer_of"] == "dapple"
    policy = {"kind": "choice", "default": "A", "allowed": ["A", "B"]}
    assert systems["dapple"]["options"]["policy"] == policy
    assert systems["avgpipe"]["options"]["advance"] == {
        "kind": "integer",
        "default": 0,
        "at_least": 0,
    }
    assert "policy = A | B (default A)" in pipebench("systems").out


def test_schedule(pipebench: Any) -> None:
    answer = pipebench("schedule", "dapple", "--stages", "2", "--units", "2", "--json")
    document = answer.document
    assert (answer.code, document["schema"]) == (0, "pipebench.schedule/1")
    assert document["ranks"][1]["stage"] == 1
    assert "p0.s1.r0.F0@0" in document["ranks"][1]["actions"]
    drawn = pipebench("schedule", "dapple", "--stages", "2", "--units", "2").out
    assert drawn.splitlines() == [line.rstrip() for line in document["grid"]]
    with_b = pipebench("schedule", "dapple", "--stages=3", "--units=6", "--set", "policy=B")
    assert with_b.out != pipebench("schedule", "dapple", "--stages=3", "--units=6").out


def test_a_schedule_to_scale(pipebench: Any, tmp_path: Path) -> None:
    """Two stages of two layers: forwards of 9.1 and 21.1 ms, backwards of 18 and 42 ms."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile_of().to_json()))
    words = ("schedule", "dapple", "--stages=2", "--units=2", "--profile", str(path))
    first, *rows = pipebench(*words).out.splitlines()
    assert first.startswith(f"a column is 5 ms of {path}, a unit 8 samples; messages")
    drawn = [row.split(" | ")[1].split() for row in rows]
    assert drawn == [
        [*["F0", "F0", "F1", "F1"], *["."] * 10, *["B0"] * 4, *["."] * 9, *["B1"] * 4],
        [*[".", "."], *["F0"] * 4, *["B0"] * 8, *["F1"] * 5, *["B1"] * 8, *["."] * 4],
    ]
    document = pipebench(*words, "--json").document
    assert (document["column_seconds"], document["unit_samples"]) == (0.005, 8)
    assert document["grid"] == rows
    # Nine replicas that share a unit of nine samples hold less than was profiled.
    refused = pipebench(*words, "--replicas=9")
    assert (refused.code, refused.out) == (2, "")
    assert "is profiled for 2, 8 samples, not for 1" in refused.err


def test_matrix_lists_and_plans(pipebench: Any, tmp_path: Path) -> None:
    listed = pipebench("matrix", "--tier", "smoke", "--list", "--json").document
    assert listed["schema"] == "pipebench.configs/1"
    assert listed["configs"][-1]["kind"] == "bench"
    planned = pipebench("matrix", "--tier=smoke", "--only=smoke/digits-d*", "--dry-run", "--json")
    assert [config["intent"] for config in planned.document["configs"]] == ["run", "run"]
    assert not (tmp_path / "results").exists(), "a dry run writes nothing"


def test_a_run_prints_its_result_alone_on_stdout(pipebench: Any) -> None:
    answer = pipebench("run", "smoke/digits-dp", *TINY, "--json")
    assert (answer.code, answer.document["schema"]) == (0, "pipebench.runs/1")
    (result,) = answer.document["runs"]
    assert (result["system"], result["status"]) == ("dp", "ok")
    # Not a terminal: plain lines, each whole.
    lines = answer.err.splitlines()
    assert lines[-1] == "smoke/digits-dp: ok"
    assert all(line.startswith("smoke/digits-dp: ") for line in lines)
    again = pipebench("run", "smoke/digits-dp", *TINY)
    assert "done before" in again.err
    assert result["id"] in again.out


def test_a_failed_run_exits_with_1_and_says_why_once(
    pipebench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "launch", lambda *_, **__: Outcome("failed", "rank 1 fell", 1))
    answer = pipebench("run", "smoke/digits-dp", *TINY, "--json")
    assert answer.code == 1
    assert answer.document["runs"][0]["error"] == "rank 1 fell"
    assert answer.err.count("rank 1 fell") == 1
    assert pipebench("matrix", "--tier=smoke", "--only=*-dp", *TINY).code == 1


def test_matrix_reports_every_row(pipebench: Any) -> None:
    words = ["matrix", "--tier=smoke", "--only=smoke/digits-d*", *TINY, "--json"]
    document = pipebench(*words).document
    assert document["schema"] == "pipebench.matrix/1"
    rows = [(row["title"], row["status"]) for row in document["rows"]]
    assert rows == [("smoke/digits-dapple", "ok"), ("smoke/digits-dp", "ok")]
    refused = pipebench(*words, "--set", "model.args.in_chans=2")
    assert refused.code == 2
    assert [row["status"] for row in refused.document["rows"]] == ["refused", "refused"]


def test_an_interruption_exits_with_3(pipebench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "launch", lambda *_, **__: Outcome("interrupted", "Ctrl-C"))
    assert pipebench("run", "smoke/digits-dp", *TINY).code == 3

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "systems_document", interrupted)
    answer = pipebench("systems")
    assert (answer.code, answer.out) == (3, "")
    assert answer.err == "interrupted: the same command goes on from here\n"


WRONG = {
    "": "Missing command",
    "rum smoke/digits-dp": "No such command 'rum'",
    "run": "Missing argument 'CONFIG'",
    "run smoke/digits-dp --fres": "No such option",
    "run smoke/digit-dp": "did you mean 'smoke/digits-dp'?",
    "run smoke/digits-dp --set system.name=dpp": "unknown system 'dpp'",
    "run smoke/digits-dp --set train.epoch=1": "unknown key 'epoch'",
    "run smoke/digits-dp --set train.batch_size=0": "must be at least 1",
    "run smoke/digits-dapple --set plan.stages=7": "the model has 6 layers",
    "run cifar100/dp-2 --set scale=smoke --data-root /no/where": "no CIFAR-100 in /no/where",
    "bench smoke/digits-dp": "has no [bench] section",
    "matrix": "Missing option '--tier'",
    "matrix --tier smok": "did you mean 'smoke'?",
    "matrix --tier smoke --jobs 0": "--jobs",
    "schedule dappel --stages 2 --units 2": "did you mean 'dapple'?",
    "schedule torch-ddp --stages 2 --units 2": "torch-ddp is a peer",
    "schedule dapple --stages 0 --units 2": "'--stages'",
    "schedule dapple --stages 2 --units 2 --profile no.json": "cannot read the profile no.json",
    "schedule ashpipe --stages 3 --units 2 --replicas 1,0,2": "--replicas is '1,0,2', but 3 stages",
    "schedule ashpipe --stages 3 --units 2 --replicas 1,2": "--replicas is '1,2', but 3 stages",
    "schedule pipedream_2bw --stages 4 --units 3": "as many micro-batches as stages",
    "schedule dp --stages 2 --units 2": "dp has one stage, not 2",
    "tables": "no runs in",
    "figure throughput": "no runs in",
    "figure troughput": "throughput",
}


@pytest.mark.parametrize(("words", "said"), WRONG.items(), ids=WRONG.keys())
def test_what_the_user_did_wrong_is_one_line_and_exit_2(
    pipebench: Any, words: str, said: str
) -> None:
    answer = pipebench(*words.split())
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert said in answer.err
    assert len(answer.err) < 600


SWITCH = "train.epochs=3 switch={{epoch={},system={{name='{}'}},plan={{stages=2{}}}}}"

#: Settings of a run of dapple on 2 stages, 4 micro-batches: what is said of value, limit, way out.
UNFIT = {
    "plan.replicas=[1]": ("replicas has 1 values for 2 stages: one a stage",),
    "plan.replicas=[2,0]": ("plan.replicas.1 is 0, but must be at least 1",),
    "plan.replicas=2": ("plan.replicas is 2, but must be a list",),
    "system.name=ashpipe": ("plan.micro_batches is 4", "set it to 1"),
    "system.name=pipedream": ("plan.micro_batches is 4", "set it to 1"),
    "system.name=pipedream_2bw plan.replicas=[1,2]": (
        "not [1, 2]",
        "choose one number, or ashpipe",
    ),
    "system.name=pipedream_2bw plan.micro_batches=1": (
        "plan.micro_batches is 1 with 2 stages",
        "use 2 or more",
    ),
    "system.name=pipedream_2bw system.options.drain=run": ("pipedream_2bw has no option 'drain'",),
    "system.name=ashpipe system.options.drain=epochs": ("one of 'epoch', 'run'",),
    "system.name=ashpipe plan.micro_batches=1 train.optimizer.clip=1": (
        "ashpipe steps its stages at different times",
        'set optimizer.clip_by = "stage"',
    ),
    "system.name=pipedream plan.micro_batches=1 train.optimizer.clip=1": (
        "pipedream steps its stages at different times",
        'set optimizer.clip_by = "stage"',
    ),
    "system.name=pipedream plan.micro_batches=1 plan.replicas=[1,2] "
    "system.options.vertical_sync=true": (
        "vertical_sync",
        "with [1, 2] replicas",
        "give every stage 1 replica, or leave it off",
    ),
    "train.optimizer.clip=0": ("train.optimizer.clip is 0, but must be above 0",),
    "train.optimizer.clip=inf": ("train.optimizer.clip is inf, but must be a finite number",),
    "train.optimizer.clip_by=stage": (
        'train.optimizer.clip_by is "stage", but nothing is clipped',
        "set train.optimizer.clip to the largest norm, or leave clip_by out",
    ),
    "train.optimizer.lr=inf": ("train.optimizer.lr is inf, but must be a finite number",),
    "system.name=torch-1f1b train.optimizer.clip=1": (
        "torch-1f1b does not clip gradients",
        "leave optimizer.clip out",
    ),
    SWITCH.format(3, "ashpipe", ""): ("switch.epoch is 3, but must be 1 … 2", "train for longer"),
    SWITCH.format(1, "ashpipe", ",replicas=[2,3]"): (
        "equally many ranks, not dapple 2, ashpipe 5",
    ),
    SWITCH.format(1, "pipedream_2bw", ""): ("plan.micro_batches is 1 with 2 stages", "use 2 or"),
    SWITCH.format(1, "ashpipe", "") + " train.optimizer.clip=1": ("ashpipe steps its stages",),
}


@pytest.mark.parametrize(("settings", "said"), UNFIT.items(), ids=UNFIT.keys())
def test_what_a_system_cannot_do_is_one_line_with_the_way_out(
    pipebench: Any, settings: str, said: tuple[str, ...]
) -> None:
    words = [word for setting in settings.split() for word in ("--set", setting)]
    answer = pipebench("run", "smoke/digits-dapple", *words)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert all(part in answer.err for part in said), answer.err


@pytest.mark.parametrize("command", ["run smoke/digits-dp", "matrix --tier smoke"])
def test_results_that_are_a_file(
    pipebench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIPEBENCH_RESULTS", str(tmp_path / "file"))
    answer = pipebench(*command.split())
    assert (answer.code, answer.out) == (2, "")
    assert "not a directory" in answer.err
    assert answer.err.count("\n") == 1


def test_a_fault_of_ours_is_not_blamed_on_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(commands, "systems_document", broken)
    monkeypatch.setattr(sys, "argv", ["pipebench", "systems"])
    with pytest.raises(ValueError, match="a bug"):
        main()


def test_results_lie_in_the_repository_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiments.paths import results_root

    monkeypatch.chdir(tmp_path)
    assert results_root() == ROOT / "results"
    monkeypatch.setenv("PIPEBENCH_RESULTS", "here")
    assert results_root() == tmp_path / "here"


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    code = "from experiments.cli import main; main()"
    words = ["schedule", "gpipe", "--stages=4", "--units=2000"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
