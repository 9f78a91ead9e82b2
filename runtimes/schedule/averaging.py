"""Rule 13 of the validator: after which updates, and where in their streams, pipelines average."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtimes.schedule.action import Action, Op
from runtimes.schedule.cursor import Cursor
from runtimes.schedule.joining import Joining
from runtimes.schedule.program import Program
from runtimes.schedule.rules import ScheduleError

__all__ = ["Averaging"]

#: Makes the error of a rule broken by a stream's action.
Fail = Callable[[int, Cursor, Action, str], ScheduleError]


class Averaging:
    """``averages(t)``: whether the system does after update t of the run; None: it is not known,
    and all that is asked is that the pipelines and replicas of a stage agree."""

    def __init__(self, program: Program, averages: Callable[[int], bool] | None, fail: Fail):
        self._program, self._averages, self._fail = program, averages, fail
        self._joining = [Joining(program, rank) for rank in range(program.plan.world_size)]

    def _overdue(self, cursor: Cursor, update: int) -> int | None:
        """The first update below this one after which the stream should have averaged."""
        if self._averages is None:
            return None
        last = cursor.averaged[-1] if cursor.averaged else -1
        between = range(max(last + 1, cursor.on_time), update)
        cursor.on_time = max(cursor.on_time, update)
        return next((u for u in between if self._averages(self._program.phase + u)), None)

    def forward(self, cursor: Cursor, action: Action, update: int) -> None:
        """A forward for this update is next."""
        if (late := self._overdue(cursor, update)) is not None:
            raise self._fail(13, cursor, action, f"update {late} is to be averaged before it")
        cursor.begun = max(cursor.begun, update)

    def stepped(self, cursor: Cursor, action: Action) -> None:
        self._joining[cursor.stream.rank].made(action)

    def average(self, cursor: Cursor, action: Action) -> bool:
        """Whether it may go on; False: other pipelines have to make their steps first."""
        update, latest = action.unit, self._program.carried + cursor.steps
        if self._averages is not None and not self._averages(self._program.phase + update):
            raise self._fail(13, cursor, action, "the system does not average after this update")
        if cursor.averaged and update <= cursor.averaged[-1]:
            raise self._fail(
                13, cursor, action, f"update {cursor.averaged[-1]} was averaged before"
            )
        if cursor.update <= update:
            raise self._fail(13, cursor, action, f"update {cursor.update} is not stepped yet")
        if cursor.begun > update:
            raise self._fail(13, cursor, action, f"a forward of update {cursor.begun} came before")
        if (late := self._overdue(cursor, update)) is not None:
            raise self._fail(13, cursor, action, f"update {late} is to be averaged before it")
        if action.version != latest:
            raise self._fail(13, cursor, action, f"the latest weights are @{latest}")
        if not self._joining[cursor.stream.rank].ready(action):
            return False
        cursor.averaged.append(update)
        return True

    def nothing_left(self, cursors: Sequence[Cursor]) -> None:
        """No averaging is missing at the end, or at one of a stage's streams."""
        for cursor in cursors:
            stage, replica = self._program.plan.place(cursor.stream.rank)
            missing = self._overdue(cursor, self._program.updates(stage))
            what = "the stream ends without this averaging"
            if missing is None:
                alike = (c for c in cursors if self._program.plan.place(c.stream.rank)[0] == stage)
                others = set[int]().union(*(c.averaged for c in alike))
                missing = min(others - set(cursor.averaged), default=None)
                what = "the stage's other streams average after this update"
            if missing is not None:
                place = cursor.stream.pipeline, stage, replica
                raise self._fail(13, cursor, Action(*place, Op.AVERAGE, missing), what)
