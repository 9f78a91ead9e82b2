"""Simulations as tables, and beside the runs that they predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.figures import write_figure
from analysis.predictions import predictions
from analysis.records import load_records
from analysis.simulations import load_studies, tables
from analysis.tables import print_tables
from tests.analysis.builder import Results


def row(label: str, speed: float | None, **changes: Any) -> dict[str, Any]:
    row = {
        "config": "a/b",
        "run": "bench-1",
        "label": label,
        "system": label.partition("-")[0],
        "options": {},
        "plan": {},
        "batch_size": 64,
        "bandwidth_share": 1.0,
        "memory_bytes": [1_000_000_000, 2_500_000_000],
        "status": "ok" if speed else "oom",
        "why": None if speed else "needs more",
    }
    if speed:
        row |= {
            "segment_batches": 4,
            "segment_seconds": 5 * 64 / speed,
            "batch_seconds": 64 / speed,
            "images_per_s": speed,
            "parts": {"idle": 0.25, "communication": 0.01, "reduce": 0.02},
        }
    return row | changes


def write(root: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
    document = {
        "schema": "pipebench.simulation/1",
        "name": "a/b@c",
        "t": 100.0,
        "evidence": "simulated",
        "paper": {"ratio": 1.844, "of": "ashpipe", "over": "dp", "source": "abstract"},
        "cluster": {"name": "c", "provenance": {"latency": "assumed"}},
        "profile": {
            "device": "a100",
            "precision": "tf32",
            "source": "analytic",
            "provenance": {"efficiency": 0.5, "more": {"not": "shown"}},
        },
        "rows": rows,
        **changes,
    }
    path = root / "simulated" / "a-b@c.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def test_ratios_are_to_dp_of_the_same_batch_and_bandwidth(tmp_path: Path) -> None:
    slow = {"bandwidth_share": 0.1}
    rows = [row("dp", 100.0), row("dp-blocking", 80.0), row("ashpipe", 150.0)]
    rows += [row("dp", 10.0, **slow), row("ashpipe", 90.0, **slow)]
    rows += [row("ashpipe", 150.0, batch_size=128)]
    write(tmp_path, rows)
    (study,) = load_studies(tmp_path)
    found = study.rows["ratio_to_dp"].tolist()
    assert found[:5] == pytest.approx([1.0, 0.8, 1.5, 1.0, 9.0])
    assert found[5] != found[5], "there is no dp of that batch"


def test_what_does_not_fit_is_a_row_and_the_paper_stands_beside(tmp_path: Path) -> None:
    write(tmp_path, [row("dp", 100.0), row("ashpipe", None)])
    (table,) = tables(tmp_path)
    (view,) = table.views
    assert view.cells["status"].tolist() == ["ok", "oom"]
    assert view.cells["images/s"].tolist() == ["100.0", "–"]
    assert view.cells["GB"].tolist() == ["2.5", "2.5"]
    assert view.cells["evidence"].tolist() == ["simulated"] * 2
    assert "ashpipe ÷ dp = 1.844 (abstract)" in view.caption
    assert "computed (roofline) for a100 in tf32 (efficiency 0.5)" in view.caption
    assert "latency: assumed" in view.caption


def test_fresh_ones_stand_before_those_of_the_reference(tmp_path: Path) -> None:
    kept = write(tmp_path, [row("dp", 100.0)])
    target = tmp_path / "reference" / "simulated" / kept.name
    target.parent.mkdir(parents=True)
    target.write_text(kept.read_text())
    assert [study.source for study in load_studies(tmp_path)] == [""]
    kept.unlink()
    assert [study.source for study in load_studies(tmp_path)] == ["reference"]


@pytest.mark.parametrize("changes", [{"schema": "x/1"}, {"rows": [{}]}, {"evidence": "guessed"}])
def test_a_broken_file_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write(tmp_path, **{"rows": [row("dp", 100.0)], **changes})
    with pytest.raises(ValueError, match=f"{path} is broken"):
        load_studies(tmp_path)


def test_predictions_stand_beside_the_runs_of_the_same_config(tmp_path: Path) -> None:
    results = Results(tmp_path)
    dp = results.bench("dp", [1.0, 1.01, 0.99, 1.0, 1.0, 1.0, 1.0])
    results.bench("ashpipe", [1.0, 2.0, 0.5, 1.5, 0.7, 1.2, 0.9])
    results.bench("ashpipe", [1.0], bench_id="bench-2")
    (dp / "events.jsonl").write_text(json.dumps({"event": "launch", "t": 200.0}) + "\n")
    rows = [
        row("dp", 100.0, segment_seconds=1.03),
        row("dp", 100.0, segment_seconds=9.0, bandwidth_share=0.5),
        row("ashpipe", 100.0, segment_seconds=1.0),
        row("gpipe", 100.0),
    ]
    write(tmp_path, rows)
    found = predictions(load_records(tmp_path), tmp_path).set_index("label")
    assert found.index.tolist() == ["dp", "ashpipe"]
    assert found.at["dp", "error"] == pytest.approx(0.03)
    assert found["resolved"].tolist() == [True, False]
    assert found["before"].tolist() == [True, False], "written before, and it is not known"
    text = print_tables(tmp_path)
    assert "### Predicted against found, by class" in text
    assert "| measured   |                2 |          1 |" in text


@pytest.mark.parametrize(("profiled", "speed"), [(0.02, 0.5), (None, 1.0)])
def test_a_machine_that_is_slower_than_when_it_was_profiled(
    tmp_path: Path, profiled: float | None, speed: float
) -> None:
    """Round by round: its drift is no spread of what was found."""
    drift = [1.0, 1.1, 0.9, 1.2, 0.8, 1.3, 0.7]
    references = [0.04 * now for now in drift]
    Results(tmp_path).bench("dp", [2.0 * now for now in drift], references=references)
    write(tmp_path, [row("dp", 100.0, segment_seconds=1.0)])
    document = json.loads((tmp_path / "simulated" / "a-b@c.json").read_text())
    document["profile"]["reference_seconds"] = profiled
    (tmp_path / "simulated" / "a-b@c.json").write_text(json.dumps(document))
    (found,) = predictions(load_records(tmp_path), tmp_path).to_dict("records")
    assert found["speed"] == pytest.approx(speed)
    assert found["found_seconds"] == pytest.approx(2.0 * speed)
    assert found["resolved"] == (profiled is not None)


def test_without_simulations_there_is_nothing_to_compare(tmp_path: Path) -> None:
    Results(tmp_path).bench("dp", [1.0] * 7)
    assert predictions(load_records(tmp_path), tmp_path).empty
    assert "Predicted" not in print_tables(tmp_path)


@pytest.mark.parametrize("name", ["simulated", "predicted"])
def test_figures_of_simulations_are_drawn(tmp_path: Path, name: str) -> None:
    Results(tmp_path).bench("dp", [1.0, 1.01, 0.99, 1.0, 1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="simulate"):
        write_figure(name, tmp_path, tmp_path / "figures")
    rows = [row("dp", 100.0), row("ashpipe", 150.0), row("gpipe", None)]
    rows += [row("dp", 10.0, bandwidth_share=0.1), row("ashpipe", 90.0, bandwidth_share=0.1)]
    write(tmp_path, rows)
    pdf, png = write_figure(name, tmp_path, tmp_path / "figures")
    assert pdf.stat().st_size > 1000
    first = png.read_bytes()
    assert write_figure(name, tmp_path, tmp_path / "figures")[1].read_bytes() == first
