"""Gantt figures of traces: what each rank did when, measured above simulated on one time axis."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from analysis.evidence import Evidence
from analysis.style import COLORS, HATCHES, INK, ROUND, WIDTH_IN, save

__all__ = ["KINDS", "MOST_BARS", "draw_gantt", "read_timelines", "write_gantt"]

KINDS = {"F": "F", "R": "R", "B": "B", "REDUCE": "reduce", "NORM": "reduce", "STEP": "step"}
"""What is drawn, by operation; messages are not: where a rank waits for one there is a gap."""
FILLS = {
    "F": "#f1ece2",
    "R": COLORS["overhead"],
    "B": COLORS["compute"],
    "reduce": COLORS["reduce"],
    "step": COLORS["optimizer"],
}
MARKS = {"F": "", "R": "", "B": "", "reduce": HATCHES["reduce"], "step": HATCHES["optimizer"]}
"""Kinds differ in grey as well."""
WORDS = {"F": "forward", "R": "recomputation", "B": "backward", "reduce": "reduce", "step": "step"}
MOST_BARS = 160
"""In a row: more of them could not be told apart, so only the first batches are drawn."""
ROW_IN, TEXT_POINTS = 0.17, 5.5


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Cut(_Strict):
    batches: int
    seconds: float


class _Told(_Strict):
    """What a trace says of one of its timelines."""

    process: int
    label: str
    evidence: str
    segment: str
    batches: list[int]
    cut: _Cut | None


class _About(_Strict):
    schema_: Literal["pipebench.trace/1"] = Field(alias="schema")
    timelines: list[_Told]


class _Arguments(_Strict):
    """A ``name`` has what only names, unit and batch an action."""

    name: str = ""
    unit: int = 0
    batch: int = 0


class _Event(_Strict):
    ph: str
    pid: int
    name: str
    tid: int = 0
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: _Arguments = _Arguments()


class _Trace(_Strict):
    events: list[_Event] = Field(alias="traceEvents")
    about: _About = Field(alias="otherData")


class Bar(NamedTuple):
    """A computation, reduction or step of a unit (or update) of a batch; milliseconds."""

    rank: int
    kind: str
    unit: int
    batch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """``rows`` names each rank.  From ``cut_ms`` on bars may be missing: the trace holds only the
    first ``held`` of ``batches``."""

    label: str
    evidence: Evidence
    segment: str
    held: int
    batches: int
    cut_ms: float | None
    rows: Mapping[int, str]
    bars: tuple[Bar, ...]


def read_timelines(path: Path, label: str | None = None) -> list[Timeline]:
    """Those of a trace.json, or the one of that label.

    Raises:
        ValueError: there is no such file or label, or the file is broken; the message names it.
    """
    try:
        content = json.loads(path.read_bytes())
        trace = _Trace(**content)
        timelines = [_timeline(told, trace.events) for told in trace.about.timelines]
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise ValueError(f"{path} is no trace: {where}: {fault['msg']}") from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a trace: {error}") from error
    chosen = [item for item in timelines if label in (None, item.label)]
    if not chosen:
        known = ", ".join(item.label for item in timelines) or "none"
        raise ValueError(f"{path} has no timeline of {label!r}, only of {known}")
    return chosen


def _timeline(told: _Told, events: Sequence[_Event]) -> Timeline:
    mine = [event for event in events if event.pid == told.process]
    rows = {event.tid: event.args.name for event in mine if event.name == "thread_name"}
    bars = [
        Bar(
            event.tid,
            KINDS[event.cat],
            event.args.unit,
            event.args.batch,
            event.ts / 1e3,
            (event.ts + event.dur) / 1e3,
        )
        for event in mine
        if event.ph == "X" and event.cat in KINDS
    ]
    held = len(told.batches)
    return Timeline(
        told.label,
        Evidence.parse(told.evidence),
        told.segment,
        held,
        held if told.cut is None else told.cut.batches,
        None if told.cut is None else told.cut.seconds * 1e3,
        dict(sorted(rows.items())),
        tuple(bars),
    )


def write_gantt(name: str, sources: Sequence[tuple[Path, str | None]], out_dir: Path) -> list[Path]:
    """Draw the traces (files, each with a label or None for all in it) as ``name``.pdf and .png."""
    timelines = [item for path, label in sources for item in read_timelines(path, label)]
    return save(name, out_dir, lambda: draw_gantt(timelines))


def draw_gantt(timelines: Sequence[Timeline]) -> Figure:
    """A panel a timeline, those of one label below each other, the stronger evidence first."""
    labels = [item.label for item in timelines]
    panels = sorted(timelines, key=lambda item: (labels.index(item.label), item.evidence))
    shown = min(_readable(item) for item in panels)
    heights = [ROW_IN * len(item.rows) + 0.3 for item in panels]
    figure = Figure((WIDTH_IN, sum(heights) + 0.75), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    end = max(_end(item, shown) for item in panels)
    for item, panel in zip(panels, axes, strict=True):
        _draw(item, panel, end, shown)
    axes[-1].set(xlim=(0, end), xlabel="time since the begin of the segment (ms)")
    kinds = {bar.kind for item in panels for bar in item.bars}
    handles = [
        Patch(facecolor=FILLS[kind], hatch=MARKS[kind], edgecolor=INK, linewidth=0.5, label=word)
        for kind, word in WORDS.items()
        if kind in kinds
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(WORDS))
    # Only when all has its place is it known which numbers fit.
    figure.draw_without_rendering()
    for item, panel in zip(panels, axes, strict=True):
        _number(item, panel, end)
    return figure


def _readable(item: Timeline) -> int:
    """How many of the first batches can be drawn with bars that can be told apart; at least 1."""
    counts = Counter((bar.rank, bar.batch) for bar in item.bars)
    so_far: Counter[int] = Counter()
    for batch in range(item.held):
        so_far.update({rank: counts[rank, batch] for rank in item.rows})
        if max(so_far.values(), default=0) > MOST_BARS:
            return max(1, batch)
    return item.held


def _end(item: Timeline, shown: int) -> float:
    """When the first ``shown`` batches are done."""
    return max((bar.end_ms for bar in item.bars if bar.batch < shown), default=0.0)


def _draw(item: Timeline, panel: Axes, end: float, shown: int) -> None:
    """All that is done before ``end``: of later batches too, where they overlap the shown ones."""
    places = {rank: place for place, rank in enumerate(item.rows)}
    spans: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for bar in item.bars:
        if bar.start_ms < end:
            spans[bar.rank, bar.kind].append((bar.start_ms, bar.end_ms - bar.start_ms))
    for (rank, kind), of_kind in spans.items():
        panel.broken_barh(
            of_kind,
            (places[rank] - 0.4, 0.8),
            facecolor=FILLS[kind],
            hatch=MARKS[kind],
            edgecolor=INK,
            linewidth=0.3,
        )
    if item.cut_ms is not None and item.cut_ms < end:
        panel.axvline(item.cut_ms, color=ROUND, linewidth=0.8, linestyle="--")
        panel.annotate(
            "later batches are missing from here on",
            (item.cut_ms, 1),
            (2, 2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=TEXT_POINTS,
        )
    count = min(shown, item.held)
    of = f"first {count} of {item.batches} batches" if count < item.batches else f"{count} batches"
    panel.set_title(f"{item.label} · {item.evidence.label} · {item.segment}, {of}", loc="left")
    panel.set_yticks([*places.values()], [*item.rows.values()])
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(len(places) - 0.5, -0.5)


def _number(item: Timeline, panel: Axes, end: float) -> None:
    """Units' numbers in the bars that have room for them."""
    points = panel.get_window_extent().width / panel.get_figure().dpi * 72  # type: ignore[union-attr]
    places = {rank: place for place, rank in enumerate(item.rows)}
    for bar in item.bars:
        needed = 0.65 * TEXT_POINTS * len(str(bar.unit)) + 1.5
        room = (bar.end_ms - bar.start_ms) / end * points
        if bar.kind not in ("F", "R", "B") or bar.end_ms > end or room < needed:
            continue
        panel.text(
            (bar.start_ms + bar.end_ms) / 2,
            places[bar.rank],
            str(bar.unit),
            ha="center",
            va="center_baseline",
            fontsize=TEXT_POINTS,
            color="#ffffff" if bar.kind == "B" else INK,
        )
