"""What a rank holds over time has the peak that the memory model predicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtimes.planning.footprint import Footprint
from runtimes.planning.memory import memory_peaks
from runtimes.planning.timeline import memory_timeline, timeline_peak
from runtimes.simulation.cluster import Cluster, Link, Node
from runtimes.simulation.costs import UniformCosts
from runtimes.simulation.simulator import Simulation, simulate
from runtimes.systems import get_system
from tests.runtimes.planning.observed import IMAGE
from tests.runtimes.transparency import Case, job_of, stack_of

CASES = [
    Case("gpipe", 3, 4),
    Case("dapple", 3, 6, recompute=True, optimizer="adamw"),
    Case("pipedream", 3, replicas=(1, 2, 1)),
    Case("pipedream_2bw", 3, 6, clip=0.5),
    Case("ashpipe", 3, replicas=(2, 1, 1), cuts=(1,), options=(("order", "published"),)),
    Case("dp", replicas=(3,), cuts=(1, 2)),
]


def simulated(case: Case, sizes: tuple[int, ...], *, keep: bool = True) -> Simulation:
    system = get_system(case.system, dict(case.options))
    program = system.program(
        case.plan, sizes, carried=system.carries, norm=job_of(case).optimizer.global_norm
    )
    costs = UniformCosts(case.plan, sample_bytes=2.0, parameter_bytes=64.0, optimizer_seconds=0.5)
    cluster = Cluster("small", (Node(2), Node(2)), Link(16.0, 0.1), Link(8.0, 0.5))
    return simulate(program, cluster, costs, keep=keep)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_over_time_is_the_predicted_one(case: Case) -> None:
    job, sizes = replace(job_of(case), transport="distributed"), (18,) * 6
    footprint = Footprint(stack_of(case.model), IMAGE, precision=job.precision)
    simulation = simulated(case, sizes)
    timelines = memory_timeline(job, job.tasks[0], footprint, simulation)
    peaks = [timeline_peak(timeline) for timeline in timelines]
    assert peaks == memory_peaks(job, job.tasks[0], footprint, sizes)
    for timeline, end in zip(timelines, simulation.end_seconds, strict=True):
        seconds = [moment.seconds for moment in timeline]
        assert seconds == sorted(seconds)
        assert seconds[-1] == end


@pytest.mark.parametrize("advance", [0, 1, 4])
def test_the_peak_of_parallel_pipelines_is_below_the_predicted_one(advance: int) -> None:
    """Which takes all of a rank's streams at their peaks; lasting kinds are what they are."""
    options = (("advance", advance),)
    case = Case("avgpipe", 3, 4, optimizer="adamw", options=options, pipelines=3)
    job, sizes = replace(job_of(case), transport="distributed"), (36,) * 3
    footprint = Footprint(stack_of(case.model), IMAGE, precision=job.precision)
    timelines = memory_timeline(job, job.tasks[0], footprint, simulated(case, sizes))
    bounds = memory_peaks(job, job.tasks[0], footprint, sizes)
    one = replace(case, pipelines=1)
    alone = memory_peaks(job_of(one), job_of(one).tasks[0], footprint, (12,) * 3)
    for timeline, bound, single in zip(timelines, bounds, alone, strict=True):
        peak = timeline_peak(timeline)
        assert 0.5 * bound.total < peak.total <= bound.total
        for kind in ("weights", "optimizer"):
            assert peak.kinds[kind] == bound.kinds[kind]
        assert bound.kinds["activations"] == 3 * single.kinds["activations"]
        assert bound.kinds["gradients"] == 3 * single.kinds["gradients"]
        assert bound.kinds["weights"] == 4 * single.kinds["weights"]


def test_without_actions_there_is_no_time() -> None:
    case = CASES[0]
    job = job_of(case)
    footprint = Footprint(stack_of(case.model), IMAGE, precision=job.precision)
    with pytest.raises(ValueError, match="keep=True"):
        memory_timeline(job, job.tasks[0], footprint, simulated(case, (18,), keep=False))
