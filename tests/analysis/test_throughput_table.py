"""The throughput table, with every number worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.layout import markdown
from analysis.records import load_records, machine_line
from analysis.throughput import compare, tables
from tests.analysis.builder import MACHINE, PARTS, Results

# The machine is four times as slow in the last rounds: only pairing by round sees through it.
DP = [1, 1, 1, 1, 2, 4, 4, 4, 4]
GPIPE = [2, 2, 2, 2, 1.6, 3.2, 3.2, 3.2, 3.2]
PEER = [1.1 * wall for wall in GPIPE]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


def rows(results: Results) -> dict[str, dict[str, Any]]:
    (table,) = tables(load_records(results.root))
    return {str(row["label"]): dict(row) for row in table.rows}


def estimate(row: dict[str, Any], name: str, unit: str = "") -> tuple[Any, ...]:
    return tuple(row[f"{name}_{end}{unit}"] for end in ("median", "low", "high"))


def test_images_per_second_are_medians_over_rounds(results: Results) -> None:
    results.bench("dp", DP)
    # 100 images each: 100 ×4, 50, 25 ×4. Median the 5th, interval from the 2nd to the 8th of 9.
    assert estimate(rows(results)["dp"], "throughput", "_images_per_s") == (50, 25, 100)
    assert rows(results)["dp"]["rounds"] == 9


def test_ratio_to_dp_is_paired_by_round_and_above_one_if_faster(results: Results) -> None:
    results.bench("dp", DP)
    results.bench("gpipe", GPIPE)
    # DP ÷ GPIPE: 0.5 ×4, 1.25 ×5. Median 1.25. (Medians: 50 ÷ 50 = 1; mean 0.917; inverse 0.8.)
    assert estimate(rows(results)["gpipe"], "ratio_to_dp") == pytest.approx((1.25, 0.5, 1.25))
    assert estimate(rows(results)["dp"], "ratio_to_dp") == (1, 1, 1)


def test_the_order_of_rounds_in_the_file_does_not_matter(results: Results) -> None:
    results.bench("dp", DP)
    results.bench("gpipe", GPIPE)
    before = rows(results)
    results.bench("gpipe", GPIPE, reverse=True)
    assert rows(results) == before


def test_ratio_to_the_peer_of_the_same_schedule(results: Results) -> None:
    results.bench("gpipe", GPIPE)
    results.bench("torch-gpipe", PEER)
    results.bench("torch-1f1b", DP)
    found = rows(results)
    assert estimate(found["gpipe"], "ratio_to_peer") == pytest.approx((1.1, 1.1, 1.1))
    assert found["gpipe"]["peer"] == "torch-gpipe"
    assert found["torch-gpipe"]["peer"] is None
    assert estimate(found["gpipe"], "ratio_to_dp") == (None, None, None)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("dp", "torch-ddp"), ("gpipe", "torch-gpipe"), ("dapple", "torch-1f1b")]
)
def test_every_system_knows_its_peer(results: Results, ours: str, theirs: str) -> None:
    results.bench(ours, DP)
    results.bench(theirs, DP)
    assert rows(results)[ours]["peer"] == theirs


@pytest.mark.parametrize("changes", [{"micro_batches": 8}, {"batch_size": 45}, {"stages": 3}])
def test_a_peer_of_another_shape_is_none(results: Results, changes: dict[str, int]) -> None:
    results.bench("gpipe", GPIPE)
    results.bench("torch-gpipe", PEER, **changes)
    assert rows(results)["gpipe"]["peer"] is None


def test_contenders_of_two_launches_are_not_compared(results: Results) -> None:
    results.bench("dp", DP, bench_id="bench-1")
    results.bench("gpipe", GPIPE, bench_id="bench-2")
    one, two = compare(load_records(results.root))
    assert (one.launch, two.launch) == ("bench-1", "bench-2")
    assert two.contenders["label"].tolist() == ["gpipe"]
    assert two.contenders["ratio_to_dp_median"].isna().all()


def test_contenders_of_two_evidence_classes_are_not_compared(results: Results) -> None:
    results.bench("dp", DP)
    results.bench("gpipe", GPIPE, evidence="emulated")
    row = rows(results)["gpipe"]
    assert row["evidence"] == "emulated"
    assert row["ratio_to_dp_median"] is None


def test_share_of_the_bound_is_bound_over_wall_paired_by_round(results: Results) -> None:
    # Shares 0.5, 0.6, 0.7, 0.8, 0.9 ×5.
    shares = [0.9, 0.5, 0.9, 0.6, 0.9, 0.7, 0.9, 0.8, 0.9]
    bounds = [share * wall for share, wall in zip(shares, GPIPE, strict=True)]
    results.bench("gpipe", GPIPE, bounds=bounds)
    results.bench("dp", DP)
    assert estimate(rows(results)["gpipe"], "share_of_bound") == pytest.approx((0.9, 0.6, 0.9))
    assert rows(results)["dp"]["share_of_bound_median"] is None


def account(wall: float, **parts: float) -> dict[str, float]:
    return {**dict.fromkeys(PARTS, 0.0), **parts, "wall": wall}


def test_wall_time_shares_are_means_over_ranks(results: Results) -> None:
    breakdown = {
        "0": account(10, compute=6, idle=3, overhead=1),
        "1": account(20, compute=16, communication=2, optimizer=2),
    }
    results.bench("gpipe", GPIPE, breakdown=breakdown)
    row = rows(results)["gpipe"]
    found = {part: row[f"{part}_fraction_of_wall"] for part in PARTS}
    assert found == pytest.approx(
        {
            "compute": 0.7,  # (0.6 + 0.8) ÷ 2, not 22 ÷ 30
            "interference": 0,
            "communication": 0.05,
            "reduce": 0,
            "optimizer": 0.05,
            "idle": 0.15,
            "overhead": 0.05,
        }
    )
    assert row["unattributed_fraction_of_wall"] is None


def test_what_is_unknown_of_a_peer_is_unattributed_and_not_zero(results: Results) -> None:
    known = {"wall": 10.0, "compute": 6.0, "interference": 1.0, "optimizer": 0.5}
    results.bench("torch-gpipe", PEER, breakdown={"0": known, "1": known})
    row = rows(results)["torch-gpipe"]
    assert row["idle_fraction_of_wall"] is None
    assert row["unattributed_fraction_of_wall"] == pytest.approx(0.25)


def test_a_part_that_one_rank_does_not_tell_is_unattributed(results: Results) -> None:
    told = {"wall": 10.0, "compute": 6.0, "idle": 3.0}
    silent = {"wall": 10.0, "compute": 8.0}
    results.bench("torch-gpipe", PEER, breakdown={"0": told, "1": silent})
    row = rows(results)["torch-gpipe"]
    assert row["compute_fraction_of_wall"] == pytest.approx(0.7)
    assert row["idle_fraction_of_wall"] is None
    assert row["unattributed_fraction_of_wall"] == pytest.approx(0.3)


# ---- noise ---------------------------------------------------------------------------------------

NOISE = (0.97, 1.0, 1.04, 0.98, 1.0, 1.05, 0.99, 1.01, 1.0)  # interval [0.98, 1.04]


def again(walls: list[float]) -> list[float]:
    """Walls of a second label whose images/s are NOISE times as many."""
    return [wall / noise for wall, noise in zip(walls, NOISE, strict=True)]


def test_the_floor_comes_from_a_label_and_its_again(results: Results) -> None:
    results.bench("dp", DP)
    results.bench("dp-again", again(DP), system="dp")
    row = rows(results)["dp"]
    assert row["aa_floor_half_width"] == pytest.approx(0.03)
    assert row["aa_floor_reach"] == pytest.approx(0.04)


def test_of_two_floors_the_wider_counts(results: Results) -> None:
    for label in ("dapple", "dp"):
        results.bench(label, DP)
    results.bench("dp-again", DP, system="dp")
    results.bench("dapple-again", again(DP), system="dapple")
    (found,) = compare(load_records(results.root))
    assert found.pair == "dapple"
    assert found.floor is not None
    assert found.floor.reach == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("speed", "reading"),
    [(1.03, "indistinguishable"), (0.97, "indistinguishable"), (1.06, "faster"), (0.9, "slower")],
)
def test_a_ratio_inside_the_floor_is_indistinguishable(
    results: Results, speed: float, reading: str
) -> None:
    results.bench("dp", DP)
    results.bench("dp-again", again(DP), system="dp")
    results.bench("gpipe", [wall / speed for wall in DP])
    results.bench("torch-gpipe", DP)
    row = rows(results)["gpipe"]
    assert row["ratio_to_dp_reading"] == row["ratio_to_peer_reading"] == reading
    line = next(line for line in text(results).splitlines() if line.startswith("| gpipe"))
    assert ("≈" in line) is (reading == "indistinguishable")


def test_without_a_floor_nothing_is_read_into_a_ratio(results: Results) -> None:
    results.bench("dp", DP)
    results.bench("gpipe", GPIPE)
    assert rows(results)["gpipe"]["ratio_to_dp_reading"] is None
    assert "A/A floor: unknown" in text(results)


def test_a_second_measurement_is_nobodys_baseline(results: Results) -> None:
    results.bench("dp-again", DP, system="dp")
    results.bench("gpipe", GPIPE)
    assert rows(results)["gpipe"]["ratio_to_dp_median"] is None


# ---- what is shown -------------------------------------------------------------------------------


def text(results: Results) -> str:
    return "\n\n".join(markdown(table) for table in tables(load_records(results.root)))


def test_failures_are_rows_with_their_reason_and_without_numbers(results: Results) -> None:
    results.bench("dp", DP)
    results.bench("gpipe", [1.0], status="failed", error="rank 1 ended\nwith SIGKILL | B3")
    row = rows(results)["gpipe"]
    assert (row["status"], row["throughput_median_images_per_s"]) == ("failed", None)
    assert "failed: rank 1 ended with SIGKILL \\| B3 |" in text(results)


@pytest.mark.parametrize("status", ["oom", "timeout", "skipped_hardware", "unfinished"])
def test_a_failed_baseline_is_none(results: Results, status: str) -> None:
    results.bench("dp", DP, status=status)
    results.bench("gpipe", GPIPE)
    assert rows(results)["gpipe"]["ratio_to_dp_median"] is None
    assert rows(results)["dp"]["status"] == status


def test_rows_follow_the_systems_each_before_its_peer(results: Results) -> None:
    for label in ("torch-1f1b", "torch-ddp", "gpipe", "dapple", "torch-gpipe", "dp", "avgpipe"):
        results.bench(label, DP)
    assert [*rows(results)] == [
        *("dp", "torch-ddp", "gpipe", "torch-gpipe", "dapple", "torch-1f1b", "avgpipe")
    ]


def test_markdown_shows_medians_with_intervals_and_says_how_they_came_to_be(
    results: Results,
) -> None:
    results.bench("dp", DP)
    results.bench("dp-again", again(DP), system="dp")
    results.bench("gpipe", GPIPE, breakdown={"0": account(10, compute=7, idle=3)})
    shown = text(results)
    assert "### Throughput: smoke/throughput (bench-1)" in shown
    speeds, shares = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in shown.splitlines()
        if line.startswith("| gpipe")
    )
    assert speeds[:4] == ["gpipe", "S=2 M=4", "50.00 [31.25, 50.00]", "1.250 [0.500, 1.250] ≈"]
    assert speeds[4:] == ["–", "–", "9", "measured", "ok"]
    assert shares == ["gpipe", "70.0", "0.0", "0.0", "0.0", "0.0", "30.0", "0.0", "–"]
    assert "A/A floor: ±4.0 % (half-width 3.0 %), dp against itself, 9 pairs" in shown
    assert "Machine: Example CPU, 2 cores, 8.0 GB memory, Linux x86_64." in shown


def test_few_rounds_have_no_interval(results: Results) -> None:
    results.bench("dp", [1, 2, 4])
    assert "50.00 [–]" in text(results)


def test_a_reference_says_whose_it_is(results: Results) -> None:
    results.bench("dp", DP, source="machine-a")
    assert "reference record of machine-a" in text(results)


def test_benchmarks_are_ordered_by_the_number_in_their_name(results: Results) -> None:
    for size in (16, 8, 2):
        results.bench("dp", DP, bench_id=f"bench-{size}", name=f"throughput-m{size}")
    names = [comparison.name for comparison in compare(load_records(results.root))]
    assert names == ["throughput-m2", "throughput-m8", "throughput-m16"]


def test_machine_line() -> None:
    assert machine_line({**MACHINE, "accelerators": ["GPU A", "GPU A"], "swap": 3}) == (
        "Example CPU, 2 cores, 8.0 GB memory, GPU A, GPU A, Linux x86_64, swap 3"
    )
    assert machine_line({}) == "not recorded"
