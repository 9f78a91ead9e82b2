"""The memory model: bytes that each rank of a plan will hold at most, by kind.

For a rank whose stage has P bytes of trained weights and C of others, V live versions, activations
A(n) of a unit of n samples, and x and y bytes a sample at its two ends, at every moment between two
actions

    weights      (N · V + r) · P + C         N copies of a stage, one a pipeline, each with running
                                             statistics of its own; r = 1 if there is a reference
    gradients    g · P                       g sets: the update's, with NORM also the one before
    optimizer    o · N · P                   o = 0 SGD, 1 with momentum, 2 AdamW (and its counters)
    activations  Σ_u A(n_u)                  over units between F (or R) and the end of their B
                 + x · Σ_u n_u               over units between F and R, with recomputation
    messages     x · (posted + received activations + gradients to be sent or under way)
                 + y · (posted + received gradients + outputs that only messages hold)

What is in flight when comes from the program itself (``runtimes.planning.census``).  Where the sum
is largest follows for units of n samples, K of them in flight, without recomputation and messages:

    gpipe, dapple with M = K      max(K · A, (K − 1) · A + P): before or after the first backward
    dapple with M > K, 2bw        K · A + P: gradients accumulate while all K are in flight
    2bw with NORM, M > K          K · A + 2P: a batch's set waits for its norm, the next one grows
    dp, pipedream, ashpipe        max(K · A, (K − 1) · A + P): every backward is followed by a step

Of N parallel pipelines each has its own K units in flight and its own set of gradients.  In one
process it is known which of a rank's streams goes on when; over torch.distributed it depends on
times, so all of them are taken to be at their peaks at once, which no order exceeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtimes.execution.accounting import Peak
from runtimes.job import Job, Task
from runtimes.plan import Plan, StagePlan
from runtimes.planning.census import Holding, census
from runtimes.planning.footprint import Footprint
from runtimes.system import System
from runtimes.systems import schedule_of

__all__ = ["Sets", "bytes_held", "memory_peaks", "sets_of"]

#: torch counts an AdamW parameter's steps in a float32 tensor.
_STEPS_BYTES = 4
#: What is counted of a rank, not of a stream.
_SHARED = frozenset({"weights", "optimizer"})


def memory_peaks(
    job: Job, task: Task, footprint: Footprint, batches: Sequence[int] | None = None
) -> list[Peak]:
    """By rank, over a segment of these ``batches`` (default: as many full ones as it takes to be in
    the steady state).  A segment too short for that holds at most as much.  A peer is taken for the
    system of ours whose schedule it runs."""
    plan, system = task.plan, schedule_of(task.system, task.options)
    # Of batches that are units, as many are in flight as there are ranks.
    enough = 2 + 2 * plan.world_size if plan.micro_batches == 1 else 4
    sizes = tuple(batches or (task.batch_size or job.batch_size,) * enough)
    norm = job.optimizer.global_norm
    program = system.program(plan, sizes, carried=system.carries, norm=norm)
    declared = system.declared(plan, carried=system.carries)
    in_flight = {stage: declared.in_flight(stage) for stage in range(len(plan.stages))}
    peaks = []
    for rank, found in enumerate(census(program, job.transport, in_flight)):
        stage, _ = plan.place(rank)
        sets, apart = sets_of(system, plan, stage), []
        for group in found:
            peak = Peak()
            for holding, action in group.items():
                peak.see(bytes_held(job, plan.stages[stage], sets, footprint, holding), action)
            apart.append(peak)
        peaks.append(_at_once(apart))
    return peaks


class Sets(NamedTuple):
    """Of a stage's weights on a rank: ``versions`` of each of the ``copies``; ``references``."""

    versions: int
    copies: int = 1
    references: int = 0


def sets_of(system: System, plan: Plan, stage: int) -> Sets:
    references = 0 if system.elastic(plan) is None else 1
    return Sets(system.live_versions(plan, stage), plan.pipelines, references)


def _at_once(peaks: Sequence[Peak]) -> Peak:
    """Of streams that share the rank's weights and optimizer state, and have all else apart."""
    first, *others = peaks
    kinds, at_once = dict(first.kinds), dict(first.at_once)
    for other in others:
        for kind in kinds.keys() - _SHARED:
            kinds[kind] += other.kinds[kind]
            at_once[kind] += other.at_once[kind]
    return Peak(kinds, at_once, first.at)


def bytes_held(
    job: Job, stage: StagePlan, sets: Sets, footprint: Footprint, holding: Holding
) -> dict[str, int]:
    """Bytes by kind of a rank of this stage, as of the equations above."""
    layers = slice(stage.first, stage.last)
    weights, tensors = sum(footprint.weights[layers]), sum(footprint.tensors[layers])
    parts = [sum(footprint.weights[first:last]) for first, last in stage.parts]
    # A single tensor needs no copy to be one bucket.
    alone = [sum(footprint.tensors[first:last]) == 1 for first, last in stage.parts]
    arrives, leaves = footprint.boundaries[stage.first], footprint.boundaries[stage.last]
    activations = sum(
        footprint.activations(stage.first, stage.last, n, cuts=stage.cuts) for n in holding.kept
    )
    between = 0
    for samples, done in holding.begun:
        end = stage.parts[done][1]
        cuts = tuple(cut for cut in stage.cuts if cut < end)
        activations += footprint.activations(stage.first, end, samples, cuts=cuts)
        between += samples * footprint.boundaries[end]
    counters = _STEPS_BYTES * tensors if job.optimizer.name == "adamw" else 0
    return {
        "weights": (sets.copies * sets.versions + sets.references) * weights
        + sum(footprint.constants[layers])
        + (sets.copies - 1) * sum(footprint.running[layers]),
        "gradients": holding.gradients * weights
        + sum(parts[part] for part in holding.parts)
        + sum(parts[part] for part in holding.buckets if not alone[part]),
        "optimizer": sets.copies * (job.optimizer.states * weights + counters),
        "activations": activations + arrives * holding.inputs,
        "messages": arrives * (holding.activations + holding.gradients_out)
        + leaves * (holding.gradients_in + holding.outputs)
        + between,
    }
