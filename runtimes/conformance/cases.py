"""Which systems are looked at on which plans, and what data they train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtimes.plan import Plan
from runtimes.system import System
from runtimes.systems import get_system

__all__ = ["CASES", "EPOCH", "EVALUATED", "EVALUATION_BATCH", "SEGMENTS", "Case"]

#: Samples of each batch of an epoch; the last has fewer than some stages have replicas, and is
#: in one round of PipeDream's with others.
EPOCH = (8, 8, 8, 8, 8, 8, 8, 3)
#: From one drain to the next, each followed by an evaluation.
SEGMENTS = 2
#: Samples that are evaluated after each segment, in units of EVALUATION_BATCH: the last is smaller.
EVALUATED, EVALUATION_BATCH = 13, 5


@dataclass(frozen=True)
class Case:
    """A system with its options on a plan, which is cut for the model at hand.

    ``overlap``: backwards are cut into parts, so that reductions overlap them.  ``epochs``: between
    two evaluations.
    """

    system: str
    replicas: tuple[int, ...]
    micro_batches: int = 1
    recompute: bool = False
    overlap: bool = False
    epochs: int = 1
    pipelines: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return len(self.replicas)

    @property
    def batches(self) -> tuple[int, ...]:
        """Samples of each batch between two evaluations."""
        return EPOCH * self.epochs

    @property
    def probes(self) -> int:
        """So many that with the readout every stage has two layers, a single one four."""
        return max(4, 2 * self.stages) - 1

    def build(self) -> System:
        return get_system(self.system, self.options)

    def plan(self, layers: int) -> Plan:
        return Plan.even(
            layers,
            self.stages,
            self.replicas,
            micro_batches=self.micro_batches,
            recompute=self.recompute,
            cuts=range(1, layers, 2) if self.overlap else (),
            pipelines=self.pipelines,
        )

    @property
    def title(self) -> str:
        """Of the plan and the options: what tells a system's cases apart."""
        straight = max(self.replicas) == 1
        words = [f"S = {self.stages}" if straight else f"R = {', '.join(map(str, self.replicas))}"]
        words += [f"N = {self.pipelines}"] * (self.pipelines > 1)
        words += [f"M = {self.micro_batches}"] * (self.micro_batches > 1)
        for name, value in self.options.items():
            words.append(f"{name} = {str(value).lower() if isinstance(value, bool) else value}")
        return "; ".join(words + ["recomputation"] * self.recompute)


STRAIGHT = (1, 1, 1, 1)

CASES = (
    Case("dp", (4,), overlap=True),
    Case("dp", (3,), options={"overlap": False}),
    Case("gpipe", STRAIGHT, 4),
    Case("gpipe", (2, 3), 3, recompute=True),
    Case("dapple", STRAIGHT, 6),
    Case("dapple", STRAIGHT, 8, options={"policy": "B"}),
    Case("dapple", (3, 1, 2), 4, recompute=True),
    Case("pipedream", STRAIGHT),
    Case("pipedream", STRAIGHT, recompute=True, options={"vertical_sync": True}),
    Case("pipedream", (2, 1)),
    Case("pipedream", (3, 1), recompute=True),
    Case("pipedream", STRAIGHT, options={"drain": "run"}, epochs=2),
    Case("pipedream_2bw", STRAIGHT, 4),
    Case("pipedream_2bw", (2, 2), 3, recompute=True),
    Case("avgpipe", STRAIGHT, 4, pipelines=2),
    Case("avgpipe", STRAIGHT, 2, pipelines=3, options={"averaging": "asynchronous"}),
    Case("avgpipe", STRAIGHT, 4, pipelines=2, recompute=True, options={"advance": 1}),
    Case("avgpipe", (2, 1), 2, pipelines=2, options={"form": "symmetric", "every": 3}),
    Case("ashpipe", STRAIGHT),
    Case("ashpipe", STRAIGHT, recompute=True, options={"order": "published"}),
    Case("ashpipe", (2, 3), overlap=True),
    Case("ashpipe", (4, 3, 1)),
    Case("ashpipe", STRAIGHT, options={"drain": "run"}, epochs=2),
)
