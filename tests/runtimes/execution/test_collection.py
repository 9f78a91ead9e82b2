"""What ranks did comes together on one clock, is cut at whole batches, and lies beside the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from runtimes.execution import benchmark, distributed, trace, training, worker
from runtimes.execution.collection import RankTimes, collect, joined, rank_times, whole_batches
from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.engine import Engine, Segment
from runtimes.execution.inprocess import InProcess
from runtimes.execution.team import DistributedTeam
from runtimes.execution.trace import Clocked, Trace
from runtimes.job import BenchSpec, Job, Task
from runtimes.model.stack import build_stack
from runtimes.peers.pipelining import PipeliningEngine
from runtimes.plan import Plan
from runtimes.schedule import Batches, parse
from runtimes.schedule.action import RECEIVES, SENDS, Action
from runtimes.systems import get_system
from runtimes.timeline import Timeline
from runtimes.tracing import read_trace
from tests.processes import run_ranks
from tests.runtimes.execution.runs import (
    MODEL,
    TWO,
    cut_back,
    feeds,
    job_of,
    train,
    train_in_process,
    write_data,
)
from tests.timelines import message

THREE = Plan.even(4, 2, (1, 2), micro_batches=2)
#: Nanoseconds by which the clock of each rank is ahead.
AHEAD = (0, 7 * 10**9, -3 * 10**9)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path)


def seen_and_timed(
    rank: int, world_size: int, data: Path, job: Job, most: int
) -> tuple[list[Action], tuple[int, int], Timeline | None]:
    """The actions that a hook saw, begin and end of the segment on the true clock, and what was
    collected, on ranks whose clocks differ as those of hosts do."""
    true = distributed.perf_counter_ns
    for module in (trace, worker, distributed):
        module.perf_counter_ns = lambda: true() + AHEAD[rank]  # type: ignore[attr-defined]
    distributed.clock_offsets = lambda _: [  # type: ignore[assignment]
        AHEAD[rank] - ahead for ahead in AHEAD
    ]
    feed, validation = feeds(job, data)
    seen: list[Action] = []
    engine = DistributedEngine(
        job, job.tasks[0], build_stack(MODEL), feed, rank, before=seen.append
    )
    engine.evaluate(validation, 13, 5)
    assert not engine.worker.trace.clocked, "nobody asks for those of an evaluation"
    seen.clear()
    dist.barrier()
    begin = true()
    engine.train(Segment(0, feed.batch_sizes()))
    end = true()
    return seen, (begin, end), collect(engine, "it", first=0, words="here", most_actions=most)


def faults(
    timeline: Timeline, seen: Sequence[Sequence[Action]], spans: Sequence[tuple[int, int]]
) -> list[str]:
    """What is wrong with times of actions that ranks were seen to perform."""
    found = []
    for rank, items in enumerate(timeline.ranks):
        if [item.action for item in items] != list(seen[rank]):
            found.append(f"rank {rank}: other actions than were performed")
    limit = (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e9
    if not timeline.makespan_seconds <= limit:
        found.append(f"{timeline.makespan_seconds} s, but the segment took {limit} s")
    actions = [item for items in timeline.ranks for item in items]
    sent = {message(i.action, timeline.plan): i for i in actions if i.action.op in SENDS}
    for item in actions:
        if item.action.op in RECEIVES:
            begin = sent[message(item.action, timeline.plan)].start_seconds
            # Clocks of processes on one host agree to well below a microsecond.
            if item.end_seconds < begin - 1e-6:
                found.append(f"{item.action} ended before it was sent")
    return found


@pytest.fixture(scope="module")
def run_of_three(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One segment of three batches over processes: what each rank saw, its span, the timeline."""
    data = write_data(tmp_path_factory.mktemp("data"))
    results = run_ranks(3, seen_and_timed, data, job_of(THREE, 1), 10**6)
    seen, spans, timelines = zip(*results, strict=True)
    assert timelines[1:] == (None, None)
    return seen, spans, timelines[0]


def test_a_run_over_processes_is_traced_as_it_was(run_of_three: Any) -> None:
    seen, spans, timeline = run_of_three
    assert not faults(timeline, seen, spans)
    assert (timeline.evidence, timeline.cut, timeline.segment) == ("measured", None, "here")
    program = get_system("dapple").program(THREE, (8, 8, 3))
    assert [list(of_rank) for of_rank in seen] == [
        list(stream) for rank in range(3) for stream in program.of_rank(rank)
    ]


def shifted(timeline: Timeline) -> Timeline:
    """As if the offsets of the clocks had not been applied."""
    begin = min(AHEAD) / 1e9
    return replace(
        timeline,
        ranks=tuple(
            tuple(
                item._replace(
                    start_seconds=item.start_seconds + AHEAD[rank] / 1e9 - begin,
                    end_seconds=item.end_seconds + AHEAD[rank] / 1e9 - begin,
                )
                for item in items
            )
            for rank, items in enumerate(timeline.ranks)
        ),
    )


MUTANTS: dict[str, Callable[[Timeline], Timeline]] = {
    "offsets not applied": shifted,
    "an action lost": lambda t: replace(t, ranks=(t.ranks[0], t.ranks[1][:-1], t.ranks[2])),
    "milliseconds": lambda t: replace(
        t,
        ranks=tuple(
            tuple(
                item._replace(start_seconds=item[1] * 1e3, end_seconds=item[2] * 1e3)
                for item in items
            )
            for items in t.ranks
        ),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_trace_is_noticed(run_of_three: Any, mutant: str) -> None:
    seen, spans, timeline = run_of_three
    assert faults(MUTANTS[mutant](timeline), seen, spans)


def test_clocks_are_shifted_to_one_that_begins_with_the_first_rank() -> None:
    first, second = parse("p0.s0.r0.F0@0"), parse("p0.s1.r0.F0@0")
    times = [
        RankTimes(1_000, ((first, 2_000, 3_000),), 9_000),
        RankTimes(500_500, ((second, 503_000, 503_500),), None),
    ]
    ranks, left_out_from = joined(times, [0, -500_000])
    assert ranks == (((first, 1.5e-6, 2.5e-6),), ((second, 2.5e-6, 3e-6),))
    assert left_out_from == 8.5e-6


def test_long_segments_are_cut_at_a_whole_batch(data: Path, run_of_three: Any) -> None:
    whole = sum(map(len, run_of_three[2].ranks))
    results = run_ranks(3, seen_and_timed, data, job_of(THREE, 1), whole - 1)
    timeline = results[0][2]
    assert timeline.batches.sizes == (8, 8)
    program = get_system("dapple").program(THREE, (8, 8))
    assert [[item.action for item in items] for items in timeline.ranks] == [
        list(stream) for rank in range(3) for stream in program.of_rank(rank)
    ]
    assert timeline.cut.batches == 3
    # A flush system begins no batch at a stage that has not done the last one.
    ends = [items[-1].end_seconds for items in timeline.ranks]
    assert min(ends) <= timeline.cut.seconds


@pytest.mark.parametrize(("most", "held"), [(0, 1), (9, 1), (10, 1), (19, 1), (20, 2), (99, 3)])
def test_at_least_one_batch_is_held(most: int, held: int) -> None:
    counts = [{0: 4, 1: 4, 2: 4}, {0: 6, 1: 6, 2: 6}]
    assert whole_batches(counts, 3, most) == held


def test_of_an_update_of_several_batches_nothing_is_held_before_the_last() -> None:
    """PipeDream's rounds: update 1 of two replicas takes batches 2 and 3."""
    plan = Plan.even(2, 1, (2,))
    texts = ["F0@0", "B0@0", "STEP0@1", "F2@1", "B2@1", "STEP1@2"]
    clocked = [Clocked(parse(f"p0.s0.r0.{text}"), n, n + 1) for n, text in enumerate(texts)]
    batches = Batches((4,) * 4, rounds=True)
    times = {n: rank_times(Trace(0, 9, clocked), plan, batches, n) for n in (1, 2, 3, 4)}
    held = [[str(action)[9:] for action, _, _ in times[n].actions] for n in times]
    assert held == [texts[:2], texts[:3], texts[:5], texts]
    assert [times[n].left_out_from for n in times] == [2, 3, 5, None]


def test_nothing_is_kept_that_nobody_reads(data: Path) -> None:
    """The times of ranks that take turns mean nothing, and a segment may have millions."""
    job = job_of(TWO, 1)
    engine = InProcess(job, job.tasks[0], build_stack(MODEL), feeds(job, data)[0])
    engine.train(Segment(0, (8, 8)))
    assert [worker.trace.clocked for worker in engine.workers] == [[], []]


def test_a_training_run_leaves_the_trace_of_its_first_segment(tmp_path: Path, data: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_ranks(2, train, run_dir, data, job_of(TWO, 3), 2) == ["killed"] * 2
    (timeline,) = read_trace(run_dir / "trace.json")
    told = (timeline.label, timeline.segment, timeline.first, timeline.batches.sizes)
    assert told == ("run", "updates 0 … 2", 0, (8, 8, 3))
    before = (run_dir / "trace.json").read_bytes()
    cut_back(run_dir)
    run_ranks(2, train, run_dir, data, job_of(TWO, 3))
    assert (run_dir / "trace.json").read_bytes() == before, "it goes on, and keeps its trace"


def train_while_the_disk_is_slow(
    rank: int, world_size: int, run_dir: Path, data: Path, job: Job
) -> list[bool]:
    """Whether the trace was there when a segment began."""
    there: list[bool] = []
    write, begin = training.write_trace, DistributedTeam.train

    def slow(*arguments: Any) -> None:
        time.sleep(0.3)
        write(*arguments)

    def noted(team: DistributedTeam, segment: Segment) -> Any:
        there.append((run_dir / "trace.json").exists())
        return begin(team, segment)

    training.write_trace = slow  # type: ignore[assignment]
    DistributedTeam.train = noted  # type: ignore[method-assign]
    train(rank, world_size, run_dir, data, job)
    return there


def test_nobody_waits_in_a_segment_for_the_trace_of_the_one_before(
    tmp_path: Path, data: Path
) -> None:
    job = job_of(TWO, 2, evaluate_every=9, checkpoint_every=9)
    run_dir = tmp_path / "run"
    assert run_ranks(2, train_while_the_disk_is_slow, run_dir, data, job) == [[False, True]] * 2


def test_a_run_that_starts_from_another_traces_its_own_first_segment(
    tmp_path: Path, data: Path
) -> None:
    train_in_process(tmp_path / "first", data, job_of(TWO, 1))
    assert not (tmp_path / "first" / "trace.json").exists(), "in one process there is no time"
    job = replace(job_of(TWO, 2), start_from=str(tmp_path / "first"))
    run_ranks(2, train, tmp_path / "run", data, job)
    (timeline,) = read_trace(tmp_path / "run" / "trace.json")
    assert (timeline.segment, timeline.first) == ("updates 3 … 5", 3)


def measure(rank: int, world_size: int, run_dir: Path, data: Path, most: int) -> None:
    benchmark.MOST_ACTIONS = most
    run_dir.mkdir(exist_ok=True)
    plan = Plan.even(4, 2, micro_batches=2)
    tasks = (
        Task("one", "gpipe", plan),
        Task("torch", "torch-gpipe", plan),
        Task("own-size", "dapple", plan, batch_size=4),
    )
    job = replace(job_of(plan, 4), tasks=tasks, bench=BenchSpec(2, 1, 1, bound=False))
    stack = build_stack(MODEL)
    feed = feeds(job, data)[0]
    small = feeds(replace(job, batch_size=4), data)[0]
    engines: list[Engine] = [
        DistributedEngine(job, tasks[0], stack, feed, rank),
        PipeliningEngine(job, tasks[1], stack, feed, rank),
        DistributedEngine(job, tasks[2], stack, small, rank),
    ]
    benchmark.run_benchmark(engines, job, run_dir, [], lambda _: None)


def test_a_benchmark_leaves_one_trace_of_its_last_round(tmp_path: Path, data: Path) -> None:
    """torch's systems do not tell when they do what.  All contenders share the limit, of which one
    batch each is more here."""
    for name in ("images", "labels"):  # Whole batches only.
        array = np.load(data / "train" / f"{name}.npy")
        np.save(data / "train" / f"{name}.npy", np.concatenate([array, array])[:32])
    run_dir = tmp_path / "bench"
    run_ranks(2, measure, run_dir, data, 3)
    one, other = read_trace(run_dir / "trace.json")
    assert [one.label, other.label] == ["one", "own-size"]
    assert (one.segment, one.first, one.batches.sizes) == ("round 1", 2, (8,))
    assert (other.segment, other.first, other.batches.sizes) == ("round 1", 4, (4,))
    assert one.cut is None
    assert other.cut is not None
    assert other.cut.batches == 2
    rounds = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    for timeline in (one, other):
        (last,) = (e for e in rounds if (e["task"], e["round"]) == (timeline.label, 1))
        # wall_s is each rank's own; the timeline begins with the first of them.
        walls = [sum(i.end_seconds - i.start_seconds for i in items) for items in timeline.ranks]
        assert max(walls) <= last["wall_s"]
