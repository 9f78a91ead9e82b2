"""A Gantt figure shows what a trace holds: the right bars, where they fit, and whose they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from analysis import gantt
from analysis.gantt import draw_gantt, read_timelines, write_gantt
from runtimes.plan import Plan
from runtimes.schedule import Op
from runtimes.timeline import Cut, Timeline
from runtimes.tracing import write_trace
from tests.timelines import SECONDS, program_of, timeline_of

PLAN = Plan.even(4, 2, (1, 2), micro_batches=2, recompute=True, cuts=(3,))
SIMULATED = timeline_of(program_of(PLAN))
MEASURED = timeline_of(
    program_of(PLAN),
    {op: 1.25 * seconds for op, seconds in SECONDS.items()},
    evidence="measured",
    segment="round 8",
)


def written(folder: Path, *timelines: Timeline, name: str = "trace.json") -> Path:
    write_trace(folder / name, timelines)
    return folder / name


def drawn(tmp_path: Path, *timelines: Timeline) -> Figure:
    return draw_gantt(read_timelines(written(tmp_path, *timelines)))


def spans(panel: Axes) -> list[tuple[int, float, float]]:
    """(row, begin, end) of every bar."""
    found = []
    for collection in panel.collections:
        if isinstance(collection, PolyCollection):
            for path in collection.get_paths():
                box = path.get_extents()
                found.append((round((box.y0 + box.y1) / 2), box.x0, box.x1))
    return sorted(found)


def bars_of(timeline: Timeline) -> list[tuple[int, float, float]]:
    """What should be there, in milliseconds."""
    drawn = {Op.F, Op.R, Op.B, Op.REDUCE, Op.STEP}
    return sorted(
        (rank, item.start_seconds * 1e3, item.end_seconds * 1e3)
        for rank, items in enumerate(timeline.ranks)
        for item in items
        if item.action.op in drawn
    )


def same(ours: Any, theirs: Any) -> bool:
    return len(ours) == len(theirs) and np.allclose(ours, theirs, atol=1e-6)


def test_measured_stands_above_simulated_on_one_axis(tmp_path: Path) -> None:
    """Whatever the order in which they are named."""
    measured, simulated = drawn(tmp_path, SIMULATED, MEASURED).axes
    assert same(spans(measured), bars_of(MEASURED))
    assert same(spans(simulated), bars_of(SIMULATED))
    titles = [panel.get_title(loc="left") for panel in (measured, simulated)]
    assert titles == [
        "dapple · measured · round 8, 3 batches",
        "dapple · simulated · updates 0 … 2, 3 batches",
    ]
    end = MEASURED.makespan_seconds * 1e3
    assert measured.get_xlim() == simulated.get_xlim() == pytest.approx((0, end))
    rows = [label.get_text() for label in simulated.get_yticklabels()]
    assert rows == [
        "rank 0 · stage 0 replica 0",
        "rank 1 · stage 1 replica 0",
        "rank 2 · stage 1 replica 1",
    ]
    assert measured.get_ylim()[0] > measured.get_ylim()[1], "rank 0 is on top"


def test_measured_alone(tmp_path: Path) -> None:
    (panel,) = drawn(tmp_path, MEASURED).axes
    assert same(spans(panel), bars_of(MEASURED))


def test_milliseconds_taken_for_microseconds_would_show(tmp_path: Path) -> None:
    path = written(tmp_path, MEASURED)
    (timeline,) = read_timelines(path)
    slow = tuple(bar._replace(start_ms=bar.start_ms / 1e3) for bar in timeline.bars)
    (panel,) = draw_gantt([replace(timeline, bars=slow)]).axes
    assert not same(spans(panel), bars_of(MEASURED))


def test_kinds_differ_in_colour_or_hatch_and_are_explained(tmp_path: Path) -> None:
    figure = drawn(tmp_path, MEASURED)
    (panel,) = figure.axes
    looks = {
        (tuple(np.asarray(bars.get_facecolor()).ravel()), bars.get_hatch())
        for bars in panel.collections
    }
    assert len(looks) == 5
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["forward", "recomputation", "backward", "reduce", "step"]


def test_units_are_numbered_where_there_is_room(tmp_path: Path) -> None:
    (panel,) = drawn(tmp_path, MEASURED).axes
    numbers = sorted((round(text.get_position()[1]), text.get_text()) for text in panel.texts)
    wanted = sorted(
        (rank, str(item.action.unit))
        for rank, items in enumerate(MEASURED.ranks)
        for item in items
        if item.action.op in (Op.F, Op.R, Op.B) and item.action.part is None
    )
    assert set(wanted) <= set(numbers)
    narrow = timeline_of(program_of(Plan.even(2, 2, micro_batches=20), (20,) * 3))
    (crowded,) = drawn(tmp_path, narrow).axes
    assert not crowded.texts


def test_of_a_long_trace_the_first_batches_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage of AshPipe is in its batch 1 while the first is in batch 3 already: what lies
    in the picture is drawn, whatever batch it is of."""
    monkeypatch.setattr(gantt, "MOST_BARS", 6)
    long = timeline_of(program_of(Plan.even(3, 3), (4,) * 9, "ashpipe"), label="ashpipe")
    (panel,) = drawn(tmp_path, long).axes
    assert panel.get_title(loc="left").endswith("first 2 of 9 batches")
    of_two = [i for items in long.ranks for i in items if i.action.unit < 2]
    end = max(item.end_seconds for item in of_two) * 1e3
    assert panel.get_xlim()[1] == pytest.approx(end)
    assert same(spans(panel), [bar for bar in bars_of(long) if bar[1] < end - 1e-9])


def test_a_trace_that_was_cut_says_so(tmp_path: Path) -> None:
    (panel,) = drawn(tmp_path, replace(MEASURED, cut=Cut(57, 0.1))).axes
    assert panel.get_title(loc="left").endswith("first 3 of 57 batches")
    (line,) = panel.lines
    assert list(np.asarray(line.get_xdata())) == pytest.approx([100, 100])


def test_a_figure_is_written_from_files_and_can_leave_contenders_out(tmp_path: Path) -> None:
    other = replace(MEASURED, label="other")
    path = written(tmp_path, other, MEASURED)
    simulated = written(tmp_path, SIMULATED, name="simulated.json")
    sources = [(path, "dapple"), (simulated, None)]
    paths = write_gantt("gantt-x", sources, tmp_path / "out")
    assert [file.name for file in paths] == ["gantt-x.pdf", "gantt-x.png"]
    image = matplotlib.image.imread(paths[1])[..., :3]
    assert 0.02 < np.mean(image < 0.9) < 0.9
    before = [file.read_bytes() for file in paths]
    again = write_gantt("gantt-x", sources, tmp_path / "out")
    assert [file.read_bytes() for file in again] == before
    with pytest.raises(ValueError, match="has no timeline of 'third', only of other, dapple"):
        read_timelines(path, "third")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as a trace"),
        ("[]", "cannot be read as a trace"),
        ("{}", "is no trace: traceEvents: Field required"),
        (
            """{"traceEvents": [], "otherData": {"schema": "other"}}""",
            "is no trace: otherData.schema",
        ),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match=f"t.json {said}") as error:
        read_timelines(tmp_path / "t.json")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="nowhere.json cannot be read"):
        read_timelines(tmp_path / "nowhere.json")
