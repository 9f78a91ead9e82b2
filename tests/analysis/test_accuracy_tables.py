"""Accuracy over seeds, and the agreement of losses, with every number worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.accuracy import agreements, tables
from analysis.layout import Table, markdown
from analysis.records import load_records
from analysis.tables import write_tables
from tests.analysis.builder import Results


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


def found(results: Results, name: str) -> list[Table]:
    return [table for table in tables(load_records(results.root)) if table.name == name]


def rows(results: Results, name: str = "accuracy") -> list[dict[str, Any]]:
    return [dict(row) for table in found(results, name) for row in table.rows]


def lines(results: Results, name: str, start: str) -> list[list[str]]:
    text = "\n".join(markdown(table) for table in found(results, name))
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith(f"| {start}")
    ]


# ---- accuracy ------------------------------------------------------------------------------------


def test_mean_deviation_and_extremes_over_seeds(results: Results) -> None:
    for seed, accuracy in enumerate((0.90, 0.94, 0.98, 0.98)):
        results.train("dp", seed=seed, accuracy=accuracy, final_loss=0.1 * seed)
    (row,) = rows(results)
    assert row["accuracy_mean_fraction"] == pytest.approx(0.95)
    assert row["accuracy_sd_fraction"] == pytest.approx(math.sqrt(0.0044 / 3))
    assert (row["accuracy_min_fraction"], row["accuracy_max_fraction"]) == (0.90, 0.98)
    assert row["final_loss_mean"] == pytest.approx(0.15)
    assert (row["seeds"], row["epochs"], row["status"]) == ("0 1 2 3", 20, "ok")
    (line,) = lines(results, "accuracy", "dp")
    assert line == [
        *("dp", "R=2", "95.00 ± 3.83", "90.00–98.00", "0 1 2 3", "20", "0.1500"),
        *("measured", "ok"),
    ]


def test_one_seed_has_no_deviation(results: Results) -> None:
    results.train("dp", accuracy=0.95)
    (line,) = lines(results, "accuracy", "dp")
    assert line[2:4] == ["95.00", "95.00"]


def test_model_data_and_regime_are_named(results: Results) -> None:
    results.train("dp")
    (row,) = rows(results)
    assert row["model"] == "VisionTransformer width 64 depth 6 patch 4"
    assert row["data"] == "digits 32×32"
    assert row["regime"] == "20 epochs, B = 90, adamw 0.001, cosine, float32"


def test_failures_are_rows_and_do_not_enter_the_mean(results: Results) -> None:
    results.train("dp", seed=0, accuracy=0.9)
    results.train("dp", seed=1, accuracy=0.1, status="diverged", error="loss is nan at step 7")
    results.train("dp", seed=2, accuracy=None, status="oom", error="rank 0")
    results.train("dp", seed=3, accuracy=None, status="oom", error="rank 0")
    assert [
        (row["seeds"], row["status"], row["accuracy_mean_fraction"]) for row in rows(results)
    ] == [
        ("0", "ok", 0.9),
        ("1", "diverged", None),
        ("2 3", "oom", None),
    ]
    assert lines(results, "accuracy", "dp")[1][-1] == "diverged: loss is nan at step 7"


def test_settings_are_never_averaged(results: Results) -> None:
    results.train("dp", accuracy=0.9)
    results.train("dp", accuracy=0.8, lr=0.1, identity="another-rate")
    results.train("dp", accuracy=0.7, options="overlap = false", identity="another-option")
    results.train("dp", accuracy=0.6, micro_batches=2, identity="another-plan")
    results.train("dp", accuracy=0.5, evidence="emulated", identity="another-class")
    results.train("dp", accuracy=0.4, source="machine-a")
    means = sorted(row["accuracy_mean_fraction"] for row in rows(results))
    assert means == [0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert "dp (overlap = false)" in {row["system"] for row in rows(results)}


def test_ranks_in_one_process_count_for_accuracy_and_say_so(results: Results) -> None:
    results.train("dp", accuracy=0.9)
    results.train("dp", accuracy=0.8, transport="in-process", identity="one-process")
    assert {row["system"]: row["accuracy_mean_fraction"] for row in rows(results)} == {
        "dp": 0.9,
        "dp (in-process)": 0.8,
    }


def test_a_run_that_switches_is_no_reference(results: Results) -> None:
    results.train("dp → gpipe", losses=[2.0, 1.0, 1.0], label="dp → gpipe@3")
    assert not agreement(results).agrees, "there is no dp to compare it with"
    results.train("dp", losses=[2.0, 1.0, 1.0])
    assert (agreement(results).shown, agreement(results).difference) == ("dp → gpipe@3", 0.0)


def test_the_options_of_a_switch_are_told(results: Results) -> None:
    path = results.train("dp → gpipe", label="dp → gpipe@3", options="overlap = false")
    switch = "[switch]\nepoch = 3\n[switch.system]\noptions = { policy = 'B' }\n"
    (path / "config.toml").write_text((path / "config.toml").read_text() + switch)
    (row,) = rows(results)
    assert row["system"] == 'dp → gpipe@3 (policy = "B", overlap = false)'


def test_a_run_that_starts_from_another_is_a_task_of_its_own(results: Results) -> None:
    results.train("dp", losses=[2.0, 1.0, 1.0])
    path = results.train("gpipe", losses=[0.2, 0.1, 0.1])
    config = (path / "config.toml").read_text()
    config = config.replace("[train]", '[train]\nstart_from = "digits-dp-s0"')
    (path / "config.toml").write_text(config)
    assert len({row["regime"] for row in rows(results)}) == 2
    assert agreement(results).compared == 0


def test_where_the_data_lie_is_no_setting(results: Results) -> None:
    results.train("dp", seed=0, accuracy=0.9, root="/a")
    results.train("dp", seed=1, accuracy=0.8, root="/b")
    (row,) = rows(results)
    assert row["accuracy_mean_fraction"] == pytest.approx(0.85)


def test_a_benchmark_has_no_accuracy(results: Results) -> None:
    results.bench("dp", [1.0])
    assert tables(load_records(results.root)) == ()


# ---- agreement of losses -------------------------------------------------------------------------


def compared(results: Results) -> list[Any]:
    return [*agreements(load_records(results.root)).itertuples()]


def agreement(results: Results) -> Any:
    (item,) = compared(results)
    return item


def test_the_largest_relative_difference_of_the_first_epoch(results: Results) -> None:
    results.train("dp", losses=[2.0, 1.0, 4.0, 1.0, 1.0, 1.0])
    results.train("gpipe", losses=[2.001, 1.0, 3.9968, 3.0, 1.0, 1.0])
    # 0.001 ÷ 2 = 5e-4; 0; 0.0032 ÷ 4 = 8e-4; the fourth step is of the second epoch.
    item = agreement(results)
    assert item.difference == pytest.approx(8e-4)
    assert (item.step, item.compared, item.expected) == (2, 3, 3)
    assert item.agrees
    (line,) = lines(results, "loss-agreement", "gpipe")
    assert line == ["gpipe", "S=2 M=4", "0", "8.0e-04", "2", "3 of 3", "yes", "ok"]


@pytest.mark.parametrize(("loss", "agrees"), [(2.0019, True), (2.0021, False), (1.9979, False)])
def test_one_in_a_thousand_is_the_limit(results: Results, loss: float, agrees: bool) -> None:
    results.train("dp", losses=[2.0, 1.0, 1.0])
    results.train("gpipe", losses=[2.0, 1.0, 1.0], identity="same")
    results.train("dapple", losses=[loss, 1.0, 1.0])
    same, other = compared(results)
    assert (same.agrees, same.difference) == (True, 0)
    assert other.agrees == agrees


def test_the_difference_is_relative_to_dp(results: Results) -> None:
    results.train("dp", losses=[1.0, 1.0, 1.0])
    results.train("gpipe", losses=[2.0, 1.0, 1.0])
    assert agreement(results).difference == 1.0  # not 0.5


def test_a_missing_step_does_not_agree(results: Results) -> None:
    results.train("dp", losses=[2.0, 1.0, 1.0])
    results.train("gpipe", losses=[2.0, 1.0], status="failed")
    item = agreement(results)
    assert (item.difference, item.compared, item.expected, item.agrees) == (0, 2, 3, False)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_loss_that_is_no_number_does_not_agree(results: Results, place: int) -> None:
    losses = [2.0, 1.5, 1.0]
    results.train("dp", losses=losses)
    losses[place] = math.nan
    results.train("gpipe", losses=losses)
    item = agreement(results)
    assert item.compared == 3
    assert math.isnan(item.difference)
    assert (item.step, item.agrees) == (place, False)
    assert lines(results, "loss-agreement", "gpipe")[0][3] == "nan"


@pytest.mark.parametrize("changes", [{"seed": 1}, {"lr": 0.1}, {"batch_size": 45}, {"epochs": 3}])
def test_only_runs_of_one_task_and_seed_are_compared(
    results: Results, changes: dict[str, Any]
) -> None:
    results.train("dp", losses=[2.0, 1.0, 1.0], **changes)
    results.train("gpipe", losses=[2.0, 1.0, 1.0])
    item = agreement(results)
    assert (item.system, pd.isna(item.reference), item.agrees) == ("gpipe", True, False)
    assert lines(results, "loss-agreement", "gpipe")[0][6] == "no dp run"


def test_only_synchronous_systems_at_given_settings_are_compared(results: Results) -> None:
    chosen = "[best_of]\nsweep = 'x'\n[best_of.chosen]\n'train.optimizer.lr' = 0.001"
    for system in ("dp", "gpipe", "ashpipe", "dp → gpipe", "dp → ashpipe"):
        results.train(system, losses=[1.0, 1.0, 1.0])
    results.train("dapple", losses=[1.0, 1.0, 1.0], sections=chosen)
    assert [item.system for item in compared(results)] == ["gpipe", "dp → gpipe"]


def test_dp_without_options_is_the_reference(results: Results) -> None:
    results.train("dp", losses=[9.0, 9.0, 9.0], options="overlap = false", identity="a-blocking")
    results.train("dp", losses=[1.0, 1.0, 1.0], identity="b-plain")
    results.train("gpipe", losses=[1.0, 1.0, 1.0])
    blocking, gpipe = compared(results)
    assert (blocking.id, blocking.difference) == ("a-blocking", 8.0)
    assert gpipe.reference_id == "b-plain"
    assert gpipe.agrees


def test_a_failed_dp_run_is_second_choice(results: Results) -> None:
    results.train("dp", losses=[9.0], status="failed", identity="a-failed")
    results.train("dp", losses=[1.0, 1.0, 1.0], options="overlap = false", identity="b-blocking")
    results.train("gpipe", losses=[1.0, 1.0, 1.0])
    gpipe = compared(results)[-1]
    assert gpipe.reference_id == "b-blocking"


def test_where_dp_is_alone_there_is_nothing_to_agree(results: Results, tmp_path: Path) -> None:
    results.train("dp", losses=[1.0, 1.0, 1.0])
    assert agreements(load_records(results.root)).empty
    assert found(results, "loss-agreement") == []
    assert [path.name for path in write_tables(results.root, tmp_path)] == [
        *("tables.md", "accuracy.csv")
    ]
