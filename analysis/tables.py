"""The tables of a results directory: printed, written, or as a JSON document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis import accuracy, throughput
from analysis.layout import Table, csv_text, document, markdown
from analysis.records import load_records

__all__ = ["SCHEMA", "print_tables", "tables_document", "write_tables"]

SCHEMA = "pipebench.tables/1"


def print_tables(results_dir: Path) -> str:
    """All tables as Markdown.

    Raises:
        ValueError: no runs, or a broken record (see :func:`analysis.records.load_records`).
    """
    return "\n\n".join(markdown(table) for table in _tables(results_dir)) + "\n"


def write_tables(results_dir: Path, out_dir: Path) -> list[Path]:
    """tables.md with all tables, and a CSV for each kind of table, with units in column names.

    Raises:
        ValueError: as :func:`print_tables`.
    """
    tables = _tables(results_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    contents = {"tables.md": "\n\n".join(markdown(table) for table in tables) + "\n"}
    for name in dict.fromkeys(table.name for table in tables):
        contents[f"{name}.csv"] = csv_text([table for table in tables if table.name == name])
    for name, text in contents.items():
        (out_dir / name).write_text(text, encoding="utf-8")
    return [out_dir / name for name in contents]


def tables_document(results_dir: Path) -> dict[str, Any]:
    """All tables as JSON data under the schema "pipebench.tables/1".

    Raises:
        ValueError: as :func:`print_tables`.
    """
    return {"schema": SCHEMA, "tables": [document(table) for table in _tables(results_dir)]}


def _tables(results_dir: Path) -> tuple[Table, ...]:
    records = load_records(results_dir)
    return (*accuracy.tables(records), *throughput.tables(records))
