"""Markdown, CSV and JSON of all tables: complete, valid, and the same every time."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.tables import print_tables, tables_document, write_tables
from tests.analysis.builder import Results

WALLS = [1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 1.1, 0.9, 1.0]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    made = Results(tmp_path / "results")
    for system in ("dp", "gpipe", "torch-gpipe"):
        made.train(system, losses=[2.0, 1.0, 1.0])
        made.bench(system, WALLS)
    made.bench("dp-again", [wall * 1.01 for wall in WALLS], system="dp")
    made.train("dapple", status="timeout", error="rank 0 waited 60 s", accuracy=None)
    made.bench("dp", WALLS[:3], bench_id="bench-2", source="machine-a")
    return made


def test_printed_tables_hold_every_run_and_failure(results: Results) -> None:
    text = print_tables(results.root)
    titles = [line for line in text.splitlines() if line.startswith("###")]
    assert [title.split(":")[0] for title in titles] == [
        "### Accuracy",
        "### Loss against dp",
        "### Throughput",
        "### Throughput",
    ]
    assert "timeout: rank 0 waited 60 s" in text
    assert "reference record of machine-a" in text
    assert text.endswith("\n")


def test_csv_files_name_units_and_hold_the_numbers(results: Results, tmp_path: Path) -> None:
    paths = write_tables(results.root, tmp_path / "out" / "tables")
    assert [path.name for path in paths] == [
        "tables.md",
        "accuracy.csv",
        "loss-agreement.csv",
        "throughput.csv",
    ]
    with paths[3].open(newline="") as file:
        rows = {(row["source"], row["label"]): row for row in csv.DictReader(file)}
    assert [*rows] == [
        *(("fresh", label) for label in ("dp", "dp-again", "gpipe", "torch-gpipe")),
        ("machine-a", "dp"),
    ]
    assert float(rows["fresh", "gpipe"]["throughput_median_images_per_s"]) == 100
    assert rows["machine-a", "dp"]["throughput_low_images_per_s"] == ""
    assert rows["fresh", "gpipe"]["batch_size_images"] == "90"
    assert "compute_fraction_of_wall" in rows["fresh", "gpipe"]


def test_the_document_is_strict_json_with_a_schema(results: Results) -> None:
    results.train("torch-ddp", losses=[float("nan"), 1.0, 1.0])
    document = tables_document(results.root)
    assert document["schema"] == "pipebench.tables/1"
    text = json.dumps(document, allow_nan=False)
    names = [table["name"] for table in json.loads(text)["tables"]]
    assert names == ["accuracy", "loss-agreement", "throughput", "throughput"]
    for table in document["tables"]:
        assert table["title"]
        assert table["caption"]
        assert len({tuple(row) for row in table["rows"]}) == 1


def test_tables_are_the_same_whatever_the_order_of_directories(
    results: Results, tmp_path: Path
) -> None:
    before = print_tables(results.root)
    files = [path.read_bytes() for path in write_tables(results.root, tmp_path / "a")]
    copy = tmp_path / "results-b"
    for path in sorted(results.root.rglob("*"), reverse=True):
        if path.is_file():
            target = copy / path.relative_to(results.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    assert print_tables(copy) == before
    assert [path.read_bytes() for path in write_tables(copy, tmp_path / "b")] == files


@pytest.mark.parametrize("use", [print_tables, tables_document])
def test_without_runs_there_are_no_tables(tmp_path: Path, use: object) -> None:
    assert callable(use)
    with pytest.raises(ValueError, match=f"no runs in {tmp_path}: run ./reproduce.sh first"):
        use(tmp_path)
    with pytest.raises(ValueError, match="no runs"):
        write_tables(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_analysis_loads_neither_torch_nor_the_other_packages(results: Results) -> None:
    program = (
        "import sys, pathlib, analysis.figures, analysis.tables\n"
        "analysis.tables.print_tables(pathlib.Path(sys.argv[1]))\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'torch', 'torchvision', 'timm', 'runtimes', 'experiments'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(results.root)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
