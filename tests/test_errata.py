"""The page of errata shows the figures that its script prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.errata import tables

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/errata.md").read_text()


@pytest.fixture(scope="module")
def computed() -> dict[str, str]:
    return tables()


def cells(table: str) -> list[list[str]]:
    """Of the body."""
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_shows_what_the_script_prints(computed: dict[str, str]) -> None:
    for title, table in computed.items():
        assert f"\n\n{table}\n\n" in PAGE, f"the page should have, of {title},\n{table}"


def test_the_page_has_no_other_figures(computed: dict[str, str]) -> None:
    """A table with a number in its body is one of the script's."""
    shown = re.findall(r"(?:^\|.*\n)+", PAGE, re.M)
    figures = [table.strip() for table in shown if re.search(r"\| +[\d.]+ +\|", table)]
    assert sorted(figures) == sorted(computed.values())


def test_figures_say_what_the_page_says_in_words(computed: dict[str, str]) -> None:
    stash = cells(computed["Stash kept over a drain"])
    for recompute, stage, before, *errors, _ in stash:
        assert before == "0"
        wrong = [float(error) > 0 for error in errors]
        # The embedding's own backward needs no weights.
        assert wrong == [k < min(2, 3 - int(stage)) for k in range(4)], (recompute, stage)
    plain, recomputed = stash[:4], stash[4:]
    assert all(float(b[3]) >= float(a[3]) for a, b in zip(plain, recomputed, strict=True))
    assert [float(row[2]) > 0 for row in cells(computed["Adam"])] == [False, False, False, True]
    without, *others = cells(computed["Masks drawn anew"])
    assert without[1:] == ["0"] * 4
    assert all(row[-1] == "0" and "0" not in row[1:-1] for row in others)
    assert cells(computed["BatchNorm"])[0][1] == "0.19"


@pytest.mark.parametrize("what", ["What it does", "Why it is silent", "Here", "Known"])
def test_every_fault_says_the_same_things(what: str) -> None:
    """What it does, why nobody notices, what is done here, and how it is known."""
    faults = [part for part in re.split(r"^### ", PAGE, flags=re.M)[1:] if "- *What" in part]
    assert len(faults) == 6
    assert all(part.count(f"- *{what}.*") == 1 for part in faults)
    assert all(re.search(r"- \*Known\.\* Read", part) for part in faults)
