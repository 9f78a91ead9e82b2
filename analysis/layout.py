"""A table as data, and its forms on paper: Markdown for reading, CSV for computing."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Cell",
    "Column",
    "Row",
    "Table",
    "View",
    "csv_text",
    "document",
    "fixed",
    "markdown",
    "percent",
    "with_interval",
]

ABSENT = "–"
"""What a cell shows where there is no value."""

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]
"""Values by name; a name ends in its unit where there is one."""


@dataclass(frozen=True)
class Column:
    """A column of the Markdown form: it may draw on several values of a row."""

    title: str
    text: Callable[[Row], str]
    numeric: bool = True


@dataclass(frozen=True)
class View:
    """One Markdown table over a table's rows; ``rows`` says which of them it shows."""

    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: Callable[[Row], bool] = lambda row: True


@dataclass(frozen=True)
class Table:
    """``rows`` all have the same names in the same order.  Tables of one ``name`` share a CSV."""

    name: str
    rows: tuple[Row, ...]
    views: tuple[View, ...]


def markdown(table: Table) -> str:
    """All views of a table, each with its title, grid and caption; columns are padded so that the
    text reads in a terminal as well."""
    return "\n\n".join(
        _grid(view, [row for row in table.rows if view.rows(row)]) for view in table.views
    )


def _grid(view: View, rows: Sequence[Row]) -> str:
    cells = [[column.title for column in view.columns]]
    cells += [[_escaped(column.text(row)) for column in view.columns] for row in rows]
    widths = [max(3, *(len(line[place]) for line in cells)) for place in range(len(view.columns))]
    rule = [
        "-" * (width - 1) + ":" if column.numeric else "-" * width
        for column, width in zip(view.columns, widths, strict=True)
    ]

    def padded(line: Sequence[str]) -> str:
        parts = [
            text.rjust(width) if column.numeric else text.ljust(width)
            for text, width, column in zip(line, widths, view.columns, strict=True)
        ]
        return "| " + " | ".join(parts) + " |"

    grid = "\n".join([padded(cells[0]), padded(rule), *(padded(line) for line in cells[1:])])
    return f"### {view.title}\n\n{grid}\n\n{view.caption}"


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def csv_text(tables: Sequence[Table]) -> str:
    """One CSV of tables with the same columns; an empty cell is a value that does not exist."""
    rows = [row for table in tables for row in table.rows]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _plain(value) for name, value in row.items()})
    return stream.getvalue()


def document(table: Table) -> dict[str, Any]:
    """The table as JSON data; NaN and infinities, which JSON lacks, become null."""
    return {
        "name": table.name,
        "title": table.views[0].title,
        "caption": table.views[0].caption,
        "rows": [{name: _plain(value) for name, value in row.items()} for row in table.rows],
    }


def _plain(value: Cell) -> Cell:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fixed(value: Cell, decimals: int = 3) -> str:
    """A number with so many decimals; what is no finite number is shown as absent."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return ABSENT
    return f"{value:.{decimals}f}"


def percent(value: Cell, decimals: int = 1) -> str:
    """A fraction as a percentage."""
    return fixed(100 * value, decimals) if isinstance(value, (int, float)) else ABSENT


def with_interval(row: Row, names: Sequence[str], decimals: int | None = None) -> str:
    """``median [low, high]`` of the values of a row that ``names`` lists in this order, with so
    many decimals, or with 4 significant digits."""
    middle, low, high = (row[name] for name in names)
    if not isinstance(middle, (int, float)) or not math.isfinite(middle):
        return ABSENT
    places = decimals_for(middle) if decimals is None else decimals
    ends = (fixed(low, places), fixed(high, places))
    interval = ABSENT if ABSENT in ends else ", ".join(ends)
    return f"{middle:.{places}f} [{interval}]"


def decimals_for(value: float, digits: int = 4) -> int:
    """Decimals that show ``value`` to so many significant digits, never in powers of ten."""
    if value == 0:
        return digits - 1
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))
