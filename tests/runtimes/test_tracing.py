"""A trace is what was timed, in the form that its viewers read, and reads back as what it was."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes import tracing
from runtimes.plan import Plan
from runtimes.schedule import Batches, Op, parse
from runtimes.schedule.action import RECEIVES, SENDS
from runtimes.timeline import Cut, Span, Timeline
from runtimes.tracing import read_trace, trace_document, traced, write_trace
from tests.timelines import message, program_of, timeline_of

PLANS = {
    "dapple": Plan.even(4, 4, micro_batches=4),
    "gpipe": Plan.even(6, 2, (2, 1), micro_batches=3, recompute=True, cuts=(1, 2)),
    "ashpipe": Plan.even(4, 2, (1, 3)),
    "pipedream": Plan.even(4, 2, (2, 1)),
}
TIMELINES = [
    timeline_of(program_of(plan, system=system), label=system, first=40)
    for system, plan in PLANS.items()
]


def faults(document: Mapping[str, Any], timelines: Sequence[Timeline]) -> list[str]:
    """What a viewer, or a reader who knows what was timed, would have against a document."""
    found = []
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    ends: dict[str, dict[int, Any]] = {"s": {}, "f": {}}
    for event in document["traceEvents"]:
        thread = slices[event["pid"], event.get("tid", -1)]
        if event["ph"] == "X":
            thread.append(event)
        elif event["ph"] in ends:
            if event["ph"] == "f" and event["id"] not in ends["s"]:
                found.append("a flow ends where none has begun")
            # A viewer ties it to what has begun last on its thread.
            ends[event["ph"]][event["id"]] = event["pid"], event["ts"], thread[-1]["name"]
    for process, timeline in enumerate(timelines, 1):
        for rank, items in enumerate(timeline.ranks):
            thread = slices[process, rank]
            if [parse(event["name"]) for event in thread] != [item.action for item in items]:
                found.append(f"rank {rank} of {timeline.label}: other actions")
            for event, item in zip(thread, items, strict=False):
                times = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
                if not all(map(_close, times, item[1:])):
                    found.append(f"{event['name']} at {times}, not {item[1:]}")
            for one, other in pairwise(thread):
                # As a reader that counts whole nanoseconds, and cuts off the rest.
                if int(one["ts"] * 1e3) + int(one["dur"] * 1e3) > int(other["ts"] * 1e3):
                    found.append(f"{one['name']} reaches into {other['name']}")
    found += _flow_faults(ends, timelines)
    return found


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, abs_tol=1e-9)


def _flow_faults(ends: Mapping[str, Mapping[int, Any]], timelines: Sequence[Timeline]) -> list[str]:
    joined = set()
    for number, (process, time, name) in ends["s"].items():
        plan = timelines[process - 1].plan
        sent, (other, later, received) = parse(name), ends["f"].get(number, (0, 0, ""))
        if other != process or later < time:
            return [f"the flow of {name} ends nowhere, or before it begins"]
        if sent.op not in SENDS or parse(received).op not in RECEIVES:
            return [f"a flow from {name} to {received}"]
        if message(sent, plan) != message(parse(received), plan):
            return [f"{received} is told to be of {name}"]
        joined.add((process, message(sent, plan)))
    wanted = {
        (process, message(item.action, timeline.plan))
        for process, timeline in enumerate(timelines, 1)
        for items in timeline.ranks
        for item in items
        if item.action.op in SENDS
    }
    return [] if joined == wanted else ["messages without a flow"]


def test_a_document_is_what_was_timed() -> None:
    assert not faults(trace_document(TIMELINES), TIMELINES)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "milliseconds": lambda patch: patch.setattr(tracing, "_microseconds", lambda time: time / 1e6),
    "an action lost": lambda patch: patch.setattr(
        tracing, "_events", lambda *a: [events[:-1] for events in _events(*a)]
    ),
    "ends instead of lengths": lambda patch: patch.setattr(
        tracing,
        "_complete",
        lambda item, timeline: {**_complete(item, timeline), "dur": item.end_seconds * 1e6},
    ),
    "flows in the order of time alone": lambda patch: patch.setattr(
        tracing,
        "_merged",
        lambda ranks: sorted((e for events in ranks for e in events), key=lambda e: e["ts"]),
    ),
    "a flow by its unit alone": lambda patch: patch.setattr(
        tracing, "_key", lambda action, plan: (_Kind(), action.unit) if action.interval else None
    ),
}
_events, _complete = tracing._events, tracing._complete


class _Kind:
    """All channels are one."""

    kind = "ACT"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kind)

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_document_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    assert faults(trace_document(TIMELINES), TIMELINES)


def test_a_file_reads_back_as_what_was_written(tmp_path: Path) -> None:
    cut = replace(TIMELINES[0], cut=Cut(9, 0.123456789))
    write_trace(tmp_path / "trace.json", [cut, *TIMELINES[1:]])
    back = read_trace(tmp_path / "trace.json")
    for one, other in zip(back, [cut, *TIMELINES[1:]], strict=True):
        assert replace(one, ranks=other.ranks) == other
        for ours, theirs in zip(one.ranks, other.ranks, strict=True):
            assert [item.action for item in ours] == [item.action for item in theirs]
            assert all(
                _close(a, b)
                for item, given in zip(ours, theirs, strict=True)
                for a, b in zip(item[1:], given[1:], strict=True)
            )
    write_trace(tmp_path / "again.json", back)
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "trace.json").read_bytes()


@given(st.lists(st.integers(0, 10**13), min_size=2, max_size=8))
def test_nanoseconds_survive_exactly(times: list[int]) -> None:
    """For hours, and for a reader that multiplies and cuts off, too."""
    plan, batches = Plan.even(1, 1), Batches((1,) * 8)
    ordered = sorted(times)
    items = tuple(
        Span(parse(f"p0.s0.r0.F{unit}"), start / 1e9, end / 1e9)
        for unit, (start, end) in enumerate(pairwise(ordered))
    )
    timeline = Timeline("dp", "measured", plan, batches, (items,), "round 0")
    document = json.loads(json.dumps(trace_document([timeline])))
    assert traced(document) == (timeline,)
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [int(event["ts"] * 1e3) for event in slices] == ordered[:-1]
    lengths = [end - start for start, end in pairwise(ordered)]
    assert [int(event["dur"] * 1e3) for event in slices] == lengths


def test_what_a_viewer_shows_of_an_action() -> None:
    document = trace_document([TIMELINES[1]])
    names = {
        event["args"]["name"] for event in document["traceEvents"] if event["name"].endswith("name")
    }
    assert names == {
        "gpipe · simulated · updates 0 … 2",
        "rank 0 · stage 0 replica 0",
        "rank 1 · stage 0 replica 1",
        "rank 2 · stage 1 replica 0",
    }
    events = {event["name"]: event for event in document["traceEvents"] if event["ph"] == "X"}
    backward = events["p0.s0.r1.B2/1@0"]
    assert (backward["cat"], backward["tid"]) == ("B", 1)
    # Of the third of three units of 8 samples, that is 3, this replica has the larger half.
    assert backward["args"] == {"unit": 2, "batch": 0, "version": 0, "samples": 2}
    assert events["p0.s0.r0.REDUCE1/0@1"]["args"] == {"unit": 1, "batch": 1, "version": 1}
    # An update of PipeDream takes a batch of each replica.
    steps = [
        event["args"]["batch"]
        for event in trace_document([TIMELINES[3]])["traceEvents"]
        if (event.get("cat"), event.get("tid")) == ("STEP", 0)
    ]
    assert steps == [1, 2]


def test_events_stand_before_what_viewers_do_not_know(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", TIMELINES)
    text = (tmp_path / "trace.json").read_text()
    assert text.startswith('{"traceEvents":[\n')
    assert json.loads(text)["otherData"]["schema"] == "pipebench.trace/1"


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_trace(tmp_path / "trace.json", TIMELINES)
    assert not list(tmp_path.iterdir())


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *above, last = path
        node: Any = document
        for key in above:
            node = node[key]
        node[last] = value

    return change


TOLD = "otherData", "timelines", 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("otherData", value={}), "not a trace of schema pipebench.trace/1: KeyError"),
        (_set("otherData", "schema", value="other/1"), "its schema is 'other/1'"),
        (_set("traceEvents", value=None), "TypeError"),
        (_set(*TOLD, "plan", value={}), "KeyError"),
        (_set(*TOLD, "evidence", value="paper"), "one of measured, emulated, simulated"),
        (_set("traceEvents", -1, "name", value="p0.s9.r0.Q"), "not an action"),
        (_set("traceEvents", -1, "dur", value=-5.0), "must begin at"),
    ],
)
def test_another_document_is_refused_in_one_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    document = json.loads(json.dumps(trace_document(TIMELINES[:1])))
    change(document)
    (tmp_path / "t.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=rf"t\.json cannot be read as a trace: .*{said}") as error:
        read_trace(tmp_path / "t.json")
    assert "\n" not in str(error.value)
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(ValueError, match="t.json cannot be read as a trace"):
        read_trace(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ranks: ranks[:-1], "times of 3 ranks, but its plan has 4"),
        (lambda ranks: (ranks[1], ranks[0], *ranks[2:]), "not an action of rank 0"),
        (lambda ranks: (ranks[0][::-1], *ranks[1:]), "must begin at"),
    ],
)
def test_times_that_cannot_be(change: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(TIMELINES[0], ranks=change(TIMELINES[0].ranks))


def test_idle_is_what_is_neither_computed_nor_reduced_nor_stepped() -> None:
    plan = Plan.even(2, 2, micro_batches=2)
    seconds = {Op.F: 1.0, Op.B: 2.0, Op.STEP: 0.5}
    timeline = timeline_of(program_of(plan, (4,)), seconds)
    # 0: F0 F1 . . B0 B0 . B1 B1 S    1: . F0 B0 B0 F1 B1 B1 S
    assert timeline.makespan_seconds == pytest.approx(9.5)
    assert timeline.idle_shares() == pytest.approx([3 / 9.5, 3 / 9.5])
    # Up to the cut only, wherever an action stands then.
    cut = replace(timeline, cut=Cut(2, 5.5))
    assert cut.idle_shares() == pytest.approx([2 / 5.5, 1 / 5.5])
