"""What a run takes of another one's state where parallel pipelines have copies: a pure function.

Copies go only to as many copies.  All else goes on from their reference, which is the model; its
optimizer then begins anew, since copies have states of their own, which are never averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtimes.job import Job, Task
from runtimes.systems import schedule_of

__all__ = ["copies_kept", "started", "unfit", "untied"]


def copies_kept(task: Task) -> int:
    """Copies that the task's checkpoints have beside a reference; 0 where there is none."""
    elastic = schedule_of(task.system, task.options).elastic(task.plan)
    return 0 if elastic is None else task.plan.pipelines


def unfit(task: Task, theirs: int, *, reference: bool) -> str | None:
    """Why the task cannot start from a state with so many copies; ``reference``: it is to start
    from their reference."""
    if reference and not theirs:
        return "has no reference beside its weights: leave start_from_reference out"
    if reference or theirs in (0, copies_kept(task)):
        return None
    ours = copies_kept(task)
    what = f"{task.system} has {ours}" if ours else f"{task.system} has none"
    return (
        f"has copies of {theirs} pipelines, but {what}: plan as many, or set start_from_reference "
        "to begin with its reference"
    )


def started(job: Job, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the job begins with of the checkpoint of the run that it starts from; ValueError if they
    do not fit."""
    reference = job.start_from_reference
    why = unfit(job.tasks[0], len(state.get("copies") or {}), reference=reference)
    if why is not None:
        raise ValueError(f"{job.start_from} {why}")
    return untied(state) if reference else state


def untied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Without the copies of parallel pipelines: only their reference."""
    return {kind: values for kind, values in state.items() if kind != "copies"}
