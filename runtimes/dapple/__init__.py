"""DAPPLE (Fan et al. 2021), also known as 1F1B with flush: early backwards bound the memory.

            F0 F1 .. .. B0 B0 F2 B1 B1 …     stage s runs K_s forwards, then one backward, one
            .. F0 B0 B0 F1 B1 B1 F2 …        forward in turn; at most K_s units are in flight.

Policy A: K_s = min(S − s, M).  Policy B: K_s = min(2(S − s) − 1, M), for dear communication.
The bubble is GPipe's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtimes.schedule import warm_up
from runtimes.system import FlushSystem

__all__ = ["Dapple"]


@dataclass(frozen=True)
class Dapple(FlushSystem):
    policy: Literal["A", "B"] = "A"

    name = "dapple"
    summary = "one forward, one backward (1F1B), one step a batch"
    paper = "DAPPLE, PPoPP'21"

    def warm_up(self, stage: int, stages: int, units: int) -> int:
        advance = stages - stage - 1 if self.policy == "B" else 0
        return warm_up(stage, stages, units, advance=advance)
