"""What commands print: the text for people, and the JSON document with its schema."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.errors import UserError, one_line
from experiments.matrix import Entry, Row
from experiments.sweep import point_text

__all__ = [
    "columns",
    "configs_document",
    "matrix_document",
    "replicas_of",
    "result_line",
    "row_lines",
    "runs_document",
    "schedule_document",
    "schedule_text",
    "systems_document",
    "systems_text",
]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def result_line(result: Mapping[str, Any], runs: Path) -> list[str]:
    """Name, status, outcome and place of a result, for :func:`columns`."""
    name = f"{result['name']} {point_text(result.get('swept', {}))} {result['label']}"
    return [" ".join(name.split()), result["status"], _outcome(result), str(runs / result["id"])]


def _outcome(result: Mapping[str, Any]) -> str:
    if result["error"]:
        return str(result["error"])
    if result["kind"] == "bench":
        speeds = sorted(entry["images_per_s"] for entry in result["rounds"])
        return f"{speeds[len(speeds) // 2]:.1f} images/s, median of {len(speeds)} rounds"
    accuracy, loss, wall_s = result["accuracy"], result["final_loss"], result["train_wall_s"]
    parts = [
        "" if accuracy is None else f"accuracy {accuracy:.1%}",
        "" if loss is None else f"loss {loss:.4f}",
        "" if wall_s is None else f"{wall_s:.1f} s of training",
    ]
    return ", ".join(filter(None, parts))


def runs_document(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"schema": "pipebench.runs/1", "runs": list(results)}


def configs_document(entries: Sequence[Entry], intents: Mapping[str, str]) -> dict[str, Any]:
    """``intents``: by title, what would be done; empty for a mere list."""
    configs = [
        {"title": entry.title, "name": entry.config.name, "kind": entry.config.kind}
        | ({"intent": intents[entry.title]} if intents else {})
        for entry in entries
    ]
    return {"schema": "pipebench.configs/1", "configs": configs}


def matrix_document(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "schema": "pipebench.matrix/1",
        "rows": [
            {"title": row.title, "status": row.status, "error": row.error, "runs": row.results}
            for row in rows
        ],
    }


def row_lines(row: Row) -> list[list[str]]:
    """A matrix row, for :func:`columns`: one line for each of its results."""
    if not row.results:
        return [[row.title, row.status, row.error or "not started"]]
    if len(row.results) == 1:
        return [[row.title, row.status, _outcome(row.results[0])]]
    return [
        [f"{row.title} {result['label']}", result["status"], _outcome(result)]
        for result in row.results
    ]


def systems_document() -> dict[str, Any]:
    from runtimes.systems import PEERS, SYSTEMS, system_options

    ours = [
        {
            "name": name,
            "kind": "system",
            "summary": system.summary,
            "source": system.paper,
            "options": {
                option: described.to_json() for option, described in system_options(name).items()
            },
        }
        for name, system in SYSTEMS.items()
    ]
    peers = [
        {"name": name, "kind": "peer", "summary": summary, "peer_of": counterpart, "options": {}}
        for name, (summary, counterpart) in PEERS.items()
    ]
    return {"schema": "pipebench.systems/1", "systems": [*ours, *peers]}


def systems_text(document: Mapping[str, Any]) -> str:
    rows = []
    for system in document["systems"]:
        said = system.get("source") or f"peer of {system['peer_of']}"
        options = ", ".join(
            f"{name} = {_values(option)} (default {_toml(option['default'])})"
            for name, option in system["options"].items()
        )
        rows.append([system["name"], system["summary"], said, options])
    return columns(rows)


def _values(option: Mapping[str, Any]) -> str:
    """What an option takes: "A | B", "integer ≥ 0"."""
    if "allowed" in option:
        return " | ".join(map(_toml, option["allowed"]))
    signs = {"at_least": "≥", "above": ">"}
    limits = [f"{sign} {option[name]:g}" for name, sign in signs.items() if name in option]
    return " ".join([option["kind"], *limits])


def _toml(value: object) -> str:
    if value is None:
        return "by the plan"
    return str(value).lower() if isinstance(value, bool) else str(value)


def replicas_of(text: str, stages: int) -> list[int]:
    """Replicas of each stage from "2" or "2,3,1"; UserError for anything else."""
    counts = text.split(",")
    counts = counts * stages if len(counts) == 1 else counts
    if len(counts) != stages or not all(count.strip().isdigit() and int(count) for count in counts):
        raise UserError(
            f"--replicas is {text!r}, but {stages} stages take one number from 1 on for all, or "
            f"{stages} with commas between them"
        )
    return [int(count) for count in counts]


def schedule_document(
    name: str,
    options: Mapping[str, Any],
    stages: int,
    units: int,
    replicas: Sequence[int],
    pipelines: int = 1,
    profile: Path | None = None,
) -> dict[str, Any]:
    """``units`` micro-batches of one batch (of each pipeline's share), or as many batches where
    they are not cut, under a system, checked by the validator's rules.  Drawn with a layer a stage,
    or to scale with those of a profile."""
    from runtimes.plan import Plan
    from runtimes.planning.profile import Profile
    from runtimes.schedule import validate
    from runtimes.simulation.costs import ProfileCosts
    from runtimes.simulation.grid import column_seconds, draw, grid, run_free
    from runtimes.system import UnflushedSystem
    from runtimes.systems import get_system

    try:
        system = get_system(name, options)
        whole = isinstance(system, UnflushedSystem)
        measured = None if profile is None else Profile.load(profile)
        layers = stages if measured is None else len(measured.layers)
        plan = Plan.even(
            layers, stages, replicas, micro_batches=1 if whole else units, pipelines=pipelines
        )
        # As many samples as leave no replica without one, or the most of them that were profiled.
        size = math.lcm(*replicas)
        if measured is not None:
            size *= max(1, measured.largest_unit // size)
        sizes = (size,) * units if whole else (size * units * pipelines,)
        program = system.program(plan, sizes)
        validate(program, system.declared(plan))
        scale: dict[str, Any] = {}
        if measured is None:
            drawn = grid(program)
        else:
            simulation = run_free(program, ProfileCosts(measured, plan))
            column = column_seconds(simulation)
            drawn = draw(simulation, column)
            scale = {"profile": str(profile), "unit_samples": size, "column_seconds": column}
    except ValueError as error:
        raise UserError(one_line(error)) from None
    return {
        "schema": "pipebench.schedule/1",
        "system": name,
        "options": dict(options),
        "stages": stages,
        "units": units,
        "replicas": list(replicas),
        "pipelines": pipelines,
        "warnings": list(system.warnings(plan)),
        "ranks": [
            {
                "rank": stream.rank,
                "pipeline": stream.pipeline,
                "stage": plan.place(stream.rank)[0],
                "replica": plan.place(stream.rank)[1],
                "actions": [str(action) for action in stream],
            }
            for stream in program.streams
        ],
        "grid": drawn.splitlines(),
        **scale,
    }


def schedule_text(document: Mapping[str, Any]) -> str:
    lines = list(document["grid"])
    if "profile" in document:
        microseconds = document["column_seconds"] * 1e6
        large = microseconds >= 1000
        column = f"{microseconds / 1000:g} ms" if large else f"{microseconds:g} µs"
        lines.insert(
            0,
            f"a column is {column} of {document['profile']}, a unit {document['unit_samples']} "
            "samples; messages, reductions and steps are free",
        )
    return "\n".join(lines)
