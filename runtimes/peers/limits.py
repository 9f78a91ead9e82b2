"""What the peers cannot run, as far as plain data tells it."""

from __future__ import annotations

from runtimes.job import BatchNorm, Task
from runtimes.plan import Plan

__all__ = ["check_peer", "equal_micro_batches"]


def equal_micro_batches(samples: int, micro_batches: int) -> int:
    """The largest number up to ``micro_batches`` that cuts ``samples`` into equal parts."""
    return max(m for m in range(1, min(samples, micro_batches) + 1) if samples % m == 0)


def check_peer(task: Task, batch_size: int, batch_norm: BatchNorm | None = None) -> None:
    """ValueError, naming value, limit and way out, if the peer ``task.system`` cannot run it, on a
    model with that ``batch_norm``."""
    allowed = {"bucket_mb"} if task.system == "torch-ddp" else set()
    if unknown := sorted(set(task.options) - allowed):
        raise ValueError(f"{task.system} has no option {', '.join(map(repr, unknown))}")
    if batch_norm is not None:
        raise ValueError(
            f"{task.system} has rules of its own for BatchNorm's running statistics, but "
            f'model.batch_norm is "{batch_norm}": leave it out, or use a model without BatchNorm'
        )
    plan = task.plan
    if plan.pipelines != 1:
        raise ValueError(f"{task.system} has one pipeline, not {plan.pipelines}")
    if any(stage.recompute for stage in plan.stages):
        raise ValueError(f"{task.system} does not recompute: set recompute = false in its plan")
    if any(stage.cuts for stage in plan.stages):
        raise ValueError(
            f"{task.system} decides itself what it reduces together: leave out its plan's cuts"
        )
    if task.system == "torch-ddp":
        _check_ddp(plan)
    elif task.system in ("torch-gpipe", "torch-1f1b"):
        _check_pipelining(task.system, plan, batch_size)
    else:
        raise ValueError(
            f"unknown peer {task.system!r}: known are torch-ddp, torch-gpipe and torch-1f1b"
        )


def _check_ddp(plan: Plan) -> None:
    if len(plan.stages) != 1:
        raise ValueError(
            f"torch-ddp copies the whole model: it takes 1 stage, not {len(plan.stages)}"
        )
    if plan.micro_batches != 1:
        raise ValueError(
            f"torch-ddp takes its share of a batch at once: set micro_batches = 1, "
            f"not {plan.micro_batches}"
        )


def _check_pipelining(system: str, plan: Plan, batch_size: int) -> None:
    stages, units = len(plan.stages), plan.micro_batches
    for number, stage in enumerate(plan.stages):
        if stage.ranks != (number,):
            raise ValueError(
                f"{system} runs stage s on rank s alone, but stage {number} is on ranks "
                f"{', '.join(map(str, stage.ranks))}: use one replica a stage, in order"
            )
    if batch_size % units:
        raise ValueError(
            f"{system} needs equal micro-batches, but {units} do not divide the batch of "
            f"{batch_size}: use a divisor, e.g. {equal_micro_batches(batch_size, units)}"
        )
    if system == "torch-1f1b" and units < stages:
        raise ValueError(
            f"torch-1f1b needs at least as many micro-batches as stages, but has {units} for "
            f"{stages}: use more micro-batches, fewer stages, or torch-gpipe"
        )
