"""The one style of all figures: sizes, colours, files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from analysis.throughput import SHARES

__all__ = [
    "COLORS",
    "CURVES",
    "HATCHES",
    "INK",
    "MARKERS",
    "OURS",
    "PEER_HATCH",
    "ROUND",
    "THEIRS",
    "WIDTH_IN",
    "panels_of",
    "save",
]

STYLE = {
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
    "ytick.minor.width": 0.4,
    "hatch.linewidth": 0.6,
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
}
WIDTH_IN = 7.2
"""Of a figure across both columns of a paper."""

OURS, THEIRS, INK, ROUND = "#7ba3cc", "#ffffff", "#1d2733", "#c0504d"
PEER_HATCH = "/////"
SHADES = ("#1f4e79", "#c0504d", "#e0a030", "#6f9fc8", "#7a8c5a", "#ffffff", "#c9c9c9", "#f1ece2")
COLORS = dict(zip(SHARES, SHADES, strict=True))
HATCHES = dict(zip(SHARES, ("", "xxx", "////", "\\\\\\\\", "...", "", "", "|||"), strict=True))
"""Of the parts of the wall time: they differ in grey as well."""
CURVES = ("#1f4e79", "#c0504d", "#e0a030", "#4f6b3a", "#8064a2", "#3aa0a0", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def save(name: str, out_dir: Path, draw: Callable[[], Figure]) -> list[Path]:
    """What ``draw`` draws, in the one style of all figures, as PDF and PNG in ``out_dir``."""
    paths = [out_dir / f"{name}.pdf", out_dir / f"{name}.png"]
    with mpl.rc_context():
        mpl.rcdefaults()  # a matplotlibrc of the machine must not change the bytes
        sns.set_theme("paper", "ticks", "deep", font="DejaVu Sans", rc=STYLE)
        figure = draw()
        out_dir.mkdir(parents=True, exist_ok=True)
        # Dates and versions are the only bytes that would differ from one run to the next.
        figure.savefig(paths[0], metadata={"CreationDate": None, "Producer": None, "Creator": None})
        figure.savefig(paths[1], metadata={"Software": None})
    return paths


def panels_of(
    count: int, single: float, height: float, *, rows: int = 1, abreast: int = 2
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of ``count`` panels, and the ``rows`` axes of each, one above the other.

    One panel is ``single`` inches wide, up to ``abreast`` of them share the width of a page.
    """
    columns = count if count <= abreast else 2
    lines = math.ceil(count / columns) * rows
    figure = Figure((single if count == 1 else WIDTH_IN, height * lines), layout="constrained")
    FigureCanvasAgg(figure)
    firsts = [panel // columns * rows * columns + panel % columns + 1 for panel in range(count)]
    return figure, [
        [figure.add_subplot(lines, columns, first + row * columns) for row in range(rows)]
        for first in firsts
    ]
