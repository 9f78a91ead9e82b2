"""GPipe (Huang et al. 2019): all forwards of a batch, then all its backwards, then the step.

            F0 F1 F2 F3 .. .. .. .. B0 B0 B1 B1 …      every stage holds all M units at the turn;
            .. F0 F1 F2 F3 .. .. B0 B0 B1 B1 …         bubble (S−1)/(M+S−1) at equal stages.

Its paper recomputes activations; here that is the plan's choice, stage by stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtimes.system import FlushSystem

__all__ = ["GPipe"]


@dataclass(frozen=True)
class GPipe(FlushSystem):
    name = "gpipe"
    summary = "all forwards, then all backwards, then one step a batch"
    paper = "GPipe, NeurIPS'19"

    def warm_up(self, stage: int, stages: int, units: int) -> int:
        return units
