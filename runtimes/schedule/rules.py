"""The numbered rules that every program keeps, and the error that names a breach.

 1  an action belongs to its stream's rank and pipeline, and its unit exists and is not empty
 2  F before B, each exactly once; parts of a backward in order; R exactly once where asked for
 3  every send has its receive, of the same samples and so of equally many bytes
 4  the messages of a channel are received in the order in which they are sent
 5  a computation has received all it needs; a message is sent after the computation it carries
 6  no deadlock: explicit edges, messages and streams are acyclic
 7  a backward (and a recomputation) uses the weight version of its forward
 8  a forward's version exists when it runs, and its delay is the one the system declares
 9  units in flight stay within the bound the system declares
10  each update sees every sample of its batch exactly once before its step
11  replicas reduce every part of an update, in the same order, between backward and step
12  a norm is taken by all ranks of an update or by none, between its reductions and its step
13  pipelines average after the updates the system says, all of a stage after the same ones, each
    between its step and its next forward; a pipeline without that step when it would be next
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtimes.schedule.action import Action

__all__ = ["RULES", "Declared", "ScheduleError"]

RULES = {
    1: "actions belong to their stream and concern units that exist",
    2: "F before B, each exactly once",
    3: "every send has its receive, with equally many bytes",
    4: "messages of a channel are received in the order they are sent",
    5: "computations have what they need",
    6: "no deadlock",
    7: "version of B = version of F",
    8: "gradient delay as declared",
    9: "units in flight within the declared bound",
    10: "each update sees each sample of its batch exactly once",
    11: "replicas reduce before they step, in the same order",
    12: "a global norm is every rank's, between reduce and step",
    13: "pipelines average after the same updates, between step and next forward",
}


class ScheduleError(ValueError):
    """A program breaks ``rule`` at ``action`` of ``rank``; the text shows the grid around it."""

    def __init__(self, rule: int, rank: int, action: Action, what: str, grid: str = ""):
        self.rule, self.rank, self.action = rule, rank, action
        text = f"rule {rule} ({RULES[rule]}): rank {rank}, {action}: {what}"
        super().__init__(f"{text}\n{grid}" if grid else text)


@dataclass(frozen=True)
class Declared:
    """What a system promises of its programs, by stage (and update).

    ``delay``: updates that a stage makes between reading its weights for a gradient and using it.
    ``in_flight``: units of one pipeline.  ``averages(t)``: whether pipelines average after update t
    of the run.
    """

    delay: Callable[[int, int], int]
    in_flight: Callable[[int], int]
    averages: Callable[[int], bool] = lambda update: False
