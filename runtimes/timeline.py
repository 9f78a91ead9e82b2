"""What the ranks of a plan did and when: measured, emulated or simulated.  Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from runtimes.plan import Plan
from runtimes.schedule.action import COMPUTE, Action, Op
from runtimes.schedule.batches import Batches

__all__ = ["BUSY", "Cut", "Evidence", "Span", "Timeline", "batch_of", "nanoseconds"]

#: Class of evidence of the times.
Evidence = Literal["measured", "emulated", "simulated"]

#: What a rank is there for.  The rest of its time it sends, waits for a message, or does nothing.
BUSY = COMPUTE | {Op.REDUCE, Op.NORM, Op.STEP, Op.AVERAGE}


class Span(NamedTuple):
    """One action; seconds from the begin of the segment on, on the clock that all ranks share."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Cut:
    """Only the first batches of a segment are held, which has ``batches``.

    Up to ``seconds`` all that its ranks did is there; then one of them began with a batch that is
    not held, while others may still have worked on those that are.
    """

    batches: int
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """What the ranks of ``plan`` did in one segment, or in its first batches.

    ``ranks[r]`` are the actions of rank r, one after the other.  ``batches``: those that are held;
    batch 0 is update ``first`` of the run.  ``segment`` says in words which one it is, e.g.
    "round 8"; ``cut`` is None if it is all there.

    Raises ValueError for actions of another rank, or that overlap by a nanosecond or more.
    """

    label: str
    evidence: Evidence
    plan: Plan
    batches: Batches
    ranks: tuple[tuple[Span, ...], ...]
    segment: str
    first: int = 0
    cut: Cut | None = None

    def __post_init__(self) -> None:
        if self.evidence not in get_args(Evidence):
            known = ", ".join(get_args(Evidence))
            raise ValueError(f"{self.label}: evidence is {self.evidence!r}, but is one of {known}")
        if len(self.ranks) != self.plan.world_size:
            raise ValueError(
                f"{self.label}: times of {len(self.ranks)} ranks, but its plan has "
                f"{self.plan.world_size}"
            )
        for rank, items in enumerate(self.ranks):
            self._check(rank, items)

    def _check(self, rank: int, items: Sequence[Span]) -> None:
        before = 0
        for action, start, end in items:
            if self.plan.rank(action.stage, action.replica) != rank:
                raise ValueError(f"{self.label}: {action} is not an action of rank {rank}")
            if not before <= nanoseconds(start) <= nanoseconds(end):
                raise ValueError(
                    f"{self.label}: rank {rank} is in {action} from {start} s to {end} s, but must "
                    f"begin at {before / 1e9} s or later, when it has ended what was before"
                )
            before = nanoseconds(end)

    @property
    def makespan_seconds(self) -> float:
        """From the begin of the segment to the end of the last action that is held."""
        return max((items[-1].end_seconds for items in self.ranks if items), default=0.0)

    def idle_shares(self) -> list[float]:
        """Of each rank, the share of the time in which it neither computed, reduced, stepped nor
        averaged.

        Counted up to the cut, where there is one: what ranks did after it is not all known.
        """
        until = self.makespan_seconds if self.cut is None else self.cut.seconds
        busy = [
            sum(
                max(0.0, min(end, until) - start)
                for action, start, end in items
                if action.op in BUSY
            )
            for items in self.ranks
        ]
        return [1 - seconds / until if until else 0.0 for seconds in busy]


def nanoseconds(seconds: float) -> int:
    """As fine as times are told apart."""
    return round(seconds * 1e9)


def batch_of(action: Action, batches: Batches, replicas: int) -> int:
    """The batch that an action of a stage of so many replicas belongs to, counted in the segment;
    of an update that takes several, the last."""
    if action.op not in (Op.REDUCE, Op.NORM, Op.STEP, Op.AVERAGE):
        return batches.batch(action.unit)
    if not batches.rounds:
        return action.unit
    return min((action.unit + 1) * replicas, len(batches.sizes)) - 1
