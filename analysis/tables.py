"""The tables of a results directory: printed, written, or as a JSON document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis import (
    accuracy,
    link_rates,
    pipelines,
    predictions,
    simulations,
    sweeps,
    throughput,
    unflushed,
)
from analysis.layout import Table, document, markdown
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
    paths = [out_dir / "tables.md"]
    text = "\n\n".join(markdown(table) for table in tables) + "\n"
    paths[0].write_text(text, encoding="utf-8")
    for name in dict.fromkeys(table.name for table in tables):
        paths.append(out_dir / f"{name}.csv")
        frames = [table.plain for table in tables if table.name == name]
        pd.concat(frames).to_csv(paths[-1], index=False, lineterminator="\n", encoding="utf-8")
    return paths


def tables_document(results_dir: Path) -> dict[str, Any]:
    """All tables as JSON data under the schema "pipebench.tables/1".

    Raises:
        ValueError: as :func:`print_tables`.
    """
    return {"schema": SCHEMA, "tables": [document(table) for table in _tables(results_dir)]}


def _tables(results_dir: Path) -> tuple[Table, ...]:
    records = load_records(results_dir)
    return (
        *sweeps.tables(records),
        *accuracy.tables(records),
        *throughput.tables(records),
        *unflushed.tables(records),
        *simulations.tables(results_dir),
        *predictions.tables(records, results_dir),
        *link_rates.tables(records, results_dir),
        *pipelines.tables(records, results_dir),
    )
