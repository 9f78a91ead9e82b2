"""The committed records are whole, and the README quotes no number that they do not give."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from analysis.tables import print_tables

ROOT = Path(__file__).parents[1]
RATIO = r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tables of the reference records alone."""
    results = tmp_path_factory.mktemp("results")
    shutil.copytree(ROOT / "results" / "reference", results / "reference")
    return print_tables(results)


def row(tables: str, micro_batches: int, system: str) -> str:
    section = tables.split(f"### Throughput: peers/schedules-m{micro_batches} ")[1].split("###")[0]
    (found,) = (
        line for line in section.splitlines() if line.split("|")[1:2] == [f" {system} ".ljust(14)]
    )
    return found


def test_reference_records_hold_only_what_is_true_elsewhere() -> None:
    reference = ROOT / "results" / "reference"
    simulated = set((reference / "simulated").iterdir())
    files = {path.name for path in {*reference.rglob("*")} - simulated if path.is_file()}
    assert files == {"config.toml", "env.json", "events.jsonl", "result.json"}
    assert {path.suffix for path in simulated} == {".json"}


def test_the_readmes_comparison_is_that_of_the_records(tables: str) -> None:
    text = (ROOT / "README.md").read_text()
    quoted = re.findall(
        rf"^\| (\d) \| ({RATIO}) \| ({RATIO}) \| ({RATIO}) \| ±([\d.]+) % \|$", text, re.M
    )
    assert [int(line[0]) for line in quoted] == [2, 4, 8]
    for micro_batches, gpipe, dapple, share, floor in quoted:
        assert gpipe in row(tables, int(micro_batches), "gpipe")
        _, _, _, _, ratio, bound, *_ = row(tables, int(micro_batches), "dapple").split("|")[1:]
        assert ratio.split(" ≈")[0].strip() == dapple
        assert bound.strip() == share
        section = tables.split(f"### Throughput: peers/schedules-m{micro_batches} ")[1]
        assert f"A/A floor: ±{floor} %" in section.split("###")[0]


def test_the_readmes_accuracy_and_agreement_are_those_of_the_records(tables: str) -> None:
    (accuracy,) = (part for part in tables.split("### ") if re.match("Accuracy: .* digits", part))
    assert accuracy.count("96.94 |     96.94") == 6
    delayed = re.findall(r"^\| (ashpipe|pipedream|pipedream_2bw|dp → ashpipe@6) .*", accuracy, re.M)
    assert len(delayed) == 4
    for system, percent in (
        ("ashpipe ", "87.22"),
        ("pipedream ", "87.22"),
        ("pipedream_2bw", "75.56"),
        ("dp → ashpipe@6", "94.17"),
    ):
        (line,) = (line for line in accuracy.splitlines() if line.startswith(f"| {system}"))
        assert f" {percent} " in line
        assert f"{percent} %" in (ROOT / "README.md").read_text()
    agreement = tables.split("### Loss against dp")[1].split("###")[0]
    assert max(float(x) for x in re.findall(r"\d\.\de[+-]\d\d", agreement)) == 1.6e-07
    text = (ROOT / "README.md").read_text()
    assert "96.94 %" in text
    assert "1.6e-07" in text


def test_the_readmes_schedules_without_a_flush_are_those_of_the_records(tables: str) -> None:
    """Ratio, ratio of bounds, attained; and attained with a unit as large as 1F1B's."""
    quoted = re.findall(
        rf"^\| (\d) \| ({RATIO}) \| ({RATIO}) \| ({RATIO}) \| ({RATIO}) \|$",
        (ROOT / "README.md").read_text(),
        re.M,
    )
    assert [int(line[0]) for line in quoted] == [2, 4, 8]
    for micro_batches, *values, at_equal_units in quoted:
        section = tables.split(f"### Without a flush: peers/unflushed-m{micro_batches} ")[1]
        lines = [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in section.split("###")[0].splitlines()
            if line.startswith("|")
        ]
        rows = {(cells[0], cells[1]): cells for cells in lines}
        assert rows["ashpipe", "torch-1f1b"][2:5] == values
        assert rows["ashpipe-unit", "torch-1f1b"][4] == at_equal_units


def test_the_readmes_grid_is_that_of_the_records(tables: str) -> None:
    section = tables.split("### Sweep")[1].split("###")[0]
    cells = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in section.splitlines()]
    known = [
        (system.removesuffix(" (in-process)"), plan.partition("=")[2], *rest)
        for system, plan, *rest in filter(None, cells)
        if "(in-process)" in system
    ]
    quoted = re.findall(
        r"^\| `(\w+)`, (\d) (?:replicas|stages) \| (0\.\d) \| ([\w.]+) \| ([\w.]+) \|$",
        (ROOT / "README.md").read_text(),
        re.M,
    )
    assert len(known) == 8
    assert sorted(known) == sorted(quoted)


def test_the_readmes_study_is_that_of_the_records(tables: str) -> None:
    (section,) = (part for part in tables.split("### ") if re.match("Accuracy: .* fashion", part))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()]
    known = {
        (system.removesuffix(" (in-process)"), chosen.removeprefix("lr = "), accuracy): apart
        for system, _, chosen, accuracy, apart, *_ in filter(None, rows)
        if "(in-process)" in system
    }
    text = (ROOT / "README.md").read_text().replace("−", "-")
    quoted = re.findall(
        r"^\| (`.*) \| (0\.\d+) \| (\d\d\.\d\d ± \d\.\d\d) \| (.*) ?\|$", text, re.M
    )
    found = {
        (_named(what), lr, accuracy): apart.strip() or "–" for what, lr, accuracy, apart in quoted
    }
    assert len(known) == 6
    assert found == known


def _named(what: str) -> str:
    """`dp`, from epoch 2 on `ashpipe` is dp → ashpipe@2 in a table."""
    switched = re.fullmatch(r"`dp`, from epoch (\d) on `(\w+)`", what)
    return f"dp → {switched[2]}@{switched[1]}" if switched else what.split("`")[1]


def test_the_readmes_ratios_at_eight_devices_are_those_of_the_simulation() -> None:
    """Published ÷ published, and ours ÷ ours, by batch size and share of the bandwidth."""
    study = ROOT / "results" / "reference" / "simulated" / "vit_h14-systems@a100-2x4.json"
    speeds = {
        (row["label"], row["batch_size"], row["bandwidth_share"]): row.get("images_per_s")
        for row in json.loads(study.read_text())["rows"]
    }
    quoted = re.findall(
        r"^\| (\d+) \| (\d\.?\d*)× \| (\d\.\d\d) \| (\d\.\d\d) \|$",
        (ROOT / "README.md").read_text(),
        re.M,
    )
    assert len(quoted) == 12
    for batch, links, published, ours in quoted:
        at = int(batch), float(links)
        ratios = [
            speeds[system, *at] / speeds[base, *at]
            for system, base in (
                ("ashpipe-2x4-published", "dp-blocking"),
                ("ashpipe-2x4", "dp"),
            )
        ]
        assert [published, ours] == [f"{ratio:.2f}" for ratio in ratios]


@pytest.mark.parametrize(
    "heading", ["Predicted against found\n", "Predicted against found, by class\n", "Link rates: "]
)
def test_the_page_of_predictions_holds_the_tables_of_the_records(tables: str, heading: str) -> None:
    page = (ROOT / "docs" / "predictions.md").read_text()
    (section,) = (part for part in tables.split("### ") if part.startswith(heading))
    grid = [line for line in section.splitlines() if line.startswith("|")]
    assert len(grid) > 2
    assert "\n".join(grid) in page
