"""What is done is not repeated, what was cut off goes on, and all of it is recorded.

Ranks are stood in for by a function that writes what ranks write.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import runner
from experiments.agent import LaunchSpec
from experiments.config import Config
from experiments.errors import UserError
from experiments.loading import load
from experiments.outcome import Outcome
from experiments.runner import execute, intent, prepare, recompute
from experiments.store import RunDirectory, Store
from runtimes.job import Job
from runtimes.manifest import Manifest, write_manifest

OFF = "tracking.mode=off"
TINY = [OFF, "model.args.embed_dim=8", "model.args.num_heads=1", "train.epochs=4"]
TINY += ["train.learning_rate.warmup_epochs=1"]

Script = Callable[[RunDirectory, Job], Outcome]


def epoch(run: RunDirectory, number: int) -> None:
    """One epoch of two steps, with a checkpoint after it."""
    for step in (2 * number, 2 * number + 1):
        loss = 1 / (step + 1)
        run.append({"event": "step", "step": step, "epoch": number, "loss": loss, "samples": 64})
    segment = {"event": "segment", "kind": "train", "first": 2 * number, "last": 2 * number + 2}
    run.append({**segment, "wall_s": 1.0, "samples": 128, "ranks": []})
    run.append({"event": "checkpoint", "step": 2 * number + 2})
    folder = run.path / "checkpoint" / str(2 * number + 2)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rank0.pt").write_bytes(b"weights")
    durable = len(run.events())
    write_manifest(run.path, Manifest(2 * number + 2, durable, {"rank0.pt": 7}))


def trains(run: RunDirectory, job: Job) -> Outcome:
    manifest_step = run.read_json("checkpoint/latest.json") or {"step": 0}
    for number in range(manifest_step["step"] // 2, job.epochs):
        epoch(run, number)
    return Outcome("ok")


def dies_after(epochs: int) -> Script:
    def script(run: RunDirectory, job: Job) -> Outcome:
        for number in range(epochs):
            epoch(run, number)
        run.append({"event": "step", "step": 2 * epochs, "epoch": epochs, "loss": 9.0})
        (run.path / "error-1.json").write_text("{}")
        return Outcome("failed", "rank 1 was killed by SIGKILL", 1, "SIGKILL")

    return script


class Launches:
    """In place of the launcher: follows a script, and counts."""

    def __init__(self) -> None:
        self.script: Script = trains
        self.specs: list[LaunchSpec] = []

    def __call__(self, run_dir: Path, spec: LaunchSpec, **_: Any) -> Outcome:
        self.specs.append(spec)
        return self.script(RunDirectory(run_dir), Job.load(run_dir / "job.json"))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    monkeypatch.setattr(runner, "launch", launches)
    return launches


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


@pytest.fixture(scope="module")
def config() -> Config:
    return load("smoke/digits-dapple", TINY)


def kinds(events: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(event["event"]) for event in events]


def test_a_run_leaves_all_that_its_record_needs(
    store: Store, config: Config, launches: Launches
) -> None:
    prepared = prepare(config)
    (result,) = execute(prepared, store)
    run = store.run(prepared.id)
    assert (result["status"], result["steps"], result["epochs"]) == ("ok", 8, 4)
    assert json.loads((run.path / "result.json").read_text()) == result
    assert load(str(run.path / "config.toml")).model_copy(update={"scales": ()}) == config
    assert run.read_json("env.json")["versions"]["torch"]  # type: ignore[index]
    assert kinds(run.events())[0] == "launch"
    assert kinds(run.events())[-1] == "end"
    assert launches.specs[0].ranks == 2
    assert launches.specs[0].command[-3:] == ("-m", "runtimes.execution.rank", str(run.path))


def test_what_is_done_is_not_repeated(store: Store, config: Config, launches: Launches) -> None:
    prepared = prepare(config)
    first = execute(prepared, store)
    assert intent(prepared, store, fresh=False) == "done: ok"
    assert execute(prepared, store) == first
    assert len(launches.specs) == 1


def test_a_lost_result_is_computed_again_from_the_events(
    store: Store, config: Config, launches: Launches
) -> None:
    prepared = prepare(config)
    (first,) = execute(prepared, store)
    run = store.run(prepared.id)
    (run.path / "result.json").unlink()
    assert recompute(run) == first
    (run.path / "result.json").unlink()
    assert execute(prepared, store) == [first]
    assert run.read_json("result.json") == first
    assert len(launches.specs) == 1


def test_a_result_older_than_the_events_is_replaced(
    store: Store, config: Config, launches: Launches
) -> None:
    """The launcher was killed after the last event and before the result."""
    prepared = prepare(config)
    (first,) = execute(prepared, store)
    store.run(prepared.id).write_json("result.json", {**first, "status": "unfinished"})
    assert execute(prepared, store) == [first]


def test_a_failed_run_goes_on_from_its_checkpoint(
    store: Store, config: Config, launches: Launches
) -> None:
    prepared = prepare(config)
    launches.script = dies_after(2)
    (failed,) = execute(prepared, store)
    assert (failed["status"], failed["rank"], failed["signal"]) == ("failed", 1, "SIGKILL")
    assert intent(prepared, store, fresh=False) == "resume from update 4"
    launches.script = trains
    (result,) = execute(prepared, store)
    assert (result["status"], result["attempts"], result["error"]) == ("ok", 2, None)
    run = store.run(prepared.id)
    steps = [event["step"] for event in run.events() if event["event"] == "step"]
    assert steps == list(range(8)), "no step twice, none lost"
    starts = [event for event in run.events() if event["event"] == "launch"]
    assert [start["resumed_from"] for start in starts] == [None, 4]
    assert not list(run.path.glob("error-*.json"))


def test_a_killed_run_is_a_row_and_its_attempts_are_counted(
    store: Store, config: Config, launches: Launches
) -> None:
    """The launcher itself dies, before there is a checkpoint: nothing of the attempt stays but its
    number."""

    class KilledError(BaseException):
        pass

    def killed(run: RunDirectory, job: Job) -> Outcome:
        run.append({"event": "step", "step": 0, "epoch": 0, "loss": 1.0})
        raise KilledError

    prepared = prepare(config)
    launches.script = killed
    with pytest.raises(KilledError):
        execute(prepared, store)
    run = store.run(prepared.id)
    assert run.read_json("result.json")["status"] == "unfinished"  # type: ignore[index]
    launches.script = trains
    (result,) = execute(prepared, store)
    assert (result["status"], result["attempts"], result["steps"]) == ("ok", 2, 8)


@pytest.mark.parametrize(("epochs", "kept"), [(0, False), (2, True)])
def test_a_trace_stays_as_long_as_what_it_tells_of(
    store: Store, config: Config, launches: Launches, epochs: int, kept: bool
) -> None:
    """Without a checkpoint a run begins anew, and another first segment is to be traced."""
    prepared = prepare(config)
    launches.script = dies_after(epochs)
    execute(prepared, store)
    trace = store.run(prepared.id).path / "trace.json"
    trace.write_text("of the first attempt")
    launches.script = trains
    execute(prepared, store)
    assert trace.exists() == kept


def test_fresh_puts_the_old_run_aside(store: Store, config: Config, launches: Launches) -> None:
    prepared = prepare(config)
    execute(prepared, store)
    assert intent(prepared, store, fresh=True) == "run"
    execute(prepared, store, fresh=True)
    assert len(launches.specs) == 2
    (archived,) = (store.root / "archive").iterdir()
    assert archived.name.endswith(prepared.id)
    assert (archived / "result.json").exists()


def test_a_diverged_run_is_done(store: Store, config: Config, launches: Launches) -> None:
    launches.script = lambda run, job: Outcome("diverged", "the loss of step 3 is nan", 1)
    prepared = prepare(config)
    execute(prepared, store)
    execute(prepared, store)
    assert len(launches.specs) == 1


def test_a_truncated_checkpoint_is_refused_before_anything_is_lost(
    store: Store, config: Config, launches: Launches
) -> None:
    prepared = prepare(config)
    launches.script = dies_after(2)
    execute(prepared, store)
    run = store.run(prepared.id)
    before = run.events()
    (run.path / "checkpoint" / "4" / "rank0.pt").write_bytes(b"weig")
    with pytest.raises(UserError, match=r"rank0.pt is truncated: 4 of 7 bytes.*--fresh"):
        execute(prepared, store)
    assert run.events() == before
    (run.path / "checkpoint" / "latest.json").write_text("{")
    with pytest.raises(UserError, match=r"latest.json is damaged"):
        intent(prepared, store, fresh=False)
    assert intent(prepared, store, fresh=True) == "run"


def test_a_run_that_is_under_way_is_left_alone(
    store: Store, config: Config, launches: Launches
) -> None:
    prepared = prepare(config)
    with store.lock(prepared.id), pytest.raises(UserError, match="running already"):
        execute(prepared, store, fresh=True)
    assert not launches.specs


def test_hardware_that_is_not_here_is_recorded_and_asked_for_again(
    store: Store, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(
        "cifar100/dapple-2", [OFF, "train.seeds=[0]", "data.set=random", "data.classes=100"]
    )
    prepared = prepare(config)
    if prepared.missing is None:
        pytest.skip("there are two CUDA devices here")
    assert "2 ranks need a CUDA device each" in prepared.missing
    assert "--set scale=smoke" in prepared.missing
    (result,) = execute(prepared, store)
    assert (result["status"], result["error"]) == ("skipped_hardware", prepared.missing)
    assert execute(prepared, store) == [result]
    assert not launches.specs
    monkeypatch.setattr(runner, "missing_hardware", lambda *_: None)
    arrived = prepare(config)
    assert intent(arrived, store, fresh=False) == "run"


def test_memory_that_is_short_for_now_costs_no_progress(
    store: Store, config: Config, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches.script = dies_after(2)
    execute(prepare(config), store)
    monkeypatch.setattr(runner, "missing_hardware", lambda *_: "too little memory")
    (skipped,) = execute(prepare(config), store)
    assert skipped["status"] == "skipped_hardware"
    monkeypatch.undo()
    assert intent(prepare(config), store, fresh=False) == "resume from update 4"


def test_data_that_are_missing_are_refused(
    store: Store, launches: Launches, tmp_path: Path
) -> None:
    settings = [OFF, "scale=smoke", f"data.root={json.dumps(str(tmp_path / 'nowhere'))}"]
    with pytest.raises(
        UserError, match=r"cifar100/dapple-2: no CIFAR-100 in .*nowhere.*--data-root"
    ):
        execute(prepare(load("cifar100/dapple-2", settings)), store)
    assert not launches.specs


def test_a_benchmark_is_a_record_for_each_contender(store: Store, launches: Launches) -> None:
    settings = [OFF, "model.args.embed_dim=12", "model.args.depth=2", "bench.rounds=2"]

    def measures(run: RunDirectory, job: Job) -> Outcome:
        assert job.bench is not None
        for number in range(job.bench.rounds):
            for position, task in enumerate(job.tasks):
                timed = {"event": "round", "task": task.label, "round": number, "steps": 2}
                place = {"position": position, "samples": 64, "wall_s": 2.0, "ranks": []}
                run.append({**timed, **place, "compute_bound_s": 1.0})
        return Outcome("ok")

    launches.script = measures
    prepared = prepare(load("smoke/throughput", settings))
    results = execute(prepared, store)
    assert [result["label"] for result in results][:2] == ["dp", "torch-ddp"]
    assert {result["bench_id"] for result in results} == {prepared.id}
    assert not (store.run(prepared.id).path / "result.json").exists()
    dapple = store.run(f"{prepared.id}.dapple")
    assert [event.get("task", "dapple") for event in dapple.events()] == ["dapple"] * 4
    assert recompute(dapple) == next(r for r in results if r["label"] == "dapple")
    assert execute(prepared, store) == results
    assert len(launches.specs) == 1
    # A record that is lost comes back without another launch.
    (dapple.path / "result.json").unlink()
    assert execute(prepared, store) == results
    execute(prepared, store, fresh=True)
    assert len(launches.specs) == 2
    assert len(list((store.root / "archive").iterdir())) == 1 + len(results)


def test_ranks_in_one_process_are_one_process(store: Store, launches: Launches) -> None:
    config = load("smoke/digits-dapple", [*TINY, "launch.transport=in-process"])
    (result,) = execute(prepare(config), store)
    assert launches.specs[0].ranks == 1
    assert (result["world_size"], result["transport"]) == (2, "in-process")


START = "train.start_from={}"


def test_a_run_starts_from_another(store: Store, config: Config, launches: Launches) -> None:
    first = prepare(config)
    launches.script = dies_after(1)
    execute(first, store)
    per_epoch = 23
    manifest = Manifest(per_epoch, 0, {})
    write_manifest(store.run(first.id).path, manifest)
    settings = [*TINY, "system.name=gpipe", START.format(first.id)]
    prepared = prepare(load("smoke/digits-dapple", settings))
    assert intent(prepared, store, fresh=False) == f"start from update 23 of {first.id}"

    def starts(run: RunDirectory, job: Job) -> Outcome:
        assert job.start_from == str(store.run(first.id).path)
        return trains(run, job)

    launches.script = starts
    execute(prepared, store)
    run = store.run(prepared.id)
    (launch,) = [event for event in run.events() if event["event"] == "launch"]
    assert launch["started_from"] == {"run": first.id, "step": 23}
    # With a checkpoint of its own, it needs the other's no more.
    (store.run(first.id).path / "checkpoint" / "latest.json").unlink()
    run.append({"event": "end", "status": "failed"})
    assert intent(prepared, store, fresh=False) == "resume from update 8"
    with pytest.raises(UserError, match="which has no checkpoint: run it first"):
        intent(prepared, store, fresh=True)


@pytest.mark.parametrize(
    ("step", "settings", "said"),
    [
        (23, [START.format("digits-dappl")], "no such run in .*; did you mean 'digits-dapple"),
        (23, [START.format("/no/where")], "there is no such run in /no"),
        (24, [], "whose 24 updates are no whole number of epochs of 23: use its train.batch_size"),
        (23, ["data.sizes={held_out=100}"], "updates are no whole number of epochs of 21"),
        (92, [], "which has done 4 epochs, but train.epochs is 4: set it to 5 or more"),
        (23, ["model.args.depth=3"], r"another model \(depth differ\)"),
        (23, ["train.optimizer={name='sgd'}"], "whose optimizer is adamw, but .* is 'sgd'"),
        (23, ["train.start_from_reference=true"], "has no reference beside its weights"),
        (
            46,
            ["switch={epoch=2, system={name='dp'}, plan={replicas=[2]}}"],
            "has done 2 epochs, but switch.epoch is 2: set it to 3 or more",
        ),
    ],
)
def test_starts_that_do_not_fit(
    store: Store, config: Config, launches: Launches, step: int, settings: list[str], said: str
) -> None:
    first = prepare(config)
    launches.script = dies_after(1)
    execute(first, store)
    write_manifest(store.run(first.id).path, Manifest(step, 0, {}))
    changed = load("smoke/digits-dapple", [*TINY, START.format(first.id), *settings])
    before = len(launches.specs)
    with pytest.raises(UserError, match=said) as caught:
        execute(prepare(changed), store)
    assert "\n" not in str(caught.value)
    assert len(launches.specs) == before


COPIES = ["system.name=avgpipe", "plan.pipelines=2"]


def test_copies_go_only_to_as_many(store: Store, launches: Launches) -> None:
    """All else starts from their reference, on request."""
    first = prepare(load("smoke/digits-dapple", [*TINY, *COPIES]))
    launches.script = dies_after(1)
    execute(first, store)
    write_manifest(store.run(first.id).path, Manifest(23, 0, {}))
    start, asked = START.format(first.id), "train.start_from_reference=true"
    for settings, said in (
        ([], "copies of 2 pipelines, but dapple has none"),
        ([*COPIES, "plan.pipelines=3"], "copies of 2 pipelines, but avgpipe has 3"),
    ):
        refused = prepare(load("smoke/digits-dapple", [*TINY, start, *settings]))
        with pytest.raises(UserError, match=f"{said}: .*set start_from_reference"):
            intent(refused, store, fresh=False)
        granted = prepare(load("smoke/digits-dapple", [*TINY, start, asked, *settings]))
        assert intent(granted, store, fresh=False).startswith("start from update 23")
    same = prepare(load("smoke/digits-dapple", [*TINY, start, *COPIES]))
    assert intent(same, store, fresh=False).startswith("start from update 23")


def test_an_interrupted_run_says_so(store: Store, config: Config, launches: Launches) -> None:
    stop = threading.Event()
    launches.script = lambda run, job: Outcome("interrupted", "ended by Ctrl-C or SIGTERM")
    (result,) = execute(prepare(config), store, stop=stop)
    assert result["status"] == "interrupted"
    assert intent(prepare(config), store, fresh=False) == "run"
