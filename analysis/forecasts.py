"""Figures of simulations: systems over bandwidths, and predictions against what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, PercentFormatter

from analysis.predictions import LIMITS, predictions
from analysis.records import load_records
from analysis.simulations import Study, load_studies
from analysis.style import CURVES, INK, MARKERS, ROUND, panels_of

__all__ = ["draw_predicted", "draw_simulated"]

LINES = ("-", "--", ":", "-.")


def draw_simulated(results_dir: Path) -> Figure:
    """Images/s ÷ those of dp over what links reach of their bandwidth, a panel a batch size; what
    does not fit is not there.

    Raises:
        ValueError: there is no simulation over two bandwidths or more; a file is broken.
    """
    drawn = [
        (study, size, rows)
        for study in load_studies(results_dir)
        for size, rows in study.rows.dropna(subset="ratio_to_dp").groupby("batch_size")
        if rows["bandwidth_share"].nunique() > 1
    ]
    if not drawn:
        raise ValueError(
            "no simulation has dp over several bandwidths: run pipebench simulate with "
            "--bandwidth-shares first"
        )
    figure, panels = panels_of(len(drawn), 4.2, 2.6, abreast=3)
    looks = _looks(pd.concat([rows for _, _, rows in drawn]))
    for (study, size, rows), (panel,) in zip(drawn, panels, strict=True):
        _draw_ratios(panel, rows, looks)
        _draw_paper(panel, study)
        source = f" · {study.source}" if study.source else ""
        panel.set_title(f"{study.name}\nbatch {size} · simulated{source}", loc="left")
    handles, labels = _legend(panels)
    figure.legend(handles, labels, loc="outside upper center", ncols=4, columnspacing=1.0)
    return figure


def _looks(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """By label: a system has one colour, its contenders have markers and lines of their own."""
    contenders = rows[["label", "system"]].drop_duplicates("label")
    systems = [*dict.fromkeys(contenders["system"])]
    turns = contenders.groupby("system").cumcount()
    return {
        label: {
            "color": CURVES[systems.index(system) % len(CURVES)],
            "marker": MARKERS[turn % len(MARKERS)],
            "linestyle": LINES[turn % len(LINES)],
        }
        for label, system, turn in zip(
            contenders["label"], contenders["system"], turns, strict=True
        )
    }


def _draw_ratios(panel: Axes, rows: pd.DataFrame, looks: dict[str, dict[str, Any]]) -> None:
    for label, look in looks.items():
        line = rows[rows["label"] == label].sort_values("bandwidth_share")
        panel.plot(
            line["bandwidth_share"],
            line["ratio_to_dp"],
            label=label,
            linewidth=0.8,
            markersize=3,
            markeredgewidth=0,
            **look,
        )
    panel.set(xscale="log", yscale="log", ylabel="images/s ÷ dp")
    panel.set_xlabel("share of the links' bandwidth")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    panel.grid(axis="y", color="0.9", linewidth=0.5)


def _draw_paper(panel: Axes, study: Study) -> None:
    if study.paper is not None:
        ratio = study.paper["ratio"]
        panel.axhline(ratio, color=ROUND, linewidth=0.8, label=f"paper: {ratio}", zorder=1)


def _legend(panels: list[list[Axes]]) -> tuple[list[Any], list[str]]:
    """Each name once, whichever panels have it."""
    found: dict[str, Any] = {}
    for (panel,) in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return [*found.values()], [*found]


def draw_predicted(results_dir: Path) -> Figure:
    """Predicted over found seconds, and below it the error; what is unresolved is hollow.

    Raises:
        ValueError: nothing that was simulated has run; a file is broken.
    """
    found = predictions(load_records(results_dir), results_dir)
    if found.empty:
        raise ValueError("nothing that was simulated has run: simulate a config, and then run it")
    classes = [*dict.fromkeys(found["evidence"])]
    figure, panels = panels_of(len(classes), 4.2, 2.2, rows=2)
    for name, (above, below) in zip(classes, panels, strict=True):
        rows = found[found["evidence"] == name]
        ends = [rows[["found_seconds", "predicted_seconds"]].min().min() * 0.8]
        ends.append(rows[["found_seconds", "predicted_seconds"]].max().max() * 1.25)
        above.plot(ends, ends, color="0.75", linewidth=0.8, zorder=1)
        for well, face in ((True, CURVES[0]), (False, "none")):
            some = rows[rows["resolved"] == well]
            look: dict[str, Any] = {
                "s": 14,
                "facecolors": face,
                "edgecolors": CURVES[0],
                "linewidths": 0.7,
            }
            above.scatter(some["found_seconds"], some["predicted_seconds"], **look)
            below.scatter(some["found_seconds"], some["error"], **look)
        above.set(xscale="log", yscale="log", xlim=ends, ylim=ends, ylabel="predicted (s)")
        above.set_title(f"simulated against {name}", loc="left")
        below.axhline(0, color="0.75", linewidth=0.8, zorder=1)
        for limit in LIMITS.get(name, ()):
            for edge in (-(limit or 0), limit or 0):
                below.axhline(edge, color=INK, linewidth=0.5, linestyle=":")
        below.set(xscale="log", xlim=ends, xlabel="found (s)", ylabel="predicted ÷ found − 1")
        below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    return figure
