"""One timeline from the clocks of all ranks, gathered when nothing is timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.engine import Engine
from runtimes.execution.trace import Trace
from runtimes.plan import Plan
from runtimes.schedule.action import Action
from runtimes.schedule.batches import Batches
from runtimes.timeline import Cut, Span, Timeline, batch_of

__all__ = ["MOST_ACTIONS", "RankTimes", "collect", "joined", "rank_times", "whole_batches"]

#: Of all ranks together, in the trace of a run: about 4 MB, written in less than a second.
MOST_ACTIONS = 20_000


@dataclass(frozen=True)
class RankTimes:
    """Nanoseconds on one rank's own clock: when its segment began, its actions, and when it began
    with the first of those that are left out (None if none are)."""

    begin: int
    actions: tuple[tuple[Action, int, int], ...]
    left_out_from: int | None


def collect(
    engine: Engine, label: str, *, first: int, words: str, most_actions: int = MOST_ACTIONS
) -> Timeline | None:
    """What all ranks did in the segment that they have trained last, which ``words`` name; its
    first update is ``first``.

    A collective of all ranks.  Only rank 0 gets the timeline; nobody does of the peers' engines,
    which do not tell.  Of more than ``most_actions`` the first batches are kept, at least one.
    """
    if not isinstance(engine, DistributedEngine):
        return None
    plan, batches, trace = engine.plan, engine.worker.program.batches, engine.worker.trace
    counts: list[Mapping[int, int]] = [{}] * plan.world_size
    dist.all_gather_object(counts, _counts(trace, plan, batches))
    held = whole_batches(counts, len(batches.sizes), most_actions)
    shares: list[RankTimes | None] = [None] * plan.world_size
    dist.all_gather_object(shares, rank_times(trace, plan, batches, held))
    if dist.get_rank() != 0:
        return None
    times = [share for share in shares if share is not None]
    kept = Batches(batches.sizes[:held], batches.micro_batches, batches.pipelines, batches.rounds)
    ranks, left_out_from = joined(times, engine.offsets)
    cut = None if left_out_from is None else Cut(len(batches.sizes), left_out_from)
    return Timeline(label, engine.worker.job.evidence, plan, kept, ranks, words, first, cut)


def _batch(action: Action, plan: Plan, batches: Batches) -> int:
    return batch_of(action, batches, plan.stages[action.stage].replicas)


def _counts(trace: Trace, plan: Plan, batches: Batches) -> Mapping[int, int]:
    """Actions of each batch on this rank."""
    return Counter(_batch(item.action, plan, batches) for item in trace.clocked)


def whole_batches(counts: Sequence[Mapping[int, int]], batches: int, most_actions: int) -> int:
    """How many of the first batches have at most so many actions on all ranks together, or 1."""
    total = 0
    for batch in range(batches):
        total += sum(of_rank.get(batch, 0) for of_rank in counts)
        if total > most_actions:
            return max(1, batch)
    return batches


def rank_times(trace: Trace, plan: Plan, batches: Batches, held: int) -> RankTimes:
    """This rank's times of the first ``held`` batches."""
    of_batch = [_batch(item.action, plan, batches) for item in trace.clocked]
    chosen = [
        (item.action, item.start, item.end)
        for item, batch in zip(trace.clocked, of_batch, strict=True)
        if batch < held
    ]
    later = (
        item.start for item, batch in zip(trace.clocked, of_batch, strict=True) if batch >= held
    )
    return RankTimes(trace.start, tuple(chosen), next(later, None))


def joined(
    times: Sequence[RankTimes], clock_offsets: Sequence[int]
) -> tuple[tuple[tuple[Span, ...], ...], float | None]:
    """All ranks' actions on one clock, which begins with the first rank that did; and when the
    first action that is left out began.

    ``clock_offsets[r]``: nanoseconds to add to rank r's clock to read ours.
    """
    pairs = list(zip(times, clock_offsets, strict=True))
    zero = min(rank.begin + offset for rank, offset in pairs)

    def seconds(time: int, offset: int) -> float:
        return (time + offset - zero) / 1e9

    ranks = tuple(
        tuple(
            Span(action, seconds(start, offset), seconds(end, offset))
            for action, start, end in rank.actions
        )
        for rank, offset in pairs
    )
    left_out = [
        seconds(rank.left_out_from, offset)
        for rank, offset in pairs
        if rank.left_out_from is not None
    ]
    return ranks, min(left_out, default=None)
