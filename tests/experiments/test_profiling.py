"""`pipebench profile` as its user sees it: what it writes, and what it refuses at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import commands, profiling
from experiments.cli import main
from experiments.launcher import rank_command
from experiments.outcome import Outcome
from experiments.profiling import profile_text
from runtimes.planning import concurrency, measurement
from runtimes.planning.profile import Profile

ROOT = Path(__file__).resolve().parents[2]
TINY = ["VisionTransformer", "--batch-sizes=1,2", "--image-size=8", "--repeats=1"]
TINY += [f"--arg={key}" for key in ("embed_dim=8", "depth=3", "num_heads=1", "patch_size=4")]
A100 = ["--device-spec", "a100-80gb"]


class Answer:
    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def measured_here(run_dir: Path, spec: Any, *, watch: Callable[[], None], **_: object) -> Outcome:
    """A rank's work in this process."""
    assert spec.command[-2:] == (str(run_dir), "runtimes.planning.measurement")
    assert spec.ranks == 1
    code = measurement.run_rank(run_dir)
    watch()
    return Outcome("ok") if code == 0 else Outcome("failed")


def not_launched(*_: object, **__: object) -> Outcome:
    raise AssertionError("what is refused is not launched")


@pytest.fixture
def pipebench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Any:
    monkeypatch.setattr(commands.Interruption, "install", lambda self: None)
    monkeypatch.setattr(profiling, "launch", not_launched)
    monkeypatch.setattr(concurrency, "_LEAST_SECONDS", 0.01)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)

    def call(*words: str, output: Path = tmp_path / "profile.json") -> Answer:
        monkeypatch.setattr(sys, "argv", ["pipebench", "profile", *words, "-o", str(output)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Answer(ended.value.code, *capfd.readouterr())

    return call


def test_a_measured_profile(
    pipebench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "launch", measured_here)
    answer = pipebench(*TINY)
    assert (answer.code, answer.err) == (0, "profile: end\n")
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.source == "measured"
    assert profile.image == (3, 8, 8)
    assert profile.model.args["img_size"] == 8
    assert sorted(profile.layers[0].forward_seconds) == [1, 2]
    known = profile.provenance
    assert known["repeats"] == known["threads_a_rank"] == 1
    assert "torch" in known["versions"]
    assert known["machine"]["cores"] >= 1
    rows = answer.out.splitlines()
    assert [row.split()[0] for row in rows[:5]] == ["layer", "embed", "blocks.0", "head", "total"]
    assert "(each of 3)" in rows[2]
    assert rows[-1] == f"written to {tmp_path / 'profile.json'}"


def test_a_rank_does_the_work_of_the_module_that_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "other_work.py").write_text(
        "def run_rank(run_dir):\n    (run_dir / 'done').touch()\n    return 7\n"
    )
    command = (*rank_command(tmp_path), "other_work")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=60)
    assert done.returncode == 7
    assert (tmp_path / "done").exists()


def test_a_computed_profile(pipebench: Any, tmp_path: Path) -> None:
    answer = pipebench(*TINY, *A100, "--precision=bf16", "--memory-efficiency=0.5", "--json")
    assert (answer.code, answer.err) == (0, "")
    document = json.loads(answer.out)
    profile = Profile.load(tmp_path / "profile.json")
    assert Profile.from_json(document) == profile
    assert (profile.source, profile.device) == ("analytic", "a100-80gb")
    known = profile.provenance
    assert (known["compute_efficiency"], known["memory_efficiency"]) == (0.5, 0.5)
    assert "machine" not in known
    assert "analytic for a100-80gb in bf16" in profile_text(profile)


def test_a_config_names_model_and_images(pipebench: Any, tmp_path: Path) -> None:
    answer = pipebench("smoke/digits-dapple", "--set=model.args.depth=2", *A100)
    assert answer.code == 0, answer.err
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.image[0] == 1
    assert [layer.name for layer in profile.layers] == ["embed", "blocks.0", "blocks.1", "head"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["VisionTransfomer"], "unknown model 'VisionTransfomer': did you mean VisionTransformer"),
        (["smoke/digit-dapple"], "digits-dapple"),
        ([*TINY, "--batch-sizes=0"], "a batch size is 0, but must be at least 1 sample"),
        ([*TINY, "--batch-sizes=4,4"], "batch sizes [4, 4] must be one or more different"),
        ([*TINY, "--batch-sizes=1;2"], "--batch-sizes '1;2' must be numbers"),
        ([*TINY, "--arg=img_size=16"], "img_size=16"),
        ([*TINY, "--arg=dept=3"], "did you mean 'depth' for 'dept'?"),
        ([*TINY, "--precision=fp16"], "precision 'fp16' is none of float32, tf32, bf16, float64"),
        ([*TINY, "--precision=tf32"], "only CUDA devices have tf32"),
        ([*TINY, "--device=tpu"], "device 'tpu' is none of cpu, cuda"),
        ([*TINY, "--device-spec=a100"], "unknown device 'a100': choose one of a100-80gb"),
        ([*TINY, "--device-spec=v100-32gb", "--precision=bf16"], "v100-32gb has no bf16"),
        ([*TINY, *A100, "--compute-efficiency=0"], "the compute efficiency is 0.0, but must lie"),
        ([*TINY, "--compute-efficiency=1"], "name its --device-spec"),
        ([*TINY, *A100, "--ranks=2"], "drop one"),
        ([*TINY, "--ranks=0"], "--ranks"),
        ([*TINY, "--repeats=0"], "--repeats"),
        ([*TINY, "--set=train.epochs=2"], "--set changes a config"),
        (["smoke/digits-dapple", "--image-size=8"], "change them by --set"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    pipebench: Any, tmp_path: Path, words: list[str], says: str
) -> None:
    answer = pipebench(*words)
    assert (answer.code, answer.out) == (2, "")
    (line,) = answer.err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not (tmp_path / "profile.json").exists()


def test_devices_that_are_not_here_are_refused(
    pipebench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    answer = pipebench(*TINY, "--device=cuda", "--ranks=2")
    assert answer.code == 2
    assert "2 rank(s) need a device 'cuda' each, and this machine has 1: use" in answer.err


def test_a_place_that_cannot_be_written_is_refused_at_once(pipebench: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, why in (
        (tmp_path / "no" / "such", "no such file or directory"),
        (tmp_path / "file" / "below", "not a directory"),
        (tmp_path, "is a folder"),
    ):
        answer = pipebench(*TINY, output=place)
        assert answer.code == 2
        assert str(place) in answer.err
        assert why in answer.err


def test_ranks_that_fail_say_why(pipebench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run_dir: Path, spec: object, **_: object) -> Outcome:
        return Outcome("oom", "rank 0 failed during round 1 of 1: MemoryError")

    monkeypatch.setattr(profiling, "launch", fail)
    answer = pipebench(*TINY)
    assert answer.code == 1
    assert "no profile: oom: rank 0 failed during round 1 of 1: MemoryError" in answer.out


def test_an_interrupted_profile_exits_with_3(
    pipebench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(run_dir: Path, spec: object, *, stop: threading.Event, **_: object) -> Outcome:
        assert not stop.is_set()
        return Outcome("interrupted", "ended by Ctrl-C or SIGTERM")

    monkeypatch.setattr(profiling, "launch", stopped)
    assert pipebench(*TINY).code == 3


def test_batch_norm_is_profiled_per_unit_of_two_or_more(pipebench: Any, tmp_path: Path) -> None:
    words = ["resnet18", "--image-size", "32", *A100]
    for given, said in (
        ([], 'batch_norm = "per-unit"'),
        (["--batch-norm", "per-batch"], "is none of per-unit"),
        (["--batch-norm", "per-unit"], "layer4.0.bn1 sees 1 value a channel"),
        (["--batch-norm", "per-unit", "--in-chans", "1"], "takes images of 3 channels, not 1"),
    ):
        answer = pipebench(*words, *given)
        assert answer.code == 2
        assert said in answer.err
        assert answer.err.count("\n") == 1
    answer = pipebench(*words, "--batch-norm", "per-unit", "--batch-sizes", "2")
    assert answer.code == 0
    found = Profile.load(tmp_path / "profile.json")
    assert (found.model.batch_norm, found.image) == ("per-unit", (3, 32, 32))
