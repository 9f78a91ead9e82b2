"""A plan: which layers run where, and how a batch is cut.  Plain data, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

__all__ = ["Plan", "StagePlan", "share", "split"]


def split(samples: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut ``samples`` into contiguous half-open intervals, part i holding (samples + i) // parts.

    The rule of the published AshPipe code, used at every level (batch into units, unit into
    replicas), so any two ranks agree on who holds which sample.  Intervals may be empty.
    """
    if samples < 0 or parts < 1:
        raise ValueError(f"cannot split {samples} samples into {parts} parts")
    bounds = [0]
    for i in range(parts):
        bounds.append(bounds[-1] + (samples + i) // parts)
    return tuple(pairwise(bounds))


def share(samples: int, parts: int, index: int) -> tuple[int, int]:
    """The interval of part ``index`` of :func:`split`."""
    return split(samples, parts)[index]


@dataclass(frozen=True)
class StagePlan:
    """One stage: layers [first, last) held by ``ranks``, one replica each, in replica order.

    ``cuts`` are global layer indices strictly inside (first, last) at which the backward is cut
    into ``len(cuts) + 1`` parts, so that the gradients of one part are reduced while the next
    part is computed.  Parts count in the order of the backward: part 0 holds the last layers.
    """

    first: int
    last: int
    ranks: tuple[int, ...]
    recompute: bool = False
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ValueError(f"a stage needs at least one layer, not [{self.first}, {self.last})")
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a stage needs one or more distinct ranks, not {self.ranks}")
        inside = all(self.first < cut < self.last for cut in self.cuts)
        if not inside or list(self.cuts) != sorted(set(self.cuts)):
            raise ValueError(
                f"backward cuts {self.cuts} must rise strictly inside ({self.first}, {self.last})"
            )

    @property
    def replicas(self) -> int:
        return len(self.ranks)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Layer ranges of the backward's parts, in the order of the backward."""
        bounds = (self.first, *self.cuts, self.last)
        return tuple(pairwise(bounds))[::-1]


@dataclass(frozen=True)
class Plan:
    """Stages in order; ``micro_batches`` units a batch (1: the unit is the mini-batch), or, with
    several parallel ``pipelines``, of the share that each of them has of a batch."""

    stages: tuple[StagePlan, ...]
    micro_batches: int = 1
    pipelines: int = 1

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a plan needs at least one stage")
        if self.micro_batches < 1 or self.pipelines < 1:
            raise ValueError(
                f"micro-batches ({self.micro_batches}) and pipelines ({self.pipelines}) "
                "must be at least 1"
            )
        expected = 0
        for number, stage in enumerate(self.stages):
            if stage.first != expected:
                raise ValueError(
                    f"stage {number} begins at layer {stage.first}, but layer {expected} is next"
                )
            expected = stage.last
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        if sorted(ranks) != list(range(len(ranks))):
            raise ValueError(f"ranks {ranks} must be 0 … {len(ranks) - 1}, each exactly once")

    @property
    def layers(self) -> int:
        return self.stages[-1].last

    @property
    def world_size(self) -> int:
        return sum(stage.replicas for stage in self.stages)

    def rank(self, stage: int, replica: int) -> int:
        return self.stages[stage].ranks[replica]

    def place(self, rank: int) -> tuple[int, int]:
        """(stage, replica) of a rank."""
        for number, stage in enumerate(self.stages):
            if rank in stage.ranks:
                return number, stage.ranks.index(rank)
        raise ValueError(f"rank {rank} has no stage: the plan has ranks 0 … {self.world_size - 1}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Plan:
        stages = tuple(
            StagePlan(
                first=stage["first"],
                last=stage["last"],
                ranks=tuple(stage["ranks"]),
                recompute=stage.get("recompute", False),
                cuts=tuple(stage.get("cuts", ())),
            )
            for stage in document["stages"]
        )
        return cls(stages, document.get("micro_batches", 1), document.get("pipelines", 1))

    @classmethod
    def contiguous(
        cls,
        sizes: Sequence[int],
        replicas: Sequence[int] | None = None,
        *,
        micro_batches: int = 1,
        pipelines: int = 1,
        recompute: bool | Sequence[bool] = False,
        cuts: Sequence[int] = (),
    ) -> Plan:
        """A plan from the number of layers of each stage; ranks are dealt out in stage order.
        ``recompute``: of all stages, or of each."""
        counts = replicas or [1] * len(sizes)
        if len(counts) != len(sizes):
            raise ValueError(f"{len(sizes)} stages need as many replica counts, not {len(counts)}")
        again = [recompute] * len(sizes) if isinstance(recompute, bool) else recompute
        stages, first, rank = [], 0, 0
        for size, count, recomputes in zip(sizes, counts, again, strict=True):
            inside = tuple(cut for cut in cuts if first < cut < first + size)
            ranks = tuple(range(rank, rank + count))
            stages.append(StagePlan(first, first + size, ranks, recomputes, inside))
            first, rank = first + size, rank + count
        return cls(tuple(stages), micro_batches, pipelines)

    @classmethod
    def even(
        cls,
        layers: int,
        stages: int,
        replicas: Sequence[int] | None = None,
        *,
        micro_batches: int = 1,
        pipelines: int = 1,
        recompute: bool | Sequence[bool] = False,
        cuts: Sequence[int] = (),
    ) -> Plan:
        """Stages of as equal a number of layers as can be."""
        if not 1 <= stages <= layers:
            raise ValueError(
                f"{stages} stages asked for, but the model has {layers} layers: "
                f"use 1 … {layers} stages"
            )
        sizes = [high - low for low, high in split(layers, stages)]
        return cls.contiguous(
            sizes,
            replicas,
            micro_batches=micro_batches,
            pipelines=pipelines,
            recompute=recompute,
            cuts=cuts,
        )
