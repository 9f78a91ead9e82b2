"""Sweeps: which runs they are, what they refuse, and the value taken from a finished one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from experiments import commands, runner
from experiments.best_of import load_resolved
from experiments.cli import main
from experiments.errors import UserError
from experiments.identity import run_id
from experiments.loading import load, load_runs
from experiments.outcome import Outcome
from experiments.resolve import layers_of, tasks_of
from experiments.store import Store
from experiments.sweep import axes_of, point_text, points

BASE = """
[system]
name = "dapple"
[plan]
stages = 2
[model]
name = "VisionTransformer"
[model.args]
img_size = 8
patch_size = 4
in_chans = 1
num_classes = 10
embed_dim = 8
depth = 2
num_heads = 1
[data]
set = "digits"
image_size = 8
[train]
batch_size = 4
[train.optimizer]
momentum = 0.9
"""
SWEEP = BASE + "[data.sizes]\nheld_out = 300\n[sweep]\ntrain.optimizer.lr = [0.1, 0.01, 1.0]\n"


def write(folder: Path, text: str, name: str) -> str:
    (folder / f"{name}.toml").write_text(text)
    return str(folder / f"{name}.toml")


@pytest.fixture
def sweep(tmp_path: Path) -> str:
    return write(tmp_path, SWEEP, "sweep")


@pytest.fixture
def study(tmp_path: Path, sweep: str) -> str:
    seeds = BASE.replace("[train]\n", "[train]\nseeds = [1, 2]\n")
    return write(tmp_path, f'{seeds}[best_of]\nsweep = "{sweep}"\n', "study")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


# ---- the points ----------------------------------------------------------------------------------


def test_the_last_axis_changes_fastest() -> None:
    axes = axes_of({"plan": {"stages": [2, 4]}, "train": {"optimizer": {"lr": [0.1, 0.2]}}})
    assert [*axes] == ["plan.stages", "train.optimizer.lr"]
    assert [tuple(point.values()) for point in points(axes)] == [
        *((2, 0.1), (2, 0.2), (4, 0.1), (4, 0.2))
    ]


def test_points_are_told_by_the_last_part_of_their_keys() -> None:
    assert point_text({"plan.stages": 2, "train.optimizer.lr": 0.1}) == "stages=2 lr=0.1"
    assert point_text({"a.x": 1, "b.x": 2}) == "a.x=1 b.x=2"


def test_every_point_is_a_run_of_its_own_in_order(sweep: str) -> None:
    runs = load_runs(sweep, ["sweep.plan.stages=[1, 2]", "train.seeds=[4, 5]"])
    assert [(run.train.optimizer.lr, run.plan.stages, run.train.seed) for run in runs] == [
        *product((0.1, 0.01, 1.0), (1, 2), (4, 5))
    ]
    assert {run.train.optimizer.momentum for run in runs} == {0.9}
    assert len({run_id(run) for run in runs}) == 12
    assert runs[0].title == "sweep lr=0.1 stages=1"
    assert {run.sweep for run in runs} == {None}


def test_a_point_is_the_run_that_says_so_itself(sweep: str, tmp_path: Path) -> None:
    plain = write(tmp_path, SWEEP.partition("[sweep]")[0], "plain")
    alone = load(plain, ["train.optimizer.lr=0.01"])
    assert run_id(load_runs(sweep)[1]) == run_id(alone)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("train.optimizer.momentun = [0.5]", "'momentun' in [train.optimizer]; did you mean 'mom"),
        ("train.optimizer.lr = []", "train.optimizer.lr has no values"),
        ("train.optimizer.lr = 0.1", "train.optimizer.lr is 0.1, but must list values, as in"),
        ("train.optimizer.lr = [0.1, 1e-1]", "train.optimizer.lr repeats a value"),
        ("train.optimizer.lr = [0.1, -1.0]", "lr = -1.0: train.optimizer.lr is -1.0, but must be"),
        ("train.batch_size.x = [1]", "cannot set train.batch_size.x: train.batch_size is 4"),
        ("system.name = ['dapple', 'dapple2']", "unknown system 'dapple2'; did you mean 'dapple'"),
        ("train = {}", "train names no key with values"),
    ],
)
def test_what_cannot_be_swept(tmp_path: Path, lines: str, said: str) -> None:
    config = write(tmp_path, f"{BASE}[sweep]\n{lines}\n", "own")
    with pytest.raises(UserError) as caught:
        load_runs(config)
    assert said in str(caught.value)
    assert "own" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_setting_of_what_is_swept_is_refused(sweep: str) -> None:
    with pytest.raises(UserError, match="use --set sweep.train.optimizer.lr="):
        load_runs(sweep, ["train.optimizer.lr=0.5"])
    assert len(load_runs(sweep, ["sweep.train.optimizer.lr=[0.5, 2.0]"])) == 2


def test_a_norm_may_be_swept(tmp_path: Path) -> None:
    """Until then, clip_by = "stage" clips nothing."""
    by_stage = BASE.replace("momentum = 0.9", 'momentum = 0.9\nclip_by = "stage"')
    config = write(tmp_path, by_stage + "[sweep]\ntrain.optimizer.clip = [0.5, 1.0]\n", "norm")
    optimizers = [run.train.optimizer for run in load_runs(config)]
    assert [(o.clip, o.clip_by) for o in optimizers] == [(0.5, "stage"), (1.0, "stage")]
    with pytest.raises(UserError, match="nothing is clipped"):
        load(write(tmp_path, by_stage, "plain"))


def test_sections_that_do_not_go_together(sweep: str) -> None:
    with pytest.raises(UserError, match="leave one of them out"):
        load(sweep, ["best_of.sweep=x"])
    with pytest.raises(UserError, match="sweep is for training runs"):
        load("smoke/throughput", ["sweep.train.seed=[0, 1]"])
    with pytest.raises(UserError, match="there is one validation part"):
        load(sweep, ["data.sizes.validation=5"])
    with pytest.raises(UserError, match='not for set = "random"'):
        load("smoke/throughput", ["data.sizes={held_out = 3}"])


def test_more_held_out_than_there_is_is_refused_before_anything_runs(sweep: str) -> None:
    config = load_runs(sweep, ["data.sizes.train=1200"])[0]
    with pytest.raises(UserError, match="1200 are trained on: hold out 1 … 237"):
        tasks_of(config, layers_of(config))


# ---- the best ------------------------------------------------------------------------------------


End = float | str


def record(store: Store, sweep: str, ends: Sequence[End], settings: Sequence[str] = ()) -> None:
    """The sweep's first runs, each ended with an accuracy (after a better one) or a status."""
    for config, end in zip(load_runs(sweep, settings), ends, strict=False):
        run = store.run(run_id(config))
        run.create()
        if not isinstance(end, str):
            run.append({"event": "evaluation", "step": 1, "epoch": 0, "accuracy": 0.99})
            run.append({"event": "evaluation", "step": 2, "epoch": 1, "accuracy": end})
        run.append({"event": "end", "status": end if isinstance(end, str) else "ok"})


@pytest.mark.parametrize(
    ("ends", "lr"),
    [
        ((0.5, 0.6, 0.7), 1.0),
        ((0.7, 0.6, 0.5), 0.1),
        ((0.7, 0.7, 0.5), 0.01),
        ((0.5, "diverged", "diverged"), 0.1),
        (("diverged", 0.2, 0.1), 0.01),
    ],
)
def test_the_best_last_accuracy_or_of_equals_the_smaller_value(
    store: Store, sweep: str, study: str, ends: Sequence[End], lr: float
) -> None:
    record(store, sweep, ends)
    runs = load_resolved(study, (), store)
    assert [(run.train.optimizer.lr, run.train.seed) for run in runs] == [(lr, 1), (lr, 2)]
    best_of = runs[0].best_of
    assert best_of is not None
    assert (best_of.sweep, best_of.chosen) == (sweep, {"train.optimizer.lr": lr})
    # What decides is the value, wherever it comes from.
    assert runs[0].train.optimizer.momentum == 0.9
    by_hand = runs[0].model_copy(update={"best_of": None})
    assert run_id(by_hand) == run_id(runs[0])


def test_seeds_of_a_point_count_by_their_mean_unless_one_diverged(
    store: Store, sweep: str, study: str
) -> None:
    Path(sweep).write_text(SWEEP.replace("[train]\n", "[train]\nseeds = [7, 8]\n"))
    record(store, sweep, (0.9, "diverged", 0.5, 0.6, 0.8, 0.2))
    (config, *_) = load_resolved(study, (), store)
    assert config.train.optimizer.lr == 0.01


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((), "not finished: 3 of its 3 runs are not done; run pipebench run"),
        ((0.5, "diverged"), "not finished: 1 of its 3 runs"),
        ((0.5, 0.5, "failed"), "not finished: 1 of its 3 runs"),
        (("diverged",) * 3, "every point of the sweep .* diverged.* values of train.optimizer.lr"),
    ],
)
def test_a_sweep_without_a_best_is_one_line(
    store: Store, sweep: str, study: str, ends: Sequence[End], said: str
) -> None:
    record(store, sweep, ends)
    with pytest.raises(UserError, match=said) as caught:
        load_resolved(study, (), store)
    assert "\n" not in str(caught.value)


def test_settings_hold_for_the_sweep_but_for_its_seeds(
    store: Store, sweep: str, study: str
) -> None:
    record(store, sweep, (0.5, 0.6, 0.7))
    assert len(load_resolved(study, ["train.seeds=[3, 4, 5]"], store)) == 3
    with pytest.raises(UserError, match=r"pipebench run \S+ --set train.epochs=2$"):
        load_resolved(study, ["train.epochs=2"], store)
    record(store, sweep, (0.7, 0.6, 0.5), ["train.epochs=2"])
    assert load_resolved(study, ["train.epochs=2"], store)[0].train.optimizer.lr == 0.1


def test_a_choice_must_not_have_seen_the_test_images(store: Store, sweep: str, study: str) -> None:
    Path(sweep).write_text(SWEEP.replace("held_out = 300\n", ""))
    with pytest.raises(UserError, match="must not have seen them: set data.sizes.held_out"):
        load_resolved(study, (), store)
    Path(sweep).write_text(BASE)
    with pytest.raises(UserError, match="has no .sweep."):
        load_resolved(study, (), store)
    with pytest.raises(UserError, match="unknown config 'smoke/digits-dpp'; did you mean"):
        load(study, ["best_of.sweep=smoke/digits-dpp"])


# ---- on the command line -------------------------------------------------------------------------


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """`pipebench`, with a tier "t" of a sweep and two studies of it; ranks are stood in for."""
    configs = tmp_path / "configs" / "t"
    configs.mkdir(parents=True)
    top = 'tiers = ["t"]\n[tracking]\nmode = "off"\n'
    write(configs, top + SWEEP, "sweep")
    write(configs, top + BASE + '[best_of]\nsweep = "t/sweep"\n', "best")
    write(configs, top + BASE, "plain")
    monkeypatch.setattr("experiments.loading.CONFIGS", tmp_path / "configs")
    monkeypatch.setenv("PIPEBENCH_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(commands.Interruption, "install", lambda self: None)
    rates: list[float] = []

    def launch(path: Path, *_: Any, **__: Any) -> Outcome:
        lr = json.loads((path / "job.json").read_text())["optimizer"]["lr"]
        rates.append(lr)
        event = {"event": "evaluation", "step": 1, "epoch": 0, "loss": 1.0, "samples": 3}
        with (path / "events.jsonl").open("a") as file:
            file.write(json.dumps(event | {"accuracy": 1 - abs(lr - 0.01)}) + "\n")
        return Outcome("ok")

    monkeypatch.setattr(runner, "launch", launch)

    def call(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["pipebench", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return ended.value.code, out, err

    call.rates = rates  # type: ignore[attr-defined]
    return call


def rows(text: str) -> dict[str, str]:
    lines = [line.split("  ", 1) for line in text.splitlines()]
    return {name.strip(): said.strip() for name, said in lines}


POINTS = [f"t/sweep lr={lr}" for lr in (0.1, 0.01, 1.0)]


def test_a_matrix_runs_sweeps_before_what_waits_for_them(tier: Any) -> None:
    _, listed, _ = tier("matrix", "--tier", "t", "--list")
    assert [*rows(listed)] == ["t/plain", *POINTS, "t/best"]
    _, planned, _ = tier("matrix", "--tier", "t", "--dry-run")
    assert rows(planned)["t/best"] == "run with the best of t/sweep"
    code, out, _ = tier("matrix", "--tier", "t", "--jobs", "3")
    assert code == 0
    assert [*rows(out)] == ["t/plain", *POINTS, "t/best"]
    assert sorted(tier.rates[:4]) == [0.01, 0.1, 0.1, 1.0]
    assert tier.rates[4:] == [0.01]
    _, planned, _ = tier("matrix", "--tier", "t", "--dry-run")
    assert set(rows(planned).values()) == {"done: ok"}


def test_without_its_sweep_a_study_is_refused_with_the_way_out(tier: Any) -> None:
    code, out, _ = tier("matrix", "--tier", "t", "--only", "t/best")
    assert code == 2
    assert "refused" in out
    assert "pipebench run t/sweep" in out
    code, _, err = tier("run", "t/best")
    assert (code, err.count("\n")) == (2, 1)
    _, planned, _ = tier("matrix", "--tier", "t", "--only", "t/best", "--dry-run")
    assert rows(planned)["t/best"].startswith("refuse: the sweep t/sweep is not finished")
    assert tier.rates == []
    code, out, _ = tier("run", "t/sweep")
    assert (code, len(rows(out))) == (0, 3)
    assert "t/sweep lr=0.01 dapple" in out
    code, _, _ = tier("run", "t/best")
    assert (code, tier.rates[-1]) == (0, 0.01)


def test_the_record_tells_of_sweep_and_choice_and_loads_as_the_same_run(
    tier: Any, tmp_path: Path
) -> None:
    tier("matrix", "--tier", "t")
    for directory in (tmp_path / "results" / "runs").iterdir():
        config = load(str(directory / "config.toml"))
        assert run_id(config) == directory.name
        result = json.loads((directory / "result.json").read_text())
        assert result.get("swept") == config.swept
        if config.name == "t/best":
            assert config.best_of is not None
            assert config.best_of.chosen == {"train.optimizer.lr": 0.01}
        assert runner.recompute(Store(tmp_path / "results").run(directory.name)) == result
