"""A table as data, and its forms on paper: Markdown for reading, JSON for programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from tabulate import tabulate

__all__ = ["ABSENT", "Table", "View", "document", "fixed", "markdown", "percent", "with_interval"]

ABSENT = "–"
"""What a cell shows where there is no value."""

WORDS = ("system", "plan", "chosen", "agrees", "evidence", "status")
"""Columns of text; all others hold numbers and are aligned to the right."""


@dataclass(frozen=True)
class View:
    """One Markdown table; ``cells`` holds the text as it is shown."""

    title: str
    caption: str
    cells: pd.DataFrame


@dataclass(frozen=True)
class Table:
    """``frame`` has a row a fact; the name of a column ends in its unit where there is one.
    Tables of one ``name`` have the same columns and share a CSV."""

    name: str
    frame: pd.DataFrame
    views: tuple[View, ...]

    @property
    def plain(self) -> pd.DataFrame:
        """The frame as it is written: without infinities, which JSON lacks, and whole numbers stay
        whole beside those that are missing."""
        named = self.frame.replace({"source": {"": "fresh"}})
        return named.replace([np.inf, -np.inf], np.nan).astype(object)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows by column, None where there is no value."""
        rows = self.plain.where(self.plain.notna(), None).to_dict("records")
        return [{str(name): value for name, value in row.items()} for row in rows]


def markdown(table: Table) -> str:
    """All views of a table, each with its title, grid and caption."""
    return "\n\n".join(
        f"### {view.title}\n\n{_grid(view.cells)}\n\n{view.caption}" for view in table.views
    )


def _grid(cells: pd.DataFrame) -> str:
    return tabulate(
        cells.map(lambda text: " ".join(text.replace("|", "\\|").split())).to_numpy().tolist(),
        headers=list(cells.columns),
        tablefmt="pipe",
        disable_numparse=True,
        colalign=["left" if name in WORDS else "right" for name in cells.columns],
    )


def document(table: Table) -> dict[str, Any]:
    """The table as JSON data; NaN and infinities, which JSON lacks, become null."""
    first = table.views[0]
    return {"name": table.name, "title": first.title, "caption": first.caption, "rows": table.rows}


def fixed(value: float | None, decimals: int = 3) -> str:
    """A number with so many decimals; what is no finite number is shown as absent."""
    if pd.isna(value) or value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:.{decimals}f}"


def percent(value: float | None, decimals: int = 1) -> str:
    """A fraction as a percentage."""
    return fixed(None if value is None else 100 * value, decimals)


def with_interval(median: float, low: float, high: float, decimals: int | None = None) -> str:
    """``median [low, high]`` with so many decimals, or with 4 significant digits."""
    if decimals is None:
        decimals = _decimals(median)
    ends = [fixed(low, decimals), fixed(high, decimals)]
    shown = fixed(median, decimals)
    return (
        ABSENT if shown == ABSENT else f"{shown} [{ABSENT if ABSENT in ends else ', '.join(ends)}]"
    )


def _decimals(value: float, digits: int = 4) -> int:
    """Decimals that show ``value`` to so many significant digits, never in powers of ten."""
    if value == 0 or not math.isfinite(value):
        return digits - 1
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))
