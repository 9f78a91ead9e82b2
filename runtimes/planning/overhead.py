"""What the runtime itself takes for an action: tiny models, trained by the real worker.

Layers of a few numbers compute next to nothing, and what they do compute is taken off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from runtimes.conformance.feed import MemoryFeed
from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.execution.trace import Clocked
from runtimes.job import DataSpec, Job, ModelSpec, OptimizerSpec, Precision, Task
from runtimes.model.stack import LayerStack
from runtimes.plan import Plan
from runtimes.planning.excerpt import Excerpt
from runtimes.schedule.action import SENDS, Action, Op

__all__ = ["action_seconds", "transport_seconds"]

_WIDTH, _MICRO_BATCHES, _BATCHES = 2, 8, 4
_PLAIN, _CLIPPED = OptimizerSpec(), OptimizerSpec(clip=1.0)
_Note = Callable[[Action], None]


def action_seconds(
    device: str, precision: Precision, *, repeats: int, before: _Note | None = None
) -> dict[str, float]:
    """By op: seconds from the end of the action before to its own end, less those of the layers.

    All ranks are in this process, so that nobody waits: a send or a receive costs what the worker
    does for it.  A step's is that of an optimizer for next to no weights.  ``before``: called with
    every action, as a run does to note it.
    """
    plan = Plan.even(2, 2, micro_batches=_MICRO_BATCHES)
    plain = _samples(plan, device, precision, repeats, before, _PLAIN)
    plan = Plan.even(2, 2, (2, 2), micro_batches=_MICRO_BATCHES, recompute=True)
    more = _samples(plan, device, precision, repeats, before, _CLIPPED)
    # Of the plain plan where it has the op: replicas share units, and clipping is a part of steps.
    return {op.value: max(0.0, median(seconds)) for op, seconds in (more | plain).items()}


def transport_seconds(
    device: str, precision: Precision, *, repeats: int, before: _Note | None = None
) -> dict[str, float]:
    """As :func:`action_seconds`, of what hands data to torch.distributed, over all its ranks: each
    a stage, and then each a replica.  Every rank has to call it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[Op, list[float]] = defaultdict(list)
    for plan, system in (
        (Plan.even(world, world, micro_batches=_MICRO_BATCHES), "dapple"),
        (Plan.even(world, 1, (world,)), "dp"),
    ):
        job, stack, feed = _tiny(plan, system, device, precision, _PLAIN)
        engine = DistributedEngine(job, job.tasks[0], stack, feed, rank, before=before)
        for number in range(repeats + 1):
            engine.train(Segment(0, feed.sizes))
            if number:  # The first finds nothing made yet.
                for action, seconds in _gaps(engine.worker.trace.clocked):
                    if action.op in SENDS or action.op == Op.REDUCE:
                        found[action.op].append(seconds)
        engine.close()
    gathered: list[dict[Op, list[float]]] = [{}] * world
    dist.all_gather_object(gathered, dict(found))
    return {
        op.value: median([s for share in gathered for s in share.get(op, ())])
        for op in (*SENDS, Op.REDUCE)
    }


def _tiny(
    plan: Plan,
    system: str,
    device: str,
    precision: Precision,
    optimizer: OptimizerSpec,
) -> tuple[Job, LayerStack, MemoryFeed]:
    stack = LayerStack.from_module(
        nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(plan.layers)))
    )
    size = _MICRO_BATCHES * max(stage.replicas for stage in plan.stages)
    count = size * _BATCHES
    dtype = torch.float64 if precision == "float64" else torch.float32
    feed = MemoryFeed(
        torch.ones(count, _WIDTH, dtype=dtype, device=device),
        torch.zeros(count, dtype=torch.int64, device=device),
        (size,) * _BATCHES,
    )
    job = Job(
        tasks=(Task(system, system, plan),),
        model=ModelSpec("tiny"),
        data=DataSpec("", ""),
        batch_size=size,
        epochs=1,
        optimizer=optimizer,
        precision=precision,
        device=device,
    )
    return job, stack, feed


def _samples(
    plan: Plan,
    device: str,
    precision: Precision,
    repeats: int,
    before: _Note | None,
    optimizer: OptimizerSpec,
) -> dict[Op, list[float]]:
    job, stack, feed = _tiny(plan, "dapple", device, precision, optimizer)
    engine = InProcess(job, job.tasks[0], stack, feed, before=before, timed=True)
    layers = _layer_seconds(stack, device, precision, repeats)
    found: dict[Op, list[float]] = defaultdict(list)
    for number in range(repeats + 1):
        engine.train(Segment(0, feed.sizes))
        if number:
            clocked = [item for worker in engine.workers for item in worker.trace.clocked]
            # One process: an action begins when any other ends.
            for action, seconds in _gaps(sorted(clocked, key=lambda item: item.end)):
                found[action.op].append(seconds - layers.get((action.op, action.stage), 0.0))
    return dict(found)


def _gaps(clocked: Iterable[Clocked]) -> list[tuple[Action, float]]:
    return [(item.action, (item.end - earlier.end) / 1e9) for earlier, item in pairwise(clocked)]


def _layer_seconds(
    stack: LayerStack, device: str, precision: Precision, repeats: int
) -> dict[tuple[Op, int], float]:
    """By op and stage of one layer, for a unit of one sample."""
    shapes = [(_WIDTH,)] * (len(stack) + 1)
    excerpt = Excerpt(stack, shapes, range(len(stack)), precision=precision, device=device)
    inputs = excerpt.inputs(1)
    units = [excerpt.unit(inputs) for _ in range(_MICRO_BATCHES * (repeats + 1))][_MICRO_BATCHES:]
    found: dict[tuple[Op, int], float] = {}
    for stage in range(len(stack)):
        forward = median(unit.forward[stage] for unit in units)
        found |= {(Op.F, stage): forward, (Op.R, stage): forward}
        found[Op.B, stage] = median(unit.backward[stage] for unit in units)
    return found
