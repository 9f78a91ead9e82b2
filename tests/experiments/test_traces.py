"""`pipebench trace`: which file a run's name leads to, and what is said of it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.cli import main
from experiments.store import Store
from runtimes.plan import Plan
from runtimes.timeline import Cut
from runtimes.tracing import read_trace, write_trace
from tests.timelines import program_of, timeline_of

ONE = timeline_of(
    program_of(Plan.even(2, 2, micro_batches=2)), evidence="measured", cut=Cut(9, 0.1)
)
OTHER = replace(ONE, label="gpipe", cut=None)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A training run with a trace, a benchmark of two contenders with one, a run without."""
    monkeypatch.setenv("PIPEBENCH_RESULTS", str(tmp_path / "results"))
    store = Store(tmp_path / "results")
    for name in ("digits-dapple-s0-1", "digits-torch-s0-2", "random-bench-s0-3"):
        store.run(name).create()
    store.run("random-bench-s0-3.gpipe").create()
    write_trace(store.run("digits-dapple-s0-1").path / "trace.json", [ONE])
    write_trace(store.run("random-bench-s0-3").path / "trace.json", [ONE, OTHER])
    return store


@pytest.fixture
def pipebench(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    def call(*words: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipebench", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_what_is_in_a_trace(pipebench: Any, store: Store) -> None:
    file = store.run("digits-dapple-s0-1").path / "trace.json"
    code, out, _ = pipebench("trace", "digits-dapple-s0-1")
    assert code == 0
    where, head, row = out.splitlines()
    assert where == str(file)
    assert head.split()[:4] == ["system", "evidence", "of", "batches"]
    shares = " ".join(f"{share:.1%}" for share in ONE.idle_shares())
    actions = sum(map(len, ONE.ranks))
    words = ["dapple", "measured", "updates 0 … 2", "first 3 of 9", str(actions)]
    assert [word.strip() for word in row.split("  ") if word.strip()] == [
        *words,
        f"{ONE.makespan_seconds:.4g} s",
        shares,
    ]
    document = json.loads(pipebench("trace", "digits-dapple-s0-1", "--json")[1])
    assert document["schema"] == "pipebench.traces/1"
    (told,) = document["timelines"]
    assert told["makespan_seconds"] == pytest.approx(ONE.makespan_seconds)
    assert [rank["idle_share"] for rank in told["ranks"]] == pytest.approx(ONE.idle_shares())
    assert (told["batches"], told["segment_batches"]) == (3, 9)


@pytest.mark.parametrize(
    ("named", "labels"),
    [
        ("random-bench-s0-3", ["dapple", "gpipe"]),
        ("random-bench-s0-3.gpipe", ["gpipe"]),
        ("{root}/runs/random-bench-s0-3", ["dapple", "gpipe"]),
        ("{root}/runs/random-bench-s0-3.gpipe", ["gpipe"]),
        ("{root}/runs/random-bench-s0-3/trace.json", ["dapple", "gpipe"]),
        ("here.json", ["dapple"]),
    ],
)
def test_ways_to_name_a_trace(
    pipebench: Any,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: str,
    labels: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "here.json", [ONE])
    code, out, _ = pipebench("trace", named.format(root=store.root), "--json")
    assert code == 0
    assert [told["label"] for told in json.loads(out)["timelines"]] == labels


def test_a_copy_holds_what_was_asked_for(pipebench: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    code, out, _ = pipebench("trace", "random-bench-s0-3.gpipe", "-o", copy)
    assert (code, out.splitlines()[0]) == (0, str(copy))
    assert [timeline.label for timeline in read_trace(copy)] == ["gpipe"]


WRONG = {
    "trace digits-dapple-s0-9": "no run 'digits-dapple-s0-9'.*did you mean 'digits-dapple-s0-1'",
    "trace digits-torch-s0-2": "digits-torch-s0-2 has no trace: ranks in one process, torch's own",
    "trace random-bench-s0-3.dp": "no contender 'dp'.*known: dapple, gpipe",
    "trace random-bench-s0-3/events.jsonl": "no run",
    "trace broken.json": "broken.json cannot be read as a trace",
    "trace digits-dapple-s0-1 -o /no/where/x.json": "cannot write /no/where",
    "figure gantt": "name one or more runs with --trace",
    "figure gant": "did you mean gantt",
    "figure gantt --trace digits-dapple-s0-9": "no run",
    "figure gantt --trace broken.json": "broken.json cannot be read as a trace",
    "figure gantt --trace random-bench-s0-3.dp": "no timeline of 'dp', only of dapple, gpipe",
    "figure loss --trace digits-dapple-s0-1": "--trace is for gantt",
}


@pytest.mark.parametrize(("words", "said"), WRONG.items(), ids=WRONG.keys())
def test_what_the_user_did_wrong_is_one_line_and_exit_2(
    pipebench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    code, out, err = pipebench(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert re.search(said, err), err


def test_the_figure_of_traces_is_named_after_the_first(pipebench: Any, store: Store) -> None:
    words = ["--trace", "random-bench-s0-3.gpipe", "--trace", "digits-dapple-s0-1"]
    code, out, _ = pipebench("figure", "gantt", *words, "--json")
    assert code == 0
    names = [f"gantt-random-bench-s0-3.gpipe.{kind}" for kind in ("pdf", "png")]
    assert json.loads(out)["files"] == [str(store.root / "figures" / name) for name in names]
