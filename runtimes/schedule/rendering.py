"""Drawing programs as text: a time grid, and the place where a rule is broken."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from runtimes.schedule.action import COMPUTE, RECEIVES, Action, Op
from runtimes.schedule.program import Channel, Program, Stream, channel

__all__ = ["SLOTS", "grid", "marked_grid", "time_slots"]

#: Slots each computation takes in a grid: a backward is about twice a forward.
SLOTS = {Op.F: 1, Op.R: 1, Op.B: 2}


def time_slots(
    program: Program, slots: Mapping[Op, int] = SLOTS
) -> list[list[tuple[Action, int, int]]]:
    """For each stream its computations with their first and last+1 slot; messages are free.

    A B that is cut into parts counts its slots once, for its last part.
    """
    heads = [(iter(stream), stream) for stream in program.streams]
    pending = [next(actions, None) for actions, _ in heads]
    clocks = [0] * len(heads)
    sent: dict[tuple[Channel, int, tuple[int, int] | None], int] = {}
    #: (pipeline, stage, update) → (replica, part) → slot in which that reduction began.
    reduced: dict[tuple[int, int, int], dict[tuple[int, int | None], int]] = {}
    cells: list[list[tuple[Action, int, int]]] = [[] for _ in heads]
    moved = True
    while moved:
        moved = False
        for index, (actions, _) in enumerate(heads):
            while (action := pending[index]) is not None:
                if action.op in RECEIVES:
                    key = (channel(action, program.plan), action.unit, action.interval)
                    if key not in sent:
                        break
                    clocks[index] = max(clocks[index], sent.pop(key))
                elif action.op in (Op.SEND_ACT, Op.SEND_GRAD):
                    key = (channel(action, program.plan), action.unit, action.interval)
                    sent[key] = clocks[index]
                elif action.op in COMPUTE:
                    width = slots[action.op]
                    if action.part not in (
                        None,
                        len(program.plan.stages[action.stage].parts) - 1,
                    ):
                        width = 0
                    if width:
                        cells[index].append((action, clocks[index], clocks[index] + width))
                    clocks[index] += width
                elif action.op == Op.REDUCE:
                    begun = reduced.setdefault((action.pipeline, action.stage, action.unit), {})
                    begun[action.replica, action.part] = clocks[index]
                elif action.op == Op.STEP and program.plan.stages[action.stage].replicas > 1:
                    stage = program.plan.stages[action.stage]
                    begun = reduced.get((action.pipeline, action.stage, action.unit), {})
                    parts = 1 if (action.replica, None) in begun else len(stage.parts)
                    if len(begun) < stage.replicas * parts:
                        break
                    clocks[index] = max(clocks[index], *begun.values())
                pending[index] = next(actions, None)
                moved = True
    return cells


def grid(program: Program, slots: Mapping[Op, int] = SLOTS) -> str:
    """Rank × time: what each rank computes in each slot, a dot where it idles."""
    cells = time_slots(program, slots)
    end = max((row[-1][2] for row in cells if row), default=0)
    names = [
        {
            slot: f"{action.op.value}{action.unit}"
            for action, first, last in row
            for slot in range(first, last)
        }
        for row in cells
    ]
    width = max((len(name) for row in names for name in row.values()), default=1)
    lines = []
    for stream, row in zip(program.streams, names, strict=True):
        drawn = " ".join(row.get(slot, ".").ljust(width) for slot in range(end))
        lines.append(f"{_label(program, stream)} | {drawn.rstrip()}")
    return "\n".join(lines)


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
        lines.append(f"{_label(program, stream)} | {text.rstrip()}")
    return "\n".join(lines)


def _short(action: Action) -> str:
    return str(action).split(".", 3)[3]


def _label(program: Program, stream: Stream) -> str:
    stage, replica = program.plan.place(stream.rank)
    label = f"rank {stream.rank} (stage {stage}"
    if program.plan.stages[stage].replicas > 1:
        label += f", replica {replica}"
    if program.batches.pipelines > 1:
        label += f", pipeline {stream.pipeline}"
    return label + ")"
