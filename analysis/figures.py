"""Figures of a results directory, as PDF and PNG, the same bytes for the same records."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis.accuracy import AGREEMENT, agreements, describe, relative_difference, task
from analysis.records import Record, load_records
from analysis.throughput import PEERS, SHARES, Comparison, Contender, compare, order

__all__ = ["FIGURES", "write_figure"]

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.0,
    "pdf.fonttype": 42,
    "figure.dpi": 100,
    "savefig.dpi": 300,
}
WIDTH_IN = 7.2
"""Of a figure across both columns of a paper."""

OURS, THEIRS, INK = "#7ba3cc", "#ffffff", "#1d2733"
# From dark to light and with hatches of their own, so that they differ in grey as well.
PART_STYLES = dict(
    zip(
        SHARES,
        (
            ("#1f4e79", ""),
            ("#c0504d", "xxx"),
            ("#e0a030", "////"),
            ("#6f9fc8", "\\\\\\\\"),
            ("#7a8c5a", "..."),
            ("#ffffff", ""),
            ("#c9c9c9", ""),
            ("#f1ece2", "|||"),
        ),
        strict=True,
    )
)
CURVES = (
    ("#1f4e79", "o"),
    ("#c0504d", "s"),
    ("#e0a030", "^"),
    ("#4f6b3a", "D"),
    ("#8064a2", "v"),
    ("#3aa0a0", "P"),
    ("#7f7f7f", "X"),
)


def write_figure(name: str, results_dir: Path, out_dir: Path) -> list[Path]:
    """Draw the figure of that name (see :data:`FIGURES`) into ``out_dir`` as PDF and PNG.

    Fresh runs are drawn; records of reference/ only where there are none, and labelled so.

    Raises:
        ValueError: no such figure, nothing recorded to draw, or a broken record.
    """
    if name not in FIGURES:
        near = difflib.get_close_matches(name, FIGURES, n=2, cutoff=0.4) or sorted(FIGURES)
        raise ValueError(f"unknown figure {name!r}: did you mean {' or '.join(near)}?")
    records = load_records(results_dir)
    chosen = [record for record in records if not record.source] or list(records)
    paths = [out_dir / f"{name}.pdf", out_dir / f"{name}.png"]
    with mpl.rc_context():
        mpl.rcdefaults()  # a matplotlibrc of the machine must not change the bytes
        mpl.rcParams.update(STYLE)
        figure = FIGURES[name](chosen)
        out_dir.mkdir(parents=True, exist_ok=True)
        # Dates and versions are the only bytes that would differ from one run to the next.
        figure.savefig(paths[0], metadata={"CreationDate": None, "Producer": None, "Creator": None})
        figure.savefig(paths[1], metadata={"Software": None})
    return paths


def _panels(
    count: int, single: float, height: float, *, rows: int = 1, abreast: int = 2
) -> tuple[Figure, list[Axes]]:
    """A figure of ``count`` panels of ``rows`` axes each, and these axes panel by panel.

    One panel is ``single`` inches wide, up to ``abreast`` of them share the width of a page.
    """
    columns = count if count <= abreast else 2
    lines = math.ceil(count / columns) * rows
    width = single if count == 1 else WIDTH_IN
    figure = Figure(figsize=(width, height * lines), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False)
    places = [
        (panel // columns * rows + row, panel % columns)
        for panel in range(columns * lines // rows)
        for row in range(rows)
    ]
    axes = [grid[place] for place in places]
    for unused in axes[count * rows :]:
        unused.set_axis_off()
    return figure, axes[: count * rows]


def _measured(records: Sequence[Record]) -> list[Comparison]:
    """Benchmarks with at least one contender that was measured, without the others."""
    kept = []
    for comparison in compare(records):
        ran = tuple(item for item in comparison.contenders if item.images_per_s)
        if ran:
            kept.append(replace(comparison, contenders=ran))
    if not kept:
        raise ValueError(
            "no benchmark among the records has a measured contender: run ./reproduce.sh first"
        )
    return kept


def _headings(comparisons: Sequence[Comparison]) -> list[str]:
    """Names, with the launch's own hash where a name repeats; evidence; whose reference it is."""
    names = [comparison.name for comparison in comparisons]
    headings = []
    for comparison in comparisons:
        classes = dict.fromkeys(item.record.evidence.label for item in comparison.contenders)
        parts = [comparison.name, ", ".join(classes)]
        if names.count(comparison.name) > 1:
            parts[0] += f" {comparison.launch.rpartition('-')[2]}"
        if comparison.source:
            parts.append(f"reference: {comparison.source}")
        headings.append(" · ".join(parts))
    return headings


def _throughput(records: Sequence[Record]) -> Figure:
    """Images/s: bar = median, line = its 95 % interval, dots = rounds."""
    comparisons = _measured(records)
    widest = max(len(item.contenders) for item in comparisons)
    figure, axes = _panels(len(comparisons), max(3.4, 0.42 * widest + 0.8), 2.5, abreast=3)
    for comparison, panel, heading in zip(comparisons, axes, _headings(comparisons), strict=True):
        _draw_speeds(panel, comparison)
        panel.set_title(heading, loc="left")
    handles = [
        Patch(facecolor=OURS, edgecolor=INK, linewidth=0.6, label="pipebench"),
        Patch(facecolor=THEIRS, edgecolor=INK, linewidth=0.6, hatch="/////", label="torch"),
        Line2D([], [], color=INK, linewidth=1.2, label="95 % interval of the median"),
        Line2D([], [], color=INK, marker="o", markersize=2, linestyle="", label="one round"),
    ]
    columns = 2 if len(comparisons) == 1 else 4
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, columnspacing=1.2)
    return figure


def _draw_speeds(panel: Axes, comparison: Comparison) -> None:
    places = _places(comparison.contenders)
    for place, contender in zip(places, comparison.contenders, strict=True):
        estimate, record = contender.images_per_s, contender.record
        assert estimate is not None
        peer = record.system in PEERS.values()
        panel.bar(
            place,
            estimate.median,
            width=0.78,
            color=THEIRS if peer else OURS,
            edgecolor=INK,
            linewidth=0.6,
            hatch="/////" if peer else "",
        )
        speeds = [timed.images_per_s for timed in record.rounds]
        # In the order of the rounds, so that a drift of the machine is seen as one.
        along = [place + 0.6 * ((i + 0.5) / len(speeds) - 0.5) for i in range(len(speeds))]
        panel.plot(along, speeds, "o", markersize=1.5, color=INK, markeredgewidth=0, zorder=3)
        if estimate.bounded:
            panel.errorbar(
                place,
                estimate.median,
                yerr=[[estimate.median - estimate.low], [estimate.high - estimate.median]],
                color=INK,
                capsize=2.5,
                elinewidth=1.1,
                capthick=1.1,
                zorder=4,
            )
    labels = [item.record.label for item in comparison.contenders]
    panel.set_xticks(places, labels, rotation=40, ha="right", rotation_mode="anchor")
    panel.tick_params(axis="x", length=0)
    panel.set_ylabel("images/s")
    panel.set_ylim(bottom=0)
    panel.grid(axis="y", color="0.9", linewidth=0.5)
    panel.set_axisbelow(True)


def _places(contenders: Sequence[Contender]) -> list[float]:
    """Positions along the axis, with a gap between a schedule (ours and torch's) and the next."""
    schedule = {peer: system for system, peer in PEERS.items()}
    places: list[float] = []
    before = None
    for contender in contenders:
        system = contender.record.system
        own = schedule.get(system, system)
        places.append(places[-1] + (1.0 if own == before else 1.5) if places else 0.0)
        before = own
    return places


def _breakdown(records: Sequence[Record]) -> Figure:
    """Where the wall time goes: parts as percent, mean over ranks."""
    comparisons = [
        replace(item, contenders=accounted)
        for item in _measured(records)
        if (accounted := tuple(c for c in item.contenders if c.shares))
    ]
    if not comparisons:
        raise ValueError("no benchmark among the records has an account of its wall time")
    most = max(len(item.contenders) for item in comparisons)
    figure, axes = _panels(len(comparisons), 4.2, 0.2 * most + 0.85)
    for comparison, panel, heading in zip(comparisons, axes, _headings(comparisons), strict=True):
        _draw_shares(panel, comparison)
        panel.set_title(heading, loc="left")
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor=INK, linewidth=0.5, label=part)
        for part, (color, hatch) in PART_STYLES.items()
        if any(part in contender.shares for item in comparisons for contender in item.contenders)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, columnspacing=1.0)
    return figure


def _draw_shares(panel: Axes, comparison: Comparison) -> None:
    for place, contender in enumerate(comparison.contenders):
        left = 0.0
        for part, (color, hatch) in PART_STYLES.items():
            width = contender.shares.get(part, 0.0)
            panel.barh(
                place,
                width,
                left=left,
                height=0.72,
                color=color,
                hatch=hatch,
                edgecolor=INK,
                linewidth=0.5,
            )
            left += width
    panel.set_yticks(
        range(len(comparison.contenders)), [item.record.label for item in comparison.contenders]
    )
    panel.invert_yaxis()
    panel.tick_params(axis="y", length=0)
    panel.set_xlim(0, 1)
    panel.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    panel.set_xlabel("wall time, mean over ranks")


def _loss(records: Sequence[Record]) -> Figure:
    """Training loss by update, and below it how far each system is from dp in each epoch."""
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in sorted(records, key=lambda item: (*order(item), item.id)):
        if record.kind == "train" and record.steps:
            groups.setdefault((task(record), record.seed), []).append(record)
    if not groups:
        raise ValueError("no training run among the records has a loss: run ./reproduce.sh first")
    figure, axes = _panels(len(groups), 4.2, 1.9, rows=2)
    for place, key in enumerate(sorted(groups)):
        _draw_losses(axes[2 * place], axes[2 * place + 1], groups[key])
    return figure


def _draw_losses(curves: Axes, differences: Axes, runs: Sequence[Record]) -> None:
    references = {id(item.record): item.reference for item in agreements(runs)}
    styles = iter(CURVES * len(runs))
    for place, run in enumerate(runs):
        reference = references.get(id(run))
        updates = [step.index + 1 for step in run.steps]
        losses = [step.loss for step in run.steps]
        if id(run) not in references:
            # The others are drawn onto it: a curve that agrees hides nothing.
            curves.plot(updates, losses, color="0.78", linewidth=3, label=run.label, zorder=1)
            continue
        color, marker = next(styles)
        line: dict[str, Any] = {"color": color, "linewidth": 0.8, "marker": marker, "markersize": 3}
        # Markers are staggered, as those of equal curves would cover each other.
        every = max(1, len(updates) // 10)
        start = min(len(updates) - 1, place * every // len(runs))
        curves.plot(updates, losses, markevery=(start, every), label=run.label, **line)
        if reference is not None:
            differences.plot(*_differences(run, reference), **line)
    _finish_losses(curves, differences, runs)


def _differences(run: Record, reference: Record) -> tuple[list[int], list[float]]:
    """(last update, largest |loss − dp| ÷ |dp|) of each epoch; 0 has no place on a log axis."""
    theirs = {step.index: step.loss for step in reference.steps}
    worst: dict[int, tuple[int, float]] = {}
    for step in run.steps:
        if step.index in theirs:
            apart = relative_difference(step.loss, theirs[step.index])
            worst[step.epoch] = (step.index + 1, max(apart, worst.get(step.epoch, (0, 0.0))[1]))
    shown = [(update, apart) for update, apart in worst.values() if apart > 0]
    return [update for update, _ in shown], [apart for _, apart in shown]


def _finish_losses(curves: Axes, differences: Axes, runs: Sequence[Record]) -> None:
    words, first = describe(runs[0]), runs[0]
    source = f" · reference: {first.source}" if first.source else ""
    what = f"{words['model']}\n{words['data']}".strip()
    curves.set_title(f"{what}, seed {first.seed} · {first.evidence.label}{source}", loc="left")
    curves.set_ylabel("training loss")
    curves.legend(ncols=2)
    epoch = [step.index + 1 for step in first.steps if step.epoch == 0]
    differences.plot(
        [0, max(epoch, default=1)],
        [AGREEMENT, AGREEMENT],
        color=INK,
        linewidth=1.4,
        solid_capstyle="butt",
    )
    differences.annotate(
        f"limit in the first epoch: {AGREEMENT:g}",
        (0, AGREEMENT),
        xytext=(3, 2),
        textcoords="offset points",
        va="bottom",
        fontsize=7,
    )
    differences.margins(y=0.2)
    differences.set_yscale("log")
    differences.set_ylabel("largest |loss − dp| ÷ dp\nof each epoch")
    differences.set_xlabel("update")
    last = max(step.index + 1 for run in runs for step in run.steps)
    for panel in (curves, differences):
        panel.set_xlim(0, 1.02 * last)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(axis="y", color="0.9", linewidth=0.5)


FIGURES: dict[str, Callable[[Sequence[Record]], Figure]] = {
    "breakdown": _breakdown,
    "loss": _loss,
    "throughput": _throughput,
}
