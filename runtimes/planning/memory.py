"""The memory model: bytes that each rank of a plan will hold at most, by kind.

For a rank whose stage has P bytes of trained weights and C of others, V live versions, activations
A(n) of a unit of n samples, and x and y bytes a sample at its two ends, at every moment between two
actions

    weights      V · P + C
    gradients    g · P                       g sets: the update's, with NORM also the one before
    optimizer    o · P                       o = 0 SGD, 1 with momentum, 2 AdamW (and its counters)
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
"""

from __future__ import annotations

from collections.abc import Sequence

from runtimes.execution.accounting import Peak
from runtimes.job import Job, Task
from runtimes.plan import StagePlan
from runtimes.planning.census import Holding, census
from runtimes.planning.footprint import Footprint
from runtimes.systems import schedule_of

__all__ = ["bytes_held", "memory_peaks"]

#: torch counts an AdamW parameter's steps in a float32 tensor.
_STEPS_BYTES = 4


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
        versions, peak = system.live_versions(plan, stage), Peak()
        for holding, action in found.items():
            peak.see(bytes_held(job, plan.stages[stage], versions, footprint, holding), action)
        peaks.append(peak)
    return peaks


def bytes_held(
    job: Job, stage: StagePlan, versions: int, footprint: Footprint, holding: Holding
) -> dict[str, int]:
    """Bytes by kind of a rank of this stage with so many versions, as of the equations above."""
    layers = slice(stage.first, stage.last)
    weights, tensors = sum(footprint.weights[layers]), sum(footprint.tensors[layers])
    parts = [sum(footprint.weights[first:last]) for first, last in stage.parts]
    # A single tensor needs no copy to be one bucket.
    alone = [sum(footprint.tensors[first:last]) == 1 for first, last in stage.parts]
    arrives, leaves = footprint.boundaries[stage.first], footprint.boundaries[stage.last]
    samples, done = holding.begun
    activations = sum(
        footprint.activations(stage.first, stage.last, n, cuts=stage.cuts) for n in holding.kept
    )
    between = 0
    if samples:
        end = stage.parts[done][1]
        cuts = tuple(cut for cut in stage.cuts if cut < end)
        activations += footprint.activations(stage.first, end, samples, cuts=cuts)
        between = samples * footprint.boundaries[end]
    counters = _STEPS_BYTES * tensors if job.optimizer.name == "adamw" else 0
    return {
        "weights": versions * weights + sum(footprint.constants[layers]),
        "gradients": holding.gradients * weights
        + sum(parts[part] for part in holding.parts)
        + sum(parts[part] for part in holding.buckets if not alone[part]),
        "optimizer": job.optimizer.states * weights + counters,
        "activations": activations + arrives * holding.inputs,
        "messages": arrives * (holding.activations + holding.gradients_out)
        + leaves * (holding.gradients_in + holding.outputs)
        + between,
    }
