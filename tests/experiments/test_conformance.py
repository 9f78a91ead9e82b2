"""The conformance table: all systems do what they declare, and the README shows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import conformance, oracles
from experiments.cli import main
from experiments.conformance import Row, conformance_document, conformance_table, judge, judge_all
from runtimes.conformance.cases import CASES, Case
from runtimes.execution import inprocess, updates

ROOT = Path(__file__).resolve().parents[2]
SMALL = Case("ashpipe", (1, 1))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return judge_all()


def test_all_systems_are_seen_to_do_what_they_declare(rows: list[Row]) -> None:
    assert [row.case for row in rows] == list(CASES)
    found = [(row.case.system, row.case.title, row.differences, row.failure) for row in rows]
    assert not [entry for entry in found if entry[2]]


def test_the_readme_shows_the_table_that_the_command_prints(rows: list[Row]) -> None:
    table = conformance_table(rows)
    assert table in (ROOT / "README.md").read_text(), f"the README should have\n{table}"


def test_the_document_says_what_the_table_says(rows: list[Row]) -> None:
    document = json.loads(json.dumps(conformance_document(rows), allow_nan=False))
    assert (document["schema"], document["conforms"]) == ("pipebench.conformance/1", True)
    case = next(case for case in document["cases"] if case["replicas"] == [4, 3, 1])
    assert case["declared"] == case["observed"]
    assert case["observed"]["delays"][0][0][:4] == [[0], [1], [2], [2]]
    assert case["observed"]["taken"][1][2][-1] == {"batches": [7], "once": 3, "otherwise": 0}
    assert case["oracle_error"] <= document["oracle_limit"]


@pytest.fixture
def pipebench(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Calls `pipebench conformance` on one small case."""
    monkeypatch.setattr(conformance, "CASES", (SMALL,))

    def call(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipebench", "conformance", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capfd.readouterr()

    return call


def test_a_system_that_conforms_ends_with_code_0(pipebench: Any) -> None:
    code, out, err = pipebench()
    assert (code, err) == (0, "")
    assert [line.split("|")[3].strip() for line in out.splitlines()[2:]] == ["declared", "observed"]


def test_a_difference_ends_with_code_1(pipebench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = inprocess.evaluation_program
    monkeypatch.setattr(
        inprocess,
        "evaluation_program",
        lambda plan, samples, size: program(plan, samples // size * size, size),
    )
    code, out, _ = pipebench()
    assert code == 1
    assert "10 of 13" in out
    assert "**observed**" in out
    code, out, _ = pipebench("--json")
    (case,) = json.loads(out)["cases"]
    assert (code, case["differences"]) == (1, ["evaluated"])


def test_a_run_that_fails_is_a_row(pipebench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inprocess._End, "ready", lambda self, action: False)
    code, out, _ = pipebench()
    assert code == 1
    assert "| **failed** | RuntimeError: deadlock" in out
    code, out, _ = pipebench("--json")
    (case,) = json.loads(out)["cases"]
    assert (code, case["observed"], case["differences"]) == (1, None, ["failure"])


def test_the_oracle_sees_what_is_not_about_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = updates.learning_rate
    monkeypatch.setattr(
        updates, "learning_rate", lambda spec, kind, step, *rest: rate(spec, kind, step + 1, *rest)
    )
    row = judge(SMALL)
    assert row.differences == ["oracle"]
    assert row.error is not None
    assert row.error > 1e-4


def test_without_a_checkout_the_command_says_what_is_missing(
    pipebench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(oracles, "REPOSITORY", tmp_path)
    code, out, err = pipebench()
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {tmp_path / 'tests' / 'oracles'} is not there")
    assert err.count("\n") == 1
