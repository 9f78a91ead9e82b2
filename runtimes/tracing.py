"""Timelines as trace events, the JSON that ui.perfetto.dev and chrome://tracing draw; and back.

A process is a timeline, a thread a rank, a complete event ("X") an action by its text form, and a
flow ("s" to "f") a message.  Times are microseconds.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from runtimes.manifest import write_whole
from runtimes.plan import Plan
from runtimes.schedule.action import COMPUTE, RECEIVES, SENDS, Action, parse
from runtimes.schedule.batches import Batches
from runtimes.schedule.program import channel
from runtimes.timeline import Cut, Span, Timeline, batch_of, nanoseconds

__all__ = ["SCHEMA", "TRACE_FILE", "read_trace", "trace_document", "traced", "write_trace"]

SCHEMA = "pipebench.trace/1"
#: The trace in a run's directory.
TRACE_FILE = "trace.json"

Event = dict[str, Any]


def trace_document(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The document of one or more timelines, e.g. of a benchmark's contenders."""
    numbers = count(1)
    events: list[Event] = []
    for process, timeline in enumerate(timelines, 1):
        events += _names(process, timeline)
        events += _merged(_events(process, timeline, numbers))
    # The events come first: what else a document holds, some viewers stop at.
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schema": SCHEMA,
            "timelines": [
                _description(process, timeline) for process, timeline in enumerate(timelines, 1)
            ],
        },
    }


def traced(document: Any) -> tuple[Timeline, ...]:
    """The timelines of a document; times come back to the nanosecond.  ValueError for another."""
    try:
        other = document["otherData"]
        if other["schema"] != SCHEMA:
            raise ValueError(f"its schema is {other['schema']!r}, but must be {SCHEMA}")
        events: dict[tuple[int, int], list[Event]] = {}
        for event in document["traceEvents"]:
            if event["ph"] == "X":
                events.setdefault((event["pid"], event["tid"]), []).append(event)
        return tuple(_timeline(told, events) for told in other["timelines"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a trace of schema {SCHEMA}: {error!r}") from error


def write_trace(path: Path, timelines: Sequence[Timeline]) -> None:
    """One event a line; the whole file, or none."""
    document = trace_document(timelines)
    lines = ",\n".join(_compact(event) for event in document.pop("traceEvents"))
    rest = _compact(document).removeprefix("{")
    write_whole(path, f'{{"traceEvents":[\n{lines}\n],\n{rest}\n'.encode())


def read_trace(path: Path) -> tuple[Timeline, ...]:
    """The timelines of a file; ValueError, with its name, if it is not such a trace."""
    try:
        return traced(json.loads(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as a trace: {error}") from error


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _microseconds(time: int) -> float:
    """Of nanoseconds; never so little less that a reader that cuts off loses one of them."""
    value = time / 1e3
    return value if int(value * 1e3) == time else math.nextafter(value, math.inf)


def _names(process: int, timeline: Timeline) -> Iterator[Event]:
    name = f"{timeline.label} · {timeline.evidence} · {timeline.segment}"
    about = {"ph": "M", "pid": process}
    yield {**about, "name": "process_name", "args": {"name": name}}
    yield {**about, "name": "process_sort_index", "args": {"sort_index": process}}
    for rank in range(timeline.plan.world_size):
        stage, replica = timeline.plan.place(rank)
        name = f"rank {rank} · stage {stage} replica {replica}"
        yield {**about, "tid": rank, "name": "thread_name", "args": {"name": name}}
        yield {**about, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _events(process: int, timeline: Timeline, numbers: Iterator[int]) -> list[list[Event]]:
    """Each rank's events in order: an action, and the begin or the end of its message's flow."""
    sends, receives = _messages(timeline, SENDS), _messages(timeline, RECEIVES)
    joined = {key: next(numbers) for key in sends if key in receives}
    ranks = []
    for rank, items in enumerate(timeline.ranks):
        events: list[Event] = []
        for item in items:
            start = nanoseconds(item.start_seconds)
            place = {"pid": process, "tid": rank}
            events.append(_complete(item, timeline) | place)
            key = _key(item.action, timeline.plan)
            if key not in joined:
                continue
            flow = {"name": key[0].kind, "cat": "message", "id": joined[key], **place}
            if item.action.op in SENDS:
                events.append({**flow, "ph": "s", "ts": _microseconds(start)})
            else:
                # In the receive, which may have begun before there was anything to receive.
                time = max(start, nanoseconds(sends[key].start_seconds))
                events.append({**flow, "ph": "f", "bp": "e", "ts": _microseconds(time)})
        ranks.append(events)
    return ranks


def _complete(item: Span, timeline: Timeline) -> Event:
    action, start = item.action, nanoseconds(item.start_seconds)
    replicas = timeline.plan.stages[action.stage].replicas
    arguments: dict[str, int] = {
        "unit": action.unit,
        "batch": batch_of(action, timeline.batches, replicas),
    }
    if action.version is not None:
        arguments["version"] = action.version
    if action.interval is not None:
        arguments["samples"] = action.interval[1] - action.interval[0]
    elif action.op in COMPUTE:
        low, high = timeline.batches.share(action.pipeline, action.unit, replicas, action.replica)
        arguments["samples"] = high - low
    return {
        "name": str(action),
        "cat": action.op.value,
        "ph": "X",
        "ts": _microseconds(start),
        "dur": _microseconds(nanoseconds(item.end_seconds) - start),
        "args": arguments,
    }


def _key(action: Action, plan: Plan) -> Any:
    """By which both ends of a message know it; None for an action that is neither."""
    if action.interval is None:
        return None
    return channel(action, plan), action.unit, action.interval[0]


def _messages(timeline: Timeline, ops: frozenset[Any]) -> dict[Any, Span]:
    return {
        _key(item.action, timeline.plan): item
        for items in timeline.ranks
        for item in items
        if item.action.op in ops
    }


def _merged(ranks: Sequence[Sequence[Event]]) -> list[Event]:
    """By time; at one time each rank's in its own order, and a flow's begin before its end.

    A viewer sorts by nothing but time, and ties a flow to the slice of its thread that has begun
    last.
    """
    rests = [deque(events) for events in ranks]
    begun: set[int] = set()
    merged: list[Event] = []
    while any(rests):
        free = [rest for rest in rests if rest and (rest[0]["ph"] != "f" or rest[0]["id"] in begun)]
        if not free:
            raise ValueError("the messages cross: each rank received before what it waits for")
        event = min(free, key=lambda rest: float(rest[0]["ts"])).popleft()
        if event["ph"] == "s":
            begun.add(event["id"])
        merged.append(event)
    return merged


def _description(process: int, timeline: Timeline) -> dict[str, Any]:
    return {
        "process": process,
        "label": timeline.label,
        "evidence": timeline.evidence,
        "segment": timeline.segment,
        "first": timeline.first,
        "batches": list(timeline.batches.sizes),
        "rounds": timeline.batches.rounds,
        "cut": None if timeline.cut is None else asdict(timeline.cut),
        "plan": timeline.plan.to_json(),
    }


def _timeline(told: Mapping[str, Any], events: Mapping[tuple[int, int], list[Event]]) -> Timeline:
    plan = Plan.from_json(told["plan"])
    return Timeline(
        told["label"],
        told["evidence"],
        plan,
        Batches(tuple(told["batches"]), plan.micro_batches, plan.pipelines, told["rounds"]),
        tuple(
            tuple(_timed(event) for event in events.get((told["process"], rank), ()))
            for rank in range(plan.world_size)
        ),
        told["segment"],
        told["first"],
        None if told["cut"] is None else Cut(**told["cut"]),
    )


def _timed(event: Event) -> Span:
    start, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
    return Span(parse(event["name"]), start / 1e9, (start + length) / 1e9)
