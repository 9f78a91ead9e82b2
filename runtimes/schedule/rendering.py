"""Drawing programs as text: the place where a rule is broken."""

from __future__ import annotations

from itertools import islice

from runtimes.schedule.action import Action
from runtimes.schedule.program import Program, Stream

__all__ = ["label", "marked_grid", "place"]


def marked_grid(program: Program, where: Stream, position: int, around: int = 6) -> str:
    """The streams step by step around ``position`` of one of them, which is marked."""
    first = max(0, position - around)
    rows = [
        [_short(action) for action in islice(stream, first, position + around + 1)]
        for stream in program.streams
    ]
    marked = next(i for i, s in enumerate(program.streams) if s is where)
    row = rows[marked]
    at = position - first
    while len(row) <= at:
        row.append("(end)")
    row[at] = f">>{row[at]}<<"
    columns = max(len(r) for r in rows)
    widths = [max((len(r[c]) for r in rows if c < len(r)), default=0) for c in range(columns)]
    lines = [f"steps {first} … {first + columns - 1} of each stream"]
    for stream, row in zip(program.streams, rows, strict=True):
        text = "  ".join(cell.ljust(widths[c]) for c, cell in enumerate(row))
        lines.append(f"{label(program, stream)} | {text.rstrip()}")
    return "\n".join(lines)


def _short(action: Action) -> str:
    return str(action).split(".", 3)[3]


def label(program: Program, stream: Stream) -> str:
    """Rank, stage and what else tells a stream from the others."""
    text = place(program, stream.rank)
    if program.batches.pipelines > 1:
        text = f"{text[:-1]}, pipeline {stream.pipeline})"
    return text


def place(program: Program, rank: int) -> str:
    """The rank with its stage, and the replica where there are several."""
    stage, replica = program.plan.place(rank)
    text = f"rank {rank} (stage {stage}"
    if program.plan.stages[stage].replicas > 1:
        text += f", replica {replica}"
    return text + ")"
