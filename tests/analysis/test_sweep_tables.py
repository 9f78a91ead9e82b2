"""Tables of sweeps and studies: every cell is shown, and every number is worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import accuracy, sweeps
from analysis.layout import Table, markdown
from analysis.records import load_records
from analysis.statistics import mean_interval
from analysis.tables import write_tables
from tests.analysis.builder import Results

HELD_OUT = "sizes = { train = 1000, held_out = 300 }"


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


def point(results: Results, system: str, lr: float, accuracy: float | None, **changes: Any) -> None:
    """A run of a sweep of the learning rate."""
    given: dict[str, Any] = {"sections": f'[swept]\n"train.optimizer.lr" = {lr}', "sizes": HELD_OUT}
    given["identity"] = f"{system}-{lr}-{changes.get('seed', 0)}"
    results.train(system, lr=lr, accuracy=accuracy, **given | changes)


def tables(results: Results) -> list[Table]:
    return [*sweeps.tables(load_records(results.root))]


def grid(table: Table) -> list[list[str]]:
    lines = [line for line in markdown(table).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[0], *lines[2:])]


# ---- sweeps --------------------------------------------------------------------------------------


def test_systems_down_and_values_across_with_the_best_in_bold(results: Results) -> None:
    for lr, of_dp, of_gpipe in ((0.1, 0.5, 0.8), (0.01, 0.7, 0.8), (1.0, 0.6, 0.1)):
        point(results, "dp", lr, of_dp)
        point(results, "gpipe", lr, of_gpipe)
    (table,) = tables(results)
    assert grid(table) == [
        ["system", "plan", "lr = 0.01", "lr = 0.1", "lr = 1.0"],
        ["dp", "R=2", "**70.00**", "50.00", "60.00"],
        # Of equals the smaller value.
        ["gpipe", "S=2 M=4", "**80.00**", "80.00", "10.00"],
    ]
    assert "images held out of the training set" in table.views[0].caption
    assert table.views[0].title == (
        "Sweep: VisionTransformer width 64 depth 6 patch 4 on digits 32×32, 1000 training images, "
        "validated on 300 others held out, 20 epochs, B = 90, adamw, sweep of lr, cosine, float32"
    )


def test_what_diverged_or_did_not_run_keeps_its_cell(results: Results) -> None:
    point(results, "dp", 0.1, 0.5)
    point(results, "dp", 1.0, 0.9, status="diverged", error="loss is nan at step 7")
    point(results, "gpipe", 0.1, None, status="failed", error="rank 0")
    (table,) = tables(results)
    assert grid(table)[1:] == [
        ["dp", "R=2", "**50.00**", "diverged"],
        ["gpipe", "S=2 M=4", "failed", "–"],
    ]
    told = [(row["point"], row["status"], row["accuracy_mean_fraction"]) for row in table.rows]
    assert told == [
        ("train.optimizer.lr = 0.1", "ok", 0.5),
        ("train.optimizer.lr = 1.0", "diverged", None),
        ("train.optimizer.lr = 0.1", "failed", None),
    ]


def test_seeds_of_a_cell_are_averaged_and_one_that_diverged_is_told(results: Results) -> None:
    for seed, value in ((0, 0.5), (1, 0.7)):
        point(results, "dp", 0.1, value, seed=seed)
        point(results, "dp", 1.0, 0.9, seed=seed, status="diverged" if seed else "ok")
    (table,) = tables(results)
    assert grid(table)[1:] == [["dp", "R=2", "**60.00 ± 14.14**", "diverged, 90.00"]]


def test_a_grid_has_a_row_for_each_but_its_last_axis(results: Results) -> None:
    """dp has no stages to sweep; it stands in the same table all the same."""
    for momentum in (0.9, 0.0):
        for lr in (0.1, 0.2):
            axes = f'"train.batch_size" = {90 if momentum else 30}\n"train.optimizer.lr" = {lr}'
            size: dict[str, Any] = {"batch_size": 90 if momentum else 30, "lr": lr}
            name = f"{momentum}-{lr}"
            section = f"[swept]\n{axes}"
            results.train("dp", identity=f"dp-{name}", accuracy=lr, sections=section, **size)
            for stages in (8, 4):
                section = f'[swept]\n"plan.stages" = {stages}\n{axes}'
                what = {"identity": f"gpipe-{stages}-{name}", "accuracy": lr * momentum}
                results.train("gpipe", stages=stages, sections=section, **what, **size)
    (table,) = tables(results)
    assert grid(table) == [
        ["system", "plan", "batch_size", "lr = 0.1", "lr = 0.2"],
        ["dp", "R=2", "30", "10.00", "**20.00**"],
        ["dp", "R=2", "90", "10.00", "**20.00**"],
        ["gpipe", "S=4 M=4", "30", "**0.00**", "0.00"],
        ["gpipe", "S=4 M=4", "90", "9.00", "**18.00**"],
        ["gpipe", "S=8 M=4", "30", "**0.00**", "0.00"],
        ["gpipe", "S=8 M=4", "90", "9.00", "**18.00**"],
    ]
    assert len(table.rows) == 12


def test_an_axis_that_shows_in_the_plan_alone(results: Results) -> None:
    for stages in (2, 4):
        section = f'[swept]\n"plan.stages" = {stages}'
        results.train("gpipe", identity=f"s{stages}", stages=stages, sections=section, accuracy=0.5)
    (table,) = tables(results)
    assert grid(table) == [
        ["system", "plan", "accuracy"],
        ["gpipe", "S=2 M=4", "**50.00**"],
        ["gpipe", "S=4 M=4", "**50.00**"],
    ]


def test_sweeps_of_other_tasks_are_other_tables_and_in_no_accuracy_table(
    results: Results, tmp_path: Path
) -> None:
    point(results, "dp", 0.1, 0.5)
    point(results, "dp", 0.1, 0.5, epochs=3, identity="other")
    assert len(tables(results)) == 2
    assert accuracy.tables(load_records(results.root)) == ()
    written = [path.name for path in write_tables(results.root, tmp_path)]
    assert written == ["tables.md", "sweep.csv"]


# ---- studies -------------------------------------------------------------------------------------


def chosen(results: Results, system: str, lr: float, accuracies: list[float], **more: Any) -> None:
    """Seeds of a system at the best learning rate of its sweep."""
    for seed, value in enumerate(accuracies, 1):
        best = f'[best_of]\nsweep = "sweep-{system}"\n[best_of.chosen]\n"train.optimizer.lr" = {lr}'
        name = f"study-{system}-{seed}"
        results.train(
            system, seed=seed, lr=lr, accuracy=value, identity=name, sections=best, **more
        )


def test_systems_at_their_best_share_a_table_and_are_compared_by_seed(results: Results) -> None:
    chosen(results, "dp", 0.1, [0.80, 0.82, 0.84])
    chosen(results, "gpipe", 0.03, [0.79, 0.80, 0.81])
    point(results, "dp", 0.1, 0.5)
    (table,) = accuracy.tables(load_records(results.root))
    lines = grid(table)
    # Differences −1, −2, −3 points: mean −2, deviation 1, and t = 4.303 for two degrees of freedom.
    reach = 4.302653 / math.sqrt(3)
    assert lines[0][:5] == ["system", "plan", "chosen", "accuracy", "− dp"]
    assert lines[1][:5] == ["dp", "R=2", "lr = 0.1", "82.00 ± 2.00", "–"]
    assert lines[2][:5] == [
        *("gpipe", "S=2 M=4", "lr = 0.03", "80.00 ± 1.00"),
        f"-2.00 [{-2 - reach:.2f}, {-2 + reach:.2f}]",
    ]
    row = table.rows[1]
    assert row["difference_to_dp_mean_fraction"] == pytest.approx(-0.02)
    assert row["difference_to_dp_low_fraction"] == pytest.approx(-0.02 - reach / 100)
    assert row["pairs_with_dp"] == 3
    assert "adamw, lr best of a sweep, cosine" in table.views[0].title
    assert "paired by seed" in table.views[0].caption


def test_a_seed_that_one_of_them_lacks_is_no_pair(results: Results) -> None:
    chosen(results, "dp", 0.1, [0.80, 0.82])
    chosen(results, "gpipe", 0.1, [0.79, 0.80, 0.81])
    chosen(results, "dapple", 0.1, [0.5], status="diverged")
    (table,) = accuracy.tables(load_records(results.root))
    pairs = {row["system"]: row["pairs_with_dp"] for row in table.rows}
    assert pairs == {"dp": None, "gpipe": 2, "dapple": None}
    assert grid(table)[-1][-1] == "diverged"


def test_given_and_chosen_values_are_never_in_one_table(results: Results) -> None:
    chosen(results, "dp", 0.1, [0.8])
    results.train("dp", lr=0.1, seed=7)
    assert len(accuracy.tables(load_records(results.root))) == 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (math.nan, math.nan, math.nan)),
        ([3.0], (3.0, -math.inf, math.inf)),
        ([1.0, 3.0], (2.0, 2.0 - 12.706205, 2.0 + 12.706205)),
        ([2.0, 2.0, 2.0], (2.0, 2.0, 2.0)),
    ],
)
def test_the_interval_of_a_mean(values: list[float], expected: tuple[float, ...]) -> None:
    found = mean_interval(pd.Series(values, dtype=float))
    assert found == pytest.approx(expected, nan_ok=True)
