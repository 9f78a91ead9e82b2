"""Ratios over the rate of a link, and the rate at which they are what a paper says."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.link_rates import crossing, link_rates, tables
from analysis.records import load_records
from tests.analysis.builder import Results
from tests.analysis.test_simulations import row, write

SECTIONS = """
[launch]
cluster = "two"
bandwidth_share = {share}
[paper]
ratio = 2.0
of = "ashpipe"
over = "dp"
source = "here"
"""


def bench(results: Results, share: float, dp: float, ash: float) -> str:
    """A benchmark whose ashpipe takes ``ash`` seconds a round, and whose dp ``dp``."""
    name = f"bench-{share}".replace(".", "-")
    for label, wall in (("dp", dp), ("ashpipe", ash)):
        path = results.bench(
            label, [wall * drift for drift in (1, 1.2, 0.9)], bench_id=name, evidence="emulated"
        )
        values = {"name": "a/b", "system": label, "options": "", "root": "", "sizes": ""}
        values |= {"sections": SECTIONS.format(share=share), "stages": 2, "micro_batches": 1}
        results.config(path, {**values, "batch_size": 90, "epochs": 1, "seed": 0, "lr": 0.1})
    return name


def test_the_ratio_of_a_paper_lies_where_two_rates_enclose_it(tmp_path: Path) -> None:
    results = Results(tmp_path)
    fast, slow = bench(results, 1.0, 1.0, 1.0), bench(results, 0.25, 4.0, 1.0)
    numbers = {"all_reduce_to_compute": 0.5, "transfer_to_stage": 0.01}
    rows = [
        row("dp", 100.0, run=fast, segment_seconds=1.0, numbers=numbers),
        row("ashpipe", 100.0, run=fast, segment_seconds=1.0, numbers=numbers),
        row("dp", 100.0, run=slow, segment_seconds=5.0, numbers={**numbers, NAME: 2.0}),
        row("ashpipe", 100.0, run=slow, segment_seconds=1.0, numbers=numbers),
    ]
    write(tmp_path, rows)
    found = link_rates(load_records(tmp_path), tmp_path).set_index("bandwidth_share")
    assert found["ratio"].to_dict() == pytest.approx({1.0: 1.0, 0.25: 4.0})
    assert found["simulated"].to_dict() == pytest.approx({1.0: 1.0, 0.25: 5.0})
    assert found[NAME].to_dict() == {1.0: 0.5, 0.25: 2.0}
    ((view,),) = (table.views for table in tables(load_records(tmp_path), tmp_path))
    # From 1 to 4 and a level of 2: half of the way, between 1 and 1/4, and between 0.5 and 2.
    assert "2 at 0.5× with all-reduce ÷ compute = 1 (emulated)" in view.caption


NAME = "all_reduce_to_compute"


def test_nothing_to_compare_is_no_table(tmp_path: Path) -> None:
    results = Results(tmp_path)
    bench(results, 1.0, 1.0, 1.0)
    assert not tables(load_records(tmp_path), tmp_path), "one rate only"
    results.bench("dp", [1.0] * 3)
    assert len(link_rates(load_records(tmp_path), tmp_path)) == 1


def test_a_level_that_is_not_reached() -> None:
    assert crossing([(1.0, 1.0), (0.5, 1.5)], 2.0) is None
    assert crossing([(0.5, 4.0), (1.0, 1.0)], 4.0) == pytest.approx(0.5)
