"""What a schedule without a flush attains of its bound's advantage."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records import load_records
from analysis.unflushed import tables
from tests.analysis.builder import Results


def test_the_ratio_is_set_against_that_of_the_bounds(tmp_path: Path) -> None:
    """ashpipe: 100 images in 2 s, 1.6 s at best; 1F1B: 3 s, 2 s at best; so 1.5 against 1.25.
    The third has half the images in a round."""
    results = Results(tmp_path)
    results.bench("ashpipe", [2.0] * 11, bounds=[1.6] * 11)
    results.bench("torch-1f1b", [3.0] * 11, bounds=[2.0] * 11)
    results.bench("unit", [1.0] * 11, system="ashpipe", samples=50, bounds=[0.5] * 11)
    results.bench("dp", [4.0] * 11)
    (table,) = tables(load_records(tmp_path))
    rows = {row["label"]: row for row in table.rows}
    assert set(rows) == {"ashpipe", "unit"}
    for label, ratio, bounds in (("ashpipe", 1.5, 1.25), ("unit", 1.5, 2.0)):
        row = rows[label]
        assert row["against"] == "torch-1f1b"
        assert row["ratio_median"] == pytest.approx(ratio)
        assert row["ratio_of_bounds_median"] == pytest.approx(bounds)
        assert row["attained_low"] == pytest.approx(ratio / bounds)
    assert "1.200 [1.200, 1.200]" in table.views[0].cells.to_string()


def test_flush_schedules_alone_make_no_such_table(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.bench("dapple", [2.0] * 9, bounds=[1.0] * 9)
    results.bench("torch-1f1b", [2.0] * 9, bounds=[1.0] * 9)
    assert tables(load_records(tmp_path)) == ()
