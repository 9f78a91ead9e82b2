"""Parallel pipelines beside what trains as many samples, each on its own footing."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.pipelines import parallel_pipelines, tables
from analysis.records import load_records
from tests.analysis.builder import Results
from tests.analysis.test_simulations import row, write

#: Label: system, seconds a round, batch size, micro-batches.
CONTENDERS = {
    "avg": ("avgpipe", 1.0, 60, 4),
    "dapple-x1": ("dapple", 2.0, 30, 4),
    "dapple-x2": ("dapple", 1.1, 60, 8),
    "gpipe-x2": ("gpipe", 1.2, 60, 8),
    "slow": ("ashpipe", 0.9, 30, 1),
    "fast": ("pipedream", 0.8, 30, 1),
    "other": ("pipedream", 0.1, 60, 1),
}
SECTIONS = """
[[bench.contenders]]
label = "avg"
system = "avgpipe"
options = { advance = 2, averaging = "asynchronous" }
plan = { pipelines = 2 }
"""


def launched(root: Path) -> Results:
    results = Results(root)
    for label, (system, wall, size, units) in CONTENDERS.items():
        path = results.bench(
            label,
            [wall * drift for drift in (1.0, 1.5, 0.9)],
            system=system,
            batch_size=size,
            micro_batches=units,
        )
        values = {"name": "a/b", "system": system, "options": "", "root": "", "sizes": ""}
        values |= {"sections": SECTIONS, "stages": 2, "micro_batches": 4}
        results.config(path, {**values, "batch_size": 60, "epochs": 1, "seed": 0, "lr": 0.1})
    return results


def test_each_partner_has_as_many_samples_in_units_of_the_same_size(tmp_path: Path) -> None:
    launched(tmp_path)
    write(tmp_path, [row("avg", 100.0, run="bench-1", segment_seconds=0.95)])
    (found,) = parallel_pipelines(load_records(tmp_path), tmp_path).to_dict("records")
    assert (found["pipelines"], found["advance"]) == (2, 2)
    assert found["averaging"] == "asynchronous"
    ratios = {name: found[f"to_{name}_median"] for name in ("dapple", "gpipe", "dapple_one")}
    assert ratios == pytest.approx({"dapple": 1.1, "gpipe": 1.2, "dapple_one": 2.0})
    assert found["to_unflushed_median"] == pytest.approx(0.8), "the fastest on a pipeline's batch"
    assert found["measured_to_simulated"] == pytest.approx(0.95)


def test_without_parallel_pipelines_there_is_no_table(tmp_path: Path) -> None:
    results = launched(tmp_path)
    ((view,),) = (table.views for table in tables(load_records(results.root), tmp_path))
    assert view.cells["÷ simulated"].tolist() == ["–"]
    Results(tmp_path / "x").bench("dapple", [1.0] * 3)
    assert not tables(load_records(tmp_path / "x"), tmp_path / "x")
