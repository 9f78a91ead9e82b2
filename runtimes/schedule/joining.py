"""When a rank's parallel pipelines average: the rule of worker, simulator, replay and validator."""

from __future__ import annotations

from runtimes.schedule.action import Action, Op
from runtimes.schedule.program import Program

__all__ = ["Joining"]


class Joining:
    """Which updates the pipelines of one rank have made.

    An AVERAGE of an update waits for the STEPs of it that the rank's streams have, one for each
    pipeline with a sample of that batch; if averaging is not joint, for none but its own, which
    comes before it anyway.
    """

    def __init__(self, program: Program, rank: int):
        self._program, (self._stage, _) = program, program.plan.place(rank)
        #: Of each pipeline the update that it made last.
        self._made = {stream.pipeline: -1 for stream in program.of_rank(rank)}

    def made(self, step: Action) -> None:
        """A STEP was performed; any other action is ignored."""
        if step.op == Op.STEP:
            self._made[step.pipeline] = step.unit

    def ready(self, average: Action) -> bool:
        if not self._program.joint_average:
            return True
        update = average.unit
        return all(
            last >= update or not self._program.steps(pipeline, self._stage, update)
            for pipeline, last in self._made.items()
        )
