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
    ``live``         most versions of one replica's weights that existed at once.
    ``in_flight``    most units that one replica had forwarded and not yet backwarded.
    ``mixed``        backwards and recomputations on another version than their forward.
    ``taken``        by segment, for each update of the stage.
    ``evaluated``    samples evaluated exactly once, on the latest weights, after each segment.
    """

    delays: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]
    live: tuple[int, ...]
    in_flight: tuple[int, ...]
    mixed: tuple[int, ...]
    taken: tuple[tuple[tuple[Taken, ...], ...], ...]
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
        units = program.units(0, stage, update)
        batches = sorted({program.batches.batch(unit) for unit in units})
        return Taken(tuple(batches), sum(program.batches.size(0, unit) for unit in units))

    return Properties(
        delays=tuple(
            tuple(
                tuple((promise.delay(stage, u),) for u in range(program.updates(stage)))
                for stage in stages
            )
            for program, promise in zip(programs, promises, strict=True)
        ),
        live=tuple(system.live_versions(plan, stage) for stage in stages),
        in_flight=tuple(max(p.in_flight(stage) for p in promises) for stage in stages),
        mixed=(0,) * case.stages,
        taken=tuple(
            tuple(
                tuple(taken(program, stage, u) for u in range(program.updates(stage)))
                for stage in stages
            )
            for program in programs
        ),
        evaluated=(EVALUATED,) * SEGMENTS,
    )
