"""Figures of a results directory, as PDF and PNG, the same bytes for the same records."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis.accuracy import AGREEMENT, agreements, differences
from analysis.forecasts import draw_predicted, draw_simulated
from analysis.records import PEERS, Records, load_records
from analysis.statistics import interval
from analysis.style import (
    COLORS,
    CURVES,
    HATCHES,
    INK,
    MARKERS,
    OURS,
    PEER_HATCH,
    ROUND,
    THEIRS,
    panels_of,
    save,
)
from analysis.tasks import synchronous, training
from analysis.throughput import Comparison, compare

__all__ = ["FIGURES", "OF_SIMULATIONS", "write_figure"]

NOTHING = "no {} among the records has {}: run ./reproduce.sh first"
TRACED = "gantt"
"""The figure that is not of records: see analysis.gantt."""


def write_figure(name: str, results_dir: Path, out_dir: Path) -> list[Path]:
    """Draw the figure of that name (see :data:`FIGURES` and :data:`OF_SIMULATIONS`) into
    ``out_dir`` as PDF and PNG.

    Fresh runs are drawn; records of reference/ only where there are none, and labelled so.

    Raises:
        ValueError: no such figure, nothing recorded to draw, or a broken record.
    """
    if name == TRACED:
        raise ValueError(f"figure {name} draws traces: name one or more runs with --trace")
    if name in OF_SIMULATIONS:
        return save(name, out_dir, lambda: OF_SIMULATIONS[name](results_dir))
    if name not in FIGURES:
        names = (*FIGURES, *OF_SIMULATIONS, TRACED)
        near = difflib.get_close_matches(name, names, n=2, cutoff=0.4) or sorted(names)
        raise ValueError(f"unknown figure {name!r}: did you mean {' or '.join(near)}?")
    records = load_records(results_dir)
    fresh = records.runs[records.runs["source"] == ""]
    records = records if fresh.empty else replace(records, runs=fresh)
    return save(name, out_dir, lambda: FIGURES[name](records))


def _titled(
    comparisons: Sequence[Comparison], panels: Sequence[Sequence[Axes]]
) -> Iterator[tuple[Comparison, Axes]]:
    """Each comparison with its panel under the name, with the launch's own hash where it repeats;
    evidence; whose reference it is."""
    names = [item.name for item in comparisons]
    for item, (panel,) in zip(comparisons, panels, strict=True):
        parts = [item.name, ", ".join(item.contenders["evidence"].unique())]
        if names.count(item.name) > 1:
            parts[0] += f" {item.launch.rpartition('-')[2]}"
        if item.source:
            parts.append(f"reference: {item.source}")
        panel.set_title(" · ".join(parts), loc="left")
        yield item, panel


def _throughput(records: Records) -> Figure:
    """Images/s: bar = median, line = its 95 % interval, dots = rounds."""
    compared = [
        replace(item, contenders=item.contenders.dropna(subset="throughput_median_images_per_s"))
        for item in compare(records)
    ]
    if not (comparisons := [item for item in compared if len(item.contenders)]):
        raise ValueError(NOTHING.format("benchmark", "a measured contender"))
    widest = max(len(item.contenders) for item in comparisons)
    figure, panels = panels_of(len(comparisons), max(3.4, 0.42 * widest + 0.8), 2.5, abreast=3)
    for comparison, panel in _titled(comparisons, panels):
        _draw_speeds(panel, comparison.contenders, records.rounds)
    handles = [
        Patch(facecolor=OURS, edgecolor=INK, linewidth=0.6, label="pipebench"),
        Patch(facecolor=THEIRS, edgecolor=INK, linewidth=0.6, hatch=PEER_HATCH, label="torch"),
        Line2D([], [], color=INK, linewidth=1.2, label="95 % interval of the median"),
        Line2D([], [], color=ROUND, marker="o", markersize=2.5, linestyle="", label="one round"),
    ]
    columns = 2 if len(comparisons) == 1 else 4
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, columnspacing=1.2)
    return figure


def _draw_speeds(panel: Axes, contenders: pd.DataFrame, rounds: pd.DataFrame) -> None:
    # A gap between a schedule (ours and torch's) and the next.
    schedule = contenders["system"].replace({peer: system for system, peer in PEERS.items()})
    steps = (schedule != schedule.shift()).map({True: 1.5, False: 1.0})
    place = steps.cumsum()
    timed = rounds[rounds["run"].isin(contenders.index)]
    timed = timed.assign(place=timed["run"].map(place))
    sns.barplot(
        timed,
        x="place",
        y="images_per_s",
        estimator="median",
        errorbar=interval,
        native_scale=True,
        width=0.78,
        color=OURS,
        saturation=1,
        edgecolor=INK,
        linewidth=0.6,
        capsize=0.3,
        err_kws={"color": INK, "linewidth": 1.1, "zorder": 4},
        ax=panel,
    )
    for bar, system in zip(panel.patches, contenders["system"], strict=True):
        if system in PEERS.values():
            bar.set(facecolor=THEIRS, hatch=PEER_HATCH)
    # In the order of the rounds, so that a drift of the machine is seen as one.
    turns = timed.groupby("run")["round"]
    along = (turns.cumcount() + 0.5) / turns.transform("size") - 0.5
    timed = timed.assign(place=timed["place"] + 0.6 * along)
    sns.scatterplot(
        timed, x="place", y="images_per_s", s=5, color=ROUND, linewidth=0, zorder=3, ax=panel
    )
    panel.set_xticks(place, contenders["label"], rotation=40, ha="right", rotation_mode="anchor")
    panel.tick_params(axis="x", length=0)
    panel.set(xlabel=None, ylabel="images/s", ylim=(0, None))
    panel.grid(axis="y", color="0.9", linewidth=0.5)


def _breakdown(records: Records) -> Figure:
    """Where the wall time goes: parts as percent, mean over ranks."""
    comparisons = [item for item in compare(records) if len(item.shares)]
    if not comparisons:
        raise ValueError(NOTHING.format("benchmark", "an account of its wall time"))
    most = max(len(item.shares) for item in comparisons)
    figure, panels = panels_of(len(comparisons), 4.2, 0.2 * most + 0.85)
    for comparison, panel in _titled(comparisons, panels):
        _draw_shares(panel, comparison.shares.dropna(axis=1, how="all"))
    known = pd.concat([item.shares for item in comparisons]).dropna(axis=1, how="all")
    handles = [
        Patch(facecolor=color, hatch=HATCHES[part], edgecolor=INK, linewidth=0.5, label=part)
        for part, color in COLORS.items()
        if part in known
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, columnspacing=1.0)
    return figure


def _draw_shares(panel: Axes, shares: pd.DataFrame) -> None:
    sns.histplot(
        shares.melt(ignore_index=False, var_name="part", value_name="share").reset_index(),
        y="label",
        weights="share",
        hue="part",
        hue_order=shares.columns[::-1],
        multiple="stack",
        shrink=0.72,
        palette=COLORS,
        alpha=1,
        edgecolor=INK,
        linewidth=0.5,
        legend=False,
        ax=panel,
    )
    for bars, part in zip(panel.containers, shares.columns, strict=True):
        for bar in bars:
            bar.set_hatch(HATCHES[part])
    panel.tick_params(axis="y", length=0)
    panel.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    panel.set(xlim=(0, 1), xlabel="wall time, mean over ranks", ylabel=None)


def _loss(records: Records) -> Figure:
    """Training loss by update, and below it how far each system is from dp in each epoch."""
    runs = synchronous(records)
    runs = runs[runs.index.isin(records.steps["run"])]
    if runs.empty:
        raise ValueError(NOTHING.format("training run", "a loss"))
    apart, compared = differences(records), agreements(records).index
    steps = records.steps.assign(update=records.steps["step"] + 1)
    groups = [group for _, group in runs.groupby(["task", "seed"])]
    figure, panels = panels_of(len(groups), 4.2, 1.9, rows=2)
    for group, (above, below) in zip(groups, panels, strict=True):
        repeated = group["shown"].duplicated(keep=False)
        names = group["shown"].where(~repeated, group["shown"] + " " + group["id"])
        curves = steps.join(names.rename("curve"), on="run", how="inner")
        others = [*names[names.index.isin(compared)]]
        _draw_losses(above, curves, others)
        _draw_differences(below, curves.merge(apart[["run", "step", "difference"]]), others)
        _finish_losses(above, below, group.iloc[0], curves)
    return figure


def _draw_losses(panel: Axes, curves: pd.DataFrame, others: list[str]) -> None:
    # The others are drawn onto dp: a curve that agrees hides nothing.
    for name, dp in curves[~curves["curve"].isin(others)].groupby("curve"):
        look = {"label": name, "color": "0.78", "linewidth": 3, "zorder": 1}
        sns.lineplot(dp, x="update", y="loss", estimator=None, ax=panel, **look)
    _draw_curves(panel, curves, "update", "loss", others)
    for place, line in enumerate(panel.lines):
        # Markers are staggered, as those of equal curves would cover each other.
        count = len(np.asarray(line.get_xdata()))
        every = max(1, count // 10)
        line.set_markevery((min(count - 1, place * every // len(panel.lines)), every))
    panel.set_ylabel("training loss")


def _draw_differences(panel: Axes, shared: pd.DataFrame, others: list[str]) -> None:
    """The largest difference of each epoch, at its last update; 0 has no place on a log axis."""
    epochs = shared.groupby(["curve", "epoch"], as_index=False)
    worst = epochs.agg(update=("update", "max"), difference=("difference", "max"))
    _draw_curves(panel, worst[worst["difference"] > 0], "update", "difference", others)
    if panel.legend_:
        panel.legend_.remove()
    panel.set(yscale="log", ylabel="largest |loss − dp| ÷ dp\nof each epoch")
    panel.margins(y=0.2)


def _draw_curves(
    panel: Axes, points: pd.DataFrame, along: str, value: str, names: list[str], **look: Any
) -> None:
    points = points[points["curve"].isin(names)]
    if points.empty:
        return
    markers = [MARKERS[place % len(MARKERS)] for place in range(len(names))]
    sns.lineplot(
        points,
        x=along,
        y=value,
        hue="curve",
        style="curve",
        hue_order=names,
        style_order=names,
        palette=[CURVES[place % len(CURVES)] for place in range(len(names))],
        dashes=False,
        linewidth=0.8,
        markersize=3.5,
        markeredgewidth=0,
        ax=panel,
        **{"estimator": None, "markers": markers, **look},
    )


def _learning_curves(records: Records) -> Figure:
    """Training loss and accuracy by images seen: a line is the mean over seeds, its band reaches
    from the lowest seed to the highest."""
    runs = training(records)
    runs = runs[runs.index.isin(records.evaluations["run"])]
    if runs.empty:
        raise ValueError(NOTHING.format("training run", "an evaluation"))
    groups = [group for _, group in runs.groupby("study", sort=False)]
    figure, panels = panels_of(len(groups), 4.2, 2.1, rows=2)
    steps = records.steps.assign(seen=records.steps.groupby("run")["samples"].cumsum())
    after = steps.assign(step=steps["step"] + 1)[["run", "step", "seen"]]
    scores = records.evaluations.merge(after, on=["run", "step"])
    for group, (above, below) in zip(groups, panels, strict=True):
        curves = _curve_names(group)
        names = [*dict.fromkeys(curves)]
        losses = _windows(steps[steps["run"].isin(group.index)]).join(curves, on="run")
        look: dict[str, Any] = {"estimator": "mean", "errorbar": ("pi", 100)}
        _draw_curves(above, losses, "seen", "loss", names, markers=False, **look)
        above.legend()
        accuracies = scores.join(curves, on="run", how="inner")
        _draw_curves(below, accuracies, "seen", "accuracy", names, legend=False, **look)
        _finish_curves(above, below, group.iloc[0])
    return figure


def _curve_names(runs: pd.DataFrame) -> pd.Series[str]:
    """The system, with how many of its seeds did not come to their end; settings where needed."""
    plain = runs["shown"] + runs["chosen"].map(lambda chosen: f", {chosen}" if chosen else "")
    variants = runs.groupby(plain)["variant"].transform("nunique")
    plain = plain.where(variants == 1, plain + ", " + runs["plan"])
    ended = runs["status"].ne("ok").groupby(plain).transform("sum")
    seeds = ended.groupby(plain).transform("size")
    unfinished = " ({} of {} not to the end)".format
    notes = [unfinished(bad, all_) if bad else "" for bad, all_ in zip(ended, seeds, strict=True)]
    return (plain + pd.Series(notes, runs.index)).rename("curve")


def _windows(steps: pd.DataFrame) -> pd.DataFrame:
    """Losses averaged over stretches of a tenth of an epoch, each at its last update: a single
    batch's loss tells little."""
    length = max(1, round(steps.groupby(["run", "epoch"]).size().max() / 10))
    stretches = steps.groupby(["run", steps["step"] // length], as_index=False)
    return stretches.agg(run=("run", "first"), seen=("seen", "max"), loss=("loss", "mean"))


def _finish_curves(above: Axes, below: Axes, run: pd.Series[Any]) -> None:
    source = f" · reference: {run['source']}" if run["source"] else ""
    what = f"{run['model']}\n{run['data']}".strip()
    above.set_title(f"{what}\n{run['evidence']}{source}", loc="left")
    above.set(xlabel="", ylabel="training loss")
    below.set(xlabel="thousand images seen", ylabel="accuracy")
    below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    for panel in (above, below):
        panel.set_xlim(0, None)
        panel.xaxis.set_major_formatter(lambda images, _: f"{images / 1000:g}")
        panel.grid(axis="y", color="0.9", linewidth=0.5)


def _finish_losses(above: Axes, below: Axes, run: pd.Series[Any], curves: pd.DataFrame) -> None:
    source = f" · reference: {run['source']}" if run["source"] else ""
    what = f"{run['model']}\n{run['data']}".strip()
    above.set_title(f"{what}, seed {run['seed']} · {run['evidence']}{source}", loc="left")
    above.legend(ncols=2)
    first = curves.loc[curves["epoch"] == 0, "update"].max()
    below.plot([0, first], [AGREEMENT] * 2, color=INK, linewidth=1.4, solid_capstyle="butt")
    words, offset = f"limit in the first epoch: {AGREEMENT:g}", "offset points"
    below.annotate(words, (0, AGREEMENT), (3, 2), textcoords=offset, va="bottom", fontsize=7)
    for panel in (above, below):
        panel.set(xlim=(0, 1.02 * curves["update"].max()), xlabel="update")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(axis="y", color="0.9", linewidth=0.5)
    above.set_xlabel("")


FIGURES: dict[str, Callable[[Records], Figure]] = {
    "breakdown": _breakdown,
    "learning-curves": _learning_curves,
    "loss": _loss,
    "throughput": _throughput,
}

OF_SIMULATIONS: dict[str, Callable[[Path], Figure]] = {
    "predicted": draw_predicted,
    "simulated": draw_simulated,
}
