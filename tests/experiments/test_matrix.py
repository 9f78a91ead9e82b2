"""Which runs a tier has, in which order they go, and what their failures come to."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from experiments.errors import UserError
from experiments.loading import load
from experiments.matrix import Entry, Row, exit_code, run_all, select

SMOKE = [
    *(f"smoke/digits-{name}" for name in ("ashpipe", "ashpipe-sp", "avgpipe", "dapple")),
    *(f"smoke/digits-{name}" for name in ("dp", "gpipe")),
    *(f"smoke/digits-{name}" for name in ("pipedream", "pipedream_2bw")),
    *(f"smoke/digits-torch-{name}" for name in ("1f1b", "ddp", "gpipe")),
    "smoke/throughput",
]


def titles(entries: list[Entry]) -> list[str]:
    return [entry.title for entry in entries]


def test_a_tier_in_order_and_what_is_timed_last() -> None:
    assert titles(select("smoke")) == SMOKE


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("smoke/digits-*", SMOKE[:-1]),
        ("*torch*", SMOKE[8:11]),
        ("smoke/throughput", SMOKE[-1:]),
        ("smoke/digits-d[ap]*", SMOKE[3:5]),
    ],
)
def test_only_matches_names(only: str, expected: list[str]) -> None:
    assert titles(select("smoke", only)) == expected


def test_every_seed_is_a_run_of_its_own() -> None:
    names = titles(select("cifar100", "cifar100/dapple-*"))
    assert names == [f"cifar100/dapple-{ranks}#{seed}" for ranks in (2, 8) for seed in (0, 1, 2)]
    assert titles(select("cifar100", "cifar100/dapple-2", ["scale=smoke"])) == ["cifar100/dapple-2"]


@pytest.mark.parametrize(
    ("tier", "only", "said"),
    [
        ("smok", None, "unknown tier 'smok'; did you mean 'smoke'?"),
        ("smoke", "digits-dp", "matches no config of tier 'smoke'; did you mean"),
    ],
)
def test_nothing_to_run(tier: str, only: str | None, said: str) -> None:
    with pytest.raises(UserError) as caught:
        select(tier, only)
    assert said in str(caught.value)


def result(entry: Entry, status: str = "ok") -> list[dict[str, Any]]:
    return [{"name": entry.title, "status": status}]


def test_a_failure_is_a_row_and_the_others_run() -> None:
    def run(entry: Entry) -> list[dict[str, Any]]:
        if entry.title == SMOKE[1]:
            raise UserError("no such data")
        return result(entry, "failed" if entry.title == SMOKE[2] else "ok")

    rows = run_all(select("smoke"), run)
    assert [row.title for row in rows] == SMOKE
    assert [row.status for row in rows] == ["ok", "refused", "failed", *["ok"] * (len(SMOKE) - 3)]
    assert rows[1].error == "no such data"
    assert exit_code([row.status for row in rows]) == 1


class Overlaps:
    """A runner that notes who runs with whom."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: set[str] = set()
        self.together: dict[str, set[str]] = {}

    def __call__(self, entry: Entry) -> list[dict[str, Any]]:
        with self.lock:
            self.running.add(entry.title)
            for title in self.running:
                self.together.setdefault(title, set()).update(self.running)
        time.sleep(0.05)
        with self.lock:
            self.running.remove(entry.title)
        return result(entry)


@pytest.mark.parametrize("jobs", [1, 3])
def test_untimed_runs_share_the_cores_and_timed_ones_run_alone(jobs: int) -> None:
    entries = select("smoke")
    entries.append(Entry("again", load("smoke/throughput")))
    overlaps = Overlaps()
    rows = run_all(entries, overlaps, jobs=jobs)
    assert [row.title for row in rows] == titles(entries)
    assert overlaps.together["smoke/throughput"] == {"smoke/throughput"}
    assert overlaps.together["again"] == {"again"}
    most = max(len(others) for others in overlaps.together.values())
    assert most == 1 if jobs == 1 else most > 1


def test_after_an_interruption_nothing_more_is_started() -> None:
    stop = threading.Event()

    def run(entry: Entry) -> list[dict[str, Any]]:
        stop.set()
        return result(entry, "interrupted")

    rows = run_all(select("smoke"), run, stop=stop)
    assert [row.status for row in rows] == ["interrupted"] * len(SMOKE)
    assert [bool(row.results) for row in rows] == [True, *[False] * (len(SMOKE) - 1)]
    assert exit_code([row.status for row in rows]) == 3


def test_the_worst_contender_is_the_status_of_a_benchmark() -> None:
    assert Row("a", [{"status": "ok"}, {"status": "failed"}]).status == "failed"
    assert Row("a", [{"status": "ok"}, {"status": "skipped_hardware"}]).status == "ok"


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([], 0),
        (["ok", "skipped_hardware"], 0),
        (["ok", "diverged"], 1),
        (["ok", "refused"], 1),
        (["refused", "refused"], 2),
        (["failed", "interrupted"], 3),
    ],
)
def test_exit_codes(statuses: list[str], code: int) -> None:
    assert exit_code(statuses) == code
