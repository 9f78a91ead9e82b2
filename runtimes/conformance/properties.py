"""The properties that a system has on a plan, as it declares them."""

from __future__ import annotations

from dataclasses import dataclass

from runtimes.conformance.cases import EPOCH, EVALUATED, SEGMENTS, Case
from runtimes.schedule import Program

__all__ = ["Properties", "Taken", "declared"]


@dataclass(frozen=True)
class Taken:
    """What an update took in: ``batches`` by their place in the segment, of whose samples ``once``
    counted exactly once, and ``otherwise`` not at all or with another weight."""

    batches: tuple[int, ...]
    once: int
    otherwise: int = 0


@dataclass(frozen=True)
class Properties:
    """Tuples have an entry a stage; "by segment" means an entry a segment above that.

    ``delays``       by segment, for each update of the stage: how many versions the weights that
                     it changed were ahead of those its gradients were computed on.  More than one
                     number if samples, layers or replicas differ.
    ``live``         most versions of one replica's weights that existed at once in training: of all
                     its copies, and of a reference that they are averaged with.
    ``in_flight``    most units of one pipeline that one replica had forwarded and not yet
                     backwarded.
    ``mixed``        backwards and recomputations on another version than their forward.
    ``taken``        by segment, for each update of the stage, all pipelines together.
    ``averaged``     by segment, for each update of the stage: whether the weights were other ones
                     before it than the update before had left.  Both if copies or layers differ.
    ``evaluated``    samples evaluated exactly once, on the latest weights, after each segment; of
                     several pipelines once on the mean of the copies, and once on a reference.
    """

    delays: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]
    live: tuple[int, ...]
    in_flight: tuple[int, ...]
    mixed: tuple[int, ...]
    taken: tuple[tuple[tuple[Taken, ...], ...], ...]
    averaged: tuple[tuple[tuple[tuple[bool, ...], ...], ...], ...]
    evaluated: tuple[int, ...]


def declared(case: Case) -> Properties:
    """What the system says of the case: a segment is an epoch, or as long as the run lets it be."""
    system, plan = case.build(), case.plan(case.probes + 1)
    stages, segments = range(case.stages), range(SEGMENTS)
    # A segment begins with the versions that the one before has left.
    carried = [min(segment, 1) * system.carries for segment in segments]
    sizes = EPOCH if system.drain == "epoch" else case.batches
    programs = [system.program(plan, sizes, carried=versions) for versions in carried]
    promises = [system.declared(plan, carried=versions) for versions in carried]

    def taken(program: Program, stage: int, update: int) -> Taken:
        batches, taken = set[int](), 0
        for pipeline in range(plan.pipelines):
            for unit in program.units(pipeline, stage, update):
                batches.add(program.batches.batch(unit))
                taken += program.batches.size(pipeline, unit)
        return Taken(tuple(sorted(batches)), taken)

    def averaged(segment: int, update: int) -> bool:
        """A segment's last averaging is seen before the first update of the next one."""
        before = segment * len(case.batches) + update - 1
        return before >= 0 and system.averages(plan, before)

    return Properties(
        delays=tuple(
            tuple(
                tuple((promise.delay(stage, u),) for u in range(program.updates(stage)))
                for stage in stages
            )
            for program, promise in zip(programs, promises, strict=True)
        ),
        live=tuple(
            system.live_versions(plan, stage) * plan.pipelines + (plan.pipelines > 1)
            for stage in stages
        ),
        in_flight=tuple(max(p.in_flight(stage) for p in promises) for stage in stages),
        mixed=(0,) * case.stages,
        taken=tuple(
            tuple(
                tuple(taken(program, stage, u) for u in range(program.updates(stage)))
                for stage in stages
            )
            for program in programs
        ),
        averaged=tuple(
            tuple(
                tuple((averaged(segment, u),) for u in range(program.updates(stage)))
                for stage in stages
            )
            for segment, program in enumerate(programs)
        ),
        evaluated=(EVALUATED,) * SEGMENTS,
    )
