"""Parallel pipelines in configs: the key, what it does to a run's name, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import preflight
from experiments.errors import UserError
from experiments.identity import config_hash, run_id
from experiments.loading import load
from experiments.memory import memory_needed
from experiments.preflight import missing_hardware
from experiments.resolve import layers_of, tasks_of, warnings_of
from experiments.simulation import Request
from tests.experiments.test_cli import pipebench
from tests.experiments.test_simulation import CONFIG, cluster, simulation_document, uniform

__all__ = ["pipebench"]

DAPPLE = "smoke/digits-dapple"
AVGPIPE = ["system={name='avgpipe'}", "plan.pipelines=3"]


def with_options(**options: object) -> list[str]:
    return [*AVGPIPE, *(f"system.options.{key}={value}" for key, value in options.items())]


def test_plans_have_as_many_pipelines_as_the_config_says() -> None:
    config = load(DAPPLE, AVGPIPE)
    (task,) = tasks_of(config, layers_of(config))
    assert task.plan.pipelines == 3
    (task,) = tasks_of(load(DAPPLE), layers_of(load(DAPPLE)))
    assert task.plan.pipelines == 1


def test_a_contender_may_have_its_own() -> None:
    contenders = "bench.contenders=[{label='a', system='avgpipe', plan={pipelines=2}}]"
    config = load("smoke/throughput", [contenders])
    (task,) = tasks_of(config, layers_of(config))
    assert task.plan.pipelines == 2
    assert run_id(config) != run_id(load("smoke/throughput", [contenders.replace("=2", "=3")]))


def test_one_pipeline_written_down_is_the_same_run() -> None:
    """And so runs of before the key keep their names."""
    assert config_hash(load(DAPPLE, ["plan.pipelines=1"])) == config_hash(load(DAPPLE))
    switch = "switch={{epoch=1, system={{name='dapple'}}, plan={{stages=2{}}}}}"
    plain = load(DAPPLE, [switch.format("")])
    assert config_hash(load(DAPPLE, [switch.format(", pipelines=1")])) == config_hash(plain)


@pytest.mark.parametrize(
    "options",
    [{"advance": 1}, {"alpha": 0.3}, {"every": 2}, {"form": "symmetric"}],
    ids=str,
)
def test_options_make_another_run(options: dict[str, Any]) -> None:
    plain = config_hash(load(DAPPLE, AVGPIPE))
    assert config_hash(load(DAPPLE, with_options(**options))) != plain
    assert config_hash(load(DAPPLE, [AVGPIPE[0], "plan.pipelines=2"])) != plain


def test_a_number_written_otherwise_is_the_same_run() -> None:
    names = {config_hash(load(DAPPLE, with_options(alpha=text))) for text in ("1", "1.0")}
    assert len(names) == 1
    assert config_hash(load(DAPPLE, with_options(advance=0))) == config_hash(load(DAPPLE, AVGPIPE))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["plan.pipelines=0"], r"plan.pipelines"),
        (["plan.pipelines=-2"], r"plan.pipelines"),
        (with_options(advance=-1), r"advance = -1, but it is a whole number, at least 0"),
        (with_options(every=0), r"every = 0, but it is a whole number, at least 1"),
        (with_options(alpha=0), r"alpha = 0, but it is a number, above 0"),
    ],
)
def test_numbers_out_of_range_are_refused_in_one_line(settings: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        load(DAPPLE, settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["plan.pipelines=2"], "dapple has one pipeline, but plan.pipelines is 2: set it to 1"),
        (
            [*with_options(averaging="asynchronous"), "plan.replicas=[1, 2]"],
            "asynchronous averaging at a stage of 2 replicas",
        ),
    ],
)
def test_plans_that_a_system_cannot_run(settings: list[str], said: str) -> None:
    config = load(DAPPLE, settings)
    with pytest.raises(UserError, match=said):
        tasks_of(config, layers_of(config))


def test_an_unstable_strength_is_warned_of() -> None:
    config = load(DAPPLE, with_options(form="symmetric", alpha=0.6))
    (text,) = warnings_of(config, tasks_of(config, layers_of(config)))
    assert text.startswith(f"{DAPPLE}: avgpipe: alpha = 0.6 is outside the range")
    assert "α < 2/(N + 1) = 0.5 (Zhang et al. 2015)" in text
    config = load(DAPPLE, AVGPIPE)
    assert warnings_of(config, tasks_of(config, layers_of(config))) == []


def test_warnings_go_to_stderr_and_stop_nothing(pipebench: Any) -> None:
    words = ("schedule", "avgpipe", "--stages=2", "--units=2", "--pipelines=3")
    quiet, loud = pipebench(*words), pipebench(*words, "--set=alpha=1.7")
    assert (quiet.code, quiet.err) == (0, "")
    assert (loud.code, loud.out) == (0, quiet.out)
    assert re.match(r"warning: alpha = 1.7 is outside .*\n\Z", loud.err)
    settings = [word for text in with_options(alpha=1.7) for word in ("--set", text)]
    ran = pipebench("run", DAPPLE, "--set=tracking.mode=off", *settings)
    assert "warning: smoke/digits-dapple: avgpipe: alpha = 1.7 is outside" in ran.err


def test_a_schedule_of_parallel_pipelines(pipebench: Any) -> None:
    words = ["schedule", "avgpipe", "--stages=4", "--units=8", "--pipelines=2", "--advance=1"]
    rows = pipebench(*words).out.splitlines()
    assert [row.split(" | ")[0] for row in rows] == [f"rank {r} (stage {r})" for r in range(4)]
    assert rows[0].split(" | ")[1].split()[:6] == ["F0a", "F1a", "F2a", "F3a", "F4a", "F0b"]
    document = pipebench(*words, "--json").document
    assert document["pipelines"] == 2
    streams = [(entry["rank"], entry["pipeline"]) for entry in document["ranks"]]
    assert streams == [(rank, pipeline) for rank in range(4) for pipeline in range(2)]
    longer = [*words[:-1], "--set", "advance=1"]
    assert pipebench(*longer).out.splitlines() == rows
    refused = pipebench(*words[:-1], "--advance=-1")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == "error: avgpipe: advance = -1, but it is a whole number, at least 0\n"


def memory(monkeypatch: pytest.MonkeyPatch, free: int, pipelines: int) -> str | None:
    config = load(DAPPLE, [AVGPIPE[0], f"plan.pipelines={pipelines}"])
    found = SimpleNamespace(available=free)
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: found)
    return missing_hardware(config, tasks_of(config, layers_of(config)))


def test_the_most_pipelines_that_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(DAPPLE, [AVGPIPE[0], "plan.pipelines=2"])
    enough = memory_needed(config, tasks_of(config, layers_of(config)), config.train.batch_size)
    assert memory(monkeypatch, enough.total(), 2) is None
    assert "set plan.pipelines = 2, the most that fit" in (
        memory(monkeypatch, enough.total(), 4) or ""
    )
    assert "plan.pipelines = 1, the most" in (memory(monkeypatch, enough.total() - 1, 4) or "")
    least = memory(monkeypatch, enough.total() - 1, 1)
    assert least is None or "plan.pipelines" not in least


def test_simulated_beside_dapple(tmp_path: Path) -> None:
    """On links that cost nothing, a batch of two pipelines takes less than the same batch of one
    with as many units, and the more pipelines the more memory; too little names how many fit."""
    contenders = ", ".join(
        f"{{label='{name}{n}', system='{name}', plan={{micro_batches=2, pipelines={n}}}}}"
        for name, n in (("dapple", 1), ("avgpipe", 1), ("avgpipe", 2), ("avgpipe", 4))
    )
    settings = (f"bench.contenders=[{contenders}]",)
    profile = uniform(tmp_path / "p.json", (1, 64))
    request = Request(CONFIG, settings, cluster(tmp_path / "c.toml"), profile)
    rows = {row["label"]: row for row in simulation_document(request)["rows"]}
    seconds = {label: row["batch_seconds"] for label, row in rows.items()}
    assert seconds["avgpipe1"] == seconds["dapple1"]
    assert seconds["avgpipe4"] < seconds["avgpipe2"] < seconds["avgpipe1"]
    needs = {label: max(row["memory_bytes"]) for label, row in rows.items()}
    assert needs["dapple1"] == needs["avgpipe1"] < needs["avgpipe2"] < needs["avgpipe4"]
    limit = cluster(tmp_path / "small.toml", f"memory_bytes = {needs['avgpipe2']}")
    short = simulation_document(Request(CONFIG, settings, limit, profile))["rows"]
    assert [row["status"] for row in short] == ["ok", "ok", "ok", "oom"]
    assert "plan.pipelines = 2 is the most that fit" in short[-1]["why"] or (
        "plan.pipelines = 3 is the most that fit" in short[-1]["why"]
    )
