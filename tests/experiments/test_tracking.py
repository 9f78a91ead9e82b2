"""W&B gets exactly what events.jsonl has, however often the launcher was killed and begun anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from experiments import tracking
from experiments.tracking import Tracker, rows
from tests.experiments.wandb_history import (
    PARTS,
    expected_history,
    offline_files,
    read_history,
    read_run,
    read_summary,
)

ROOT = Path(__file__).resolve().parents[2]
PER_EPOCH = 4
Event = Mapping[str, Any]


@pytest.fixture(autouse=True)
def home_without_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def ranks(scale: float) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "stage": rank, "replica": 0, "wall": scale}
        | {part: scale * (rank + 1) * (1 + number) for number, part in enumerate(PARTS)}
        for rank in range(2)
    ]


def epoch_events(epoch: int, offset: float = 0.0) -> list[dict[str, Any]]:
    """One epoch as a rank writes it: steps, segment, evaluation, checkpoint."""
    first, last = epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH
    steps = [
        {"event": "step", "step": step, "epoch": epoch, "loss": 2 / (step + 1) + offset}
        | {"lr": 0.1 * (step + 1), "samples": 16}
        for step in range(first, last)
    ]
    segment = {"event": "segment", "kind": "train", "first": first, "last": last, "samples": 64}
    segment |= {"wall_s": 0.5 + epoch, "ranks": ranks(0.1 + epoch)}
    accuracy = {"event": "evaluation", "step": last, "epoch": epoch, "samples": 10}
    accuracy |= {"accuracy": 0.1 * epoch, "loss": 1 / (epoch + 1)}
    return [*steps, segment, accuracy, {"event": "checkpoint", "step": last}]


def launch_event(attempt: int) -> dict[str, Any]:
    return {"event": "launch", "t": 1.0, "attempt": attempt, "resumed_from": None}


def record(run_dir: Path, events: Sequence[Event], durable: int | None = None) -> None:
    (run_dir / "checkpoint").mkdir(parents=True, exist_ok=True)
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if durable is not None:
        latest = {"step": 0, "events": durable, "files": {}}
        (run_dir / "checkpoint" / "latest.json").write_text(json.dumps(latest))


def tracker(run_dir: Path, mode: Any = "offline", **changes: Any) -> Tracker:
    given = {"run_id": "digits-1a2b.dapple", "name": "smoke/digits", "mode": mode, **changes}
    return Tracker(run_dir, {"train": {"seed": 0}}, **given)


def warnings(run_dir: Path) -> list[str]:
    log = run_dir / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_ranks_that_take_turns_have_no_speed() -> None:
    events = [{k: v for k, v in event.items() if k != "wall_s"} for event in epoch_events(0)]
    switch = {"event": "switch", "step": PER_EPOCH, "from": "dp", "to": "gpipe", "reason": "so"}
    history = rows([*events, switch])
    assert [row.step for row in history] == [1, 2, 3, 4]
    names = {name.partition("/")[0] for row in history for name in row.values}
    assert names == {"train", "epoch", "validation"}
    assert not any("images_per_s" in row.values for row in history)


def test_copies_and_their_reference_have_a_history() -> None:
    """Of a pipeline without a sample there is none."""
    events = epoch_events(0)
    events[0] |= {"losses": [1.5, 2.5]}
    events[1] |= {"losses": [None, "inf"]}
    events[PER_EPOCH] |= {"distances": [0.25, 0.5]}
    events[PER_EPOCH + 1] |= {"mean_of_copies": {"accuracy": 0.75, "loss": 1.25}}
    first, second, _, last = (row.values for row in rows(events))
    assert (first["train/loss/p0"], first["train/loss/p1"]) == (1.5, 2.5)
    assert second["train/loss/p1"] == float("inf")
    assert "train/loss/p0" not in second
    assert last["train/distance_to_reference/p1"] == 0.5
    assert last["validation/mean_of_copies/accuracy"] == 0.75
    assert last["validation/mean_of_copies/loss"] == 1.25
    assert (last["validation/accuracy"], last["validation/loss"]) == (0.0, 1.0)
    turns = [{k: v for k, v in event.items() if k != "wall_s"} for event in events]
    assert rows(turns)[-1].values["train/distance_to_reference/p0"] == 0.25


def test_a_plain_runs_history_equals_its_events(tmp_path: Path) -> None:
    events = [launch_event(1), *epoch_events(0), *epoch_events(1)]
    end = {"event": "end", "t": 2.0, "status": "ok", "error": None}
    record(tmp_path, [*events, end], durable=len(events))
    one = tracker(tmp_path)
    one.feed()
    one.feed()
    one.finish("ok")

    assert read_history(tmp_path) == expected_history(events)
    assert len(read_history(tmp_path)) == 2 * PER_EPOCH
    run = read_run(tmp_path)
    assert run == {
        "id": "digits-1a2b.dapple",
        "name": "smoke/digits",
        "project": "pipebench",
        "config": {"train": {"seed": 0}},
        "exit_code": 0,
    }
    summary = read_summary(tmp_path)
    assert summary["status"] == "ok"
    assert summary["steps"] == 8
    assert summary["final_loss"] == events[-4]["loss"] == 2 / 8
    assert summary["accuracy"] == 0.1
    assert not warnings(tmp_path)
    assert not (tmp_path / ".cache").exists(), "W&B writes nowhere else"


def test_everything_of_one_step_is_one_row() -> None:
    history = rows([*epoch_events(0), *epoch_events(1)])
    assert [row.step for row in history] == list(range(1, 2 * PER_EPOCH + 1))
    drain = history[PER_EPOCH - 1].values
    assert {"train/loss", "validation/accuracy", "time/idle"} <= set(drain)
    assert drain["train/loss"] == 2 / PER_EPOCH
    assert "validation/accuracy" not in history[PER_EPOCH].values


def test_a_loss_that_is_not_finite_reaches_the_history(tmp_path: Path) -> None:
    events = epoch_events(0)
    events[PER_EPOCH - 1]["loss"] = "nan"
    record(tmp_path, events)
    tracker(tmp_path).finish("diverged")
    assert str(read_history(tmp_path)[-1]["train/loss"]).lower() == "nan"
    assert read_run(tmp_path)["exit_code"] == 1


def test_a_contenders_rounds_are_its_history(tmp_path: Path) -> None:
    events = [
        {"event": "round", "task": "dapple", "round": number, "position": 0, "steps": 4}
        | {"samples": 64, "wall_s": 0.25 + number, "compute_bound_s": None, "ranks": ranks(1.0)}
        for number in range(3)
    ]
    record(tmp_path, [launch_event(1), *events])
    one = tracker(tmp_path)
    one.feed()
    assert not offline_files(tmp_path), "without a checkpoint nothing is durable before the end"
    one.finish("ok")
    assert read_history(tmp_path) == expected_history(events)
    assert read_history(tmp_path)[0]["bench/images_per_s/dapple"] == 256


KILLED = """
import os, signal, sys
from pathlib import Path
from experiments.tracking import Tracker
import wandb

given = dict(run_id="digits-1a2b.dapple", name="smoke/digits", mode="offline")
tracker = Tracker(Path(sys.argv[1]), {}, **given)
tracker.feed()
log, left = wandb.Run.log, int(sys.argv[2])

def log_or_die(self, *args, **kwargs):
    global left
    log(self, *args, **kwargs)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

wandb.Run.log = log_or_die
tracker.finish("ok")
"""


def killed_launch(run_dir: Path, after_rows: int) -> None:
    command = [sys.executable, "-c", KILLED, str(run_dir), str(after_rows)]
    code = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60).returncode
    assert code == -signal.SIGKILL


def test_after_kill_and_resume_each_event_is_there_once(tmp_path: Path) -> None:
    durable = [launch_event(1), *epoch_events(0)]
    lost = epoch_events(1, offset=7.0)[:3]
    record(tmp_path, [*durable, *lost], durable=len(durable))
    killed_launch(tmp_path, after_rows=2)
    assert read_run(tmp_path)["exit_code"] is None

    events = [*durable, launch_event(2), *epoch_events(1), *epoch_events(2)]
    record(tmp_path, events, durable=len(events))
    again = tracker(tmp_path)
    again.feed()
    again.finish("ok")
    assert read_history(tmp_path) == expected_history(events)
    assert read_run(tmp_path)["exit_code"] == 0


def test_a_kill_while_a_finished_run_is_tracked_is_made_good(tmp_path: Path) -> None:
    events = [launch_event(1), *epoch_events(0)]
    record(tmp_path, events)
    killed_launch(tmp_path, after_rows=1)
    tracker(tmp_path).finish("ok")
    assert read_history(tmp_path) == expected_history(events)

    (written,) = offline_files(tmp_path)
    before = written.stat()
    tracker(tmp_path).feed()
    tracker(tmp_path).finish("ok")
    (still,) = offline_files(tmp_path)
    assert (still, still.stat().st_mtime_ns) == (written, before.st_mtime_ns), "written once"


def test_what_was_synced_or_belongs_to_another_run_stays(tmp_path: Path) -> None:
    record(tmp_path, epoch_events(0))
    names = {
        "offline-run-20250101_000000-digits-1a2b.dapple": False,
        "offline-run-20250102_000000-digits-1a2b.dapple": True,
        "offline-run-20250101_000000-other-digits-1a2b.dapple": False,
        "offline-run-20250101_000000-digits-1a2bxdapple": False,
    }
    for name, synced in names.items():
        folder = tmp_path / "wandb" / name
        folder.mkdir(parents=True)
        if synced:
            (folder / "run-digits-1a2b.dapple.wandb.synced").touch()
    tracker(tmp_path).finish("ok")
    left = [name for name in names if (tmp_path / "wandb" / name).exists()]
    assert left == list(names)[1:]


def test_runs_that_end_side_by_side_have_a_history_each(tmp_path: Path) -> None:
    runs = [tmp_path / str(number) for number in range(3)]
    for number, run_dir in enumerate(runs):
        record(run_dir, epoch_events(0, offset=float(number)))

    def track(run_dir: Path) -> None:
        tracker(run_dir, run_id=f"run-{run_dir.name}").finish("ok")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(track, runs))
    for number, run_dir in enumerate(runs):
        assert read_history(run_dir) == expected_history(epoch_events(0, offset=float(number)))
        assert not warnings(run_dir)
    assert tracking._open_runs == 0


def test_off_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    events = epoch_events(0)
    record(tmp_path, events, durable=len(events))
    before = sorted(tmp_path.rglob("*"))
    one = tracker(tmp_path, "off")
    one.feed()
    one.finish("ok")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_wandb_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    events = epoch_events(0)
    record(tmp_path, events, durable=len(events))
    one = tracker(tmp_path)
    one.feed()
    one.feed()
    one.finish("ok")
    (line,) = warnings(tmp_path)
    assert line.startswith("warning: W&B does not have this run: ")
    assert "wandb" in line


def test_online_without_an_account_asks_nothing_and_warns(tmp_path: Path) -> None:
    events = epoch_events(0)
    record(tmp_path, events, durable=len(events))
    keyboard = sys.stdin
    one = tracker(tmp_path, "online")
    one.feed()
    one.finish("ok")
    assert sys.stdin is keyboard
    (line,) = warnings(tmp_path)
    assert "API key" in line
    assert tracking._open_runs == 0


class FakeWandb:
    """Stands for the package and a server that keeps the history of one run."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.arguments: dict[str, Any] = {}
        self.environment: dict[str, str | None] = {}
        self.teardowns = 0
        self.Settings = type("Settings", (dict,), {"model_fields": {"mode": None}})

    def init(self, **arguments: Any) -> FakeWandb:
        self.arguments = arguments
        self.environment = {key: os.environ.get(key) for key in ("WANDB_ERROR_REPORTING",)}
        self.summary: dict[str, Any] = {}
        return self

    @property
    def step(self) -> int:
        return self.history[-1]["_step"] + 1 if self.history else 0

    def log(self, row: Mapping[str, Any], *, step: int, commit: bool) -> None:
        assert commit
        assert step >= self.step, "W&B drops a step that goes backwards"
        self.history.append({"_step": step, **row})

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code

    def teardown(self) -> None:
        self.teardowns += 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    yield fake
    assert tracking._open_runs == 0


def test_online_each_event_is_sent_once_over_a_failed_and_a_resumed_launch(
    tmp_path: Path, server: FakeWandb
) -> None:
    durable = [launch_event(1), *epoch_events(0), *epoch_events(1)]
    lost = epoch_events(2, offset=7.0)[:3]
    record(tmp_path, [*durable, *lost], durable=len(durable))
    first = tracker(tmp_path, "online")
    first.feed()
    first.finish("failed")
    assert server.history == expected_history(durable)[:-1], "more may come for the last step"
    assert server.summary["status"] == "failed"
    assert server.exit_code == 1

    events = [*durable, launch_event(2), *epoch_events(2)]
    record(tmp_path, events, durable=len(events))
    second = tracker(tmp_path, "online")
    second.feed()
    assert server.history == expected_history(events)[:-1]
    second.finish("ok")
    assert server.history == expected_history(events)
    assert server.arguments["id"] == "digits-1a2b.dapple"
    assert server.arguments["resume"] == "allow"
    assert server.teardowns == 2


def test_offline_switches_error_reports_off_while_wandb_starts(
    tmp_path: Path, server: FakeWandb
) -> None:
    record(tmp_path, epoch_events(0))
    tracker(tmp_path).finish("ok")
    assert server.environment == {"WANDB_ERROR_REPORTING": "false"}
    assert "WANDB_ERROR_REPORTING" not in os.environ
    assert set(server.arguments["settings"]) == {"mode"}, "only what this version knows"


def test_a_failure_while_logging_is_one_warning_and_closes_wandb(
    tmp_path: Path, server: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left\non device")

    monkeypatch.setattr(server, "log", fail)
    said: list[str] = []
    record(tmp_path, epoch_events(0), durable=5)
    one = tracker(tmp_path, warn=said.append)
    one.feed()
    one.finish("ok")
    (line,) = said
    assert line.endswith("No space left on device")
    assert server.teardowns == 1
    assert not (tmp_path / "wandb" / "complete.json").exists(), "the next launch tries again"
