"""When a rank's parallel pipelines average: the rule of worker, simulator, replay and validator."""

from __future__ import annotations

from runtimes.schedule.action import Action, Op
from runtimes.schedule.program import Program

__all__ = ["Joining"]


class Joining:
    """Which updates the pipelines of one rank have made.

    An AVERAGE of an update waits for the STEPs up to it that the rank's streams have: of the update
    itself each pipeline with a sample of that batch has one, the others their last before.  If
    averaging is not joint, it waits for none but its own stream's, which come before it anyway.
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
        return all(
            last >= self._last_due(pipeline, average.unit) for pipeline, last in self._made.items()
        )

    def _last_due(self, pipeline: int, update: int) -> int:
        """The last update that the pipeline makes up to this one; -1 for none."""
        while update >= 0 and not self._program.steps(pipeline, self._stage, update):
            update -= 1
        return update
