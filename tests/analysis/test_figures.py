"""Figures: written, not empty, the same bytes every time, and true to the records."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import figures
from analysis.records import load_records
from tests.analysis.builder import PARTS, Results

NAMES = ("breakdown", "learning-curves", "loss", "throughput")
WALLS = [1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 1.1, 0.9, 1.25]


def account() -> dict[str, dict[str, float]]:
    return {"0": {**dict.fromkeys(PARTS, 1.0), "compute": 4.0, "wall": 10.0}}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    made = Results(tmp_path / "results")
    for system in ("dp", "torch-ddp", "gpipe"):
        losses = [2.0, 1.5, 1.0 if system == "dp" else 1.0001]
        made.train(system, losses=losses, evaluations={3: 0.9})
        made.bench(system, WALLS, breakdown=account())
    made.bench("dapple", [], status="oom", error="rank 0")
    return made


def draw(name: str, results: Results) -> Figure:
    return figures.FIGURES[name](load_records(results.root))


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_is_a_pdf_and_a_png_with_something_on_it(
    results: Results, tmp_path: Path, name: str
) -> None:
    paths = figures.write_figure(name, results.root, tmp_path / "out")
    assert [path.name for path in paths] == [f"{name}.pdf", f"{name}.png"]
    assert paths[0].read_bytes().startswith(b"%PDF")
    image = matplotlib.image.imread(paths[1])[..., :3]
    assert image.shape[1] > 900  # pixels: 3 inches or more at 300 dpi
    assert 0.02 < np.mean(image < 0.9) < 0.9


def test_figures_are_the_same_bytes_in_another_process(results: Results, tmp_path: Path) -> None:
    here = [
        path.read_bytes()
        for name in NAMES
        for path in figures.write_figure(name, results.root, tmp_path / "a")
    ]
    program = (
        "import sys, pathlib\n"
        "from analysis.figures import write_figure\n"
        "for name in sys.argv[3:]:\n"
        "    write_figure(name, pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
    )
    style = tmp_path / "matplotlibrc"
    style.write_text("font.size: 20\n")
    subprocess.run(
        [sys.executable, "-c", program, str(results.root), str(tmp_path / "b"), *NAMES],
        cwd=Path(__file__).resolve().parents[2],
        # Neither the clock nor the user's own style may show.
        env={**os.environ, "MATPLOTLIBRC": str(style), "SOURCE_DATE_EPOCH": "86400"},
        check=True,
    )
    there = [
        (tmp_path / "b" / f"{name}.{kind}").read_bytes()
        for name in NAMES
        for kind in ("pdf", "png")
    ]
    assert here == there


def test_bars_are_the_medians_and_peers_are_told_apart(results: Results) -> None:
    (panel,) = draw("throughput", results).axes
    heights = [bar.get_height() for bar in panel.patches]
    assert heights == pytest.approx([100.0, 100.0, 100.0])  # the mean would be 96.9
    assert [label.get_text() for label in panel.get_xticklabels()] == ["dp", "torch-ddp", "gpipe"]
    assert [bool(bar.get_hatch()) for bar in panel.patches] == [False, True, False]
    assert panel.get_title(loc="left") == "smoke/throughput · measured"


def test_every_round_is_a_dot_and_the_interval_a_line(results: Results) -> None:
    (panel,) = draw("throughput", results).axes
    (dots,) = panel.collections
    heights = np.asarray(dots.get_offsets())[:, 1]
    assert sorted(heights) == pytest.approx(sorted(3 * [100 / wall for wall in WALLS]))
    assert len(panel.lines) == 3
    for line in panel.lines:
        ends = np.asarray(line.get_ydata())
        assert (np.nanmin(ends), np.nanmax(ends)) == pytest.approx((100 / 1.2, 100 / 0.9))


def test_too_few_rounds_are_dots_without_an_interval(results: Results) -> None:
    results.bench("gpipe", [1.0, 1.0, 2.0])
    (panel,) = draw("throughput", results).axes
    assert [bar.get_height() for bar in panel.patches] == pytest.approx([100.0, 100.0, 100.0])
    assert len(np.asarray(panel.collections[0].get_offsets())) == 2 * len(WALLS) + 3
    drawn = [np.isfinite(np.asarray(line.get_ydata(), float)).any() for line in panel.lines]
    assert drawn == [True, True, False]
    assert panel.get_ylim()[1] < 200


def test_shares_are_stacked_to_the_whole(results: Results) -> None:
    (panel,) = draw("breakdown", results).axes
    ends = [bar.get_x() + bar.get_width() for bar in panel.patches]
    assert max(ends) == pytest.approx(1)
    assert panel.patches[0].get_width() == pytest.approx(0.4)


def test_loss_curves_and_their_distance_from_dp(results: Results) -> None:
    curves, differences = draw("loss", results).axes
    legend = curves.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["dp", "torch-ddp", "gpipe"]
    assert list(curves.lines[0].get_ydata()) == [2.0, 1.5, 1.0]
    assert list(differences.lines[0].get_xdata()) == [3]
    assert list(differences.lines[0].get_ydata()) == pytest.approx([1e-4])


def test_learning_curves_are_means_by_images_seen_with_a_band_over_seeds(tmp_path: Path) -> None:
    results = Results(tmp_path / "results")
    for seed, (loss, accuracy) in enumerate([(1.0, 0.5), (2.0, 0.6), (6.0, 0.7)]):
        more: dict[str, Any] = {"steps_per_epoch": 30, "evaluations": {60: accuracy}}
        more |= {"status": "diverged"} if seed == 2 else {}
        results.train("dp", seed=seed, losses=[loss] * 60, **more)
    point = '[swept]\n"train.optimizer.lr" = 0.001'
    results.train("dp", identity="of-a-sweep", losses=[9.0], evaluations={1: 0.1}, sections=point)
    losses, accuracies = draw("learning-curves", results).axes
    line = losses.lines[0]
    # Three updates of 90 images a point, a tenth of an epoch.
    assert list(line.get_xdata()) == list(range(270, 5401, 270))
    assert list(line.get_ydata()) == pytest.approx([3.0] * 20)
    (band,) = losses.collections
    heights = np.asarray(band.get_paths()[0].vertices)[:, 1]
    assert (heights.min(), heights.max()) == (1.0, 6.0)
    assert list(accuracies.lines[0].get_xdata()) == [5400]
    assert list(accuracies.lines[0].get_ydata()) == pytest.approx([0.6])
    legend = losses.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["dp (1 of 3 not to the end)"]


def test_benchmarks_are_panels_and_a_repeated_name_is_told_apart(results: Results) -> None:
    results.bench("dp", WALLS, bench_id="random-bench-s0-ab12cd34")
    titles = [panel.get_title(loc="left") for panel in draw("throughput", results).axes]
    assert titles == ["smoke/throughput 1 · measured", "smoke/throughput ab12cd34 · measured"]


def test_references_are_drawn_only_without_fresh_runs_and_named(
    results: Results, tmp_path: Path
) -> None:
    results.bench("dp", [9.0] * 9, bench_id="other", source="machine-a")
    before = figures.write_figure("throughput", results.root, tmp_path / "a")[1].read_bytes()
    alone = Results(tmp_path / "alone")
    alone.bench("dp", [9.0] * 9, bench_id="other", source="machine-a")
    (panel,) = draw("throughput", alone).axes
    assert panel.get_title(loc="left") == "smoke/throughput · measured · reference: machine-a"
    (results.root / "reference").rename(tmp_path / "elsewhere")
    after = figures.write_figure("throughput", results.root, tmp_path / "b")[1].read_bytes()
    assert before == after


def test_an_unknown_figure_is_refused_with_the_nearest_name(results: Results) -> None:
    with pytest.raises(ValueError, match="unknown figure 'thruput': did you mean throughput"):
        figures.write_figure("thruput", results.root, results.root)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_draw_is_said(tmp_path: Path, name: str) -> None:
    results = Results(tmp_path / "results")
    results.bench("dp", [], status="failed", error="rank 0")
    with pytest.raises(ValueError, match="among the records has"):
        figures.write_figure(name, results.root, tmp_path / "out")
    with pytest.raises(ValueError, match="no runs in"):
        figures.write_figure(name, tmp_path / "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()
