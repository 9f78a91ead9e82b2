"""Parallel pipelines on emulated devices: first-ready by the emulated clock, as simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.endpoint import GroupEndpoint
from runtimes.execution.engine import Segment
from runtimes.job import Emulation, Job
from runtimes.plan import Plan
from runtimes.planning.profile import Profile
from runtimes.simulation.cluster import Cluster, Link, Node
from runtimes.simulation.costs import ProfileCosts
from runtimes.simulation.simulator import simulate
from runtimes.systems import get_system
from tests.processes import run_ranks
from tests.runtimes.emulation.emulated import Feed, job_of, stack_of
from tests.runtimes.emulation.shared_clock import SharedClock, device_at, shared_by
from tests.runtimes.emulation.test_runs import UNIFORM

#: Averaging takes no time.
PROFILE = replace(
    UNIFORM, optimizer_seconds_per_byte={**UNIFORM.optimizer_seconds_per_byte, "sgd": 0.0}
)
BATCHES = 2


def job(
    pipelines: int, stages: int, units: int, bandwidth: float, samples: int = 4, **options: Any
) -> Job:
    """``samples`` of each pipeline in a batch."""
    plan = replace(Plan.even(4, stages, micro_batches=units), pipelines=pipelines)
    link = Link(bandwidth, 0.3e-3)
    cluster = Cluster("test", (Node(4),), link, link)
    emulation = Emulation(PROFILE.to_json(), cluster.to_json(), 1000)
    return job_of("avgpipe", plan, emulation, batch_size=pipelines * samples, options=options)


def simulated(job: Job) -> list[float]:
    """When each rank has done all."""
    (task,), emulation = job.tasks, job.emulation
    assert emulation is not None
    assert emulation.profile is not None
    assert emulation.cluster is not None
    program = get_system(task.system, task.options).program(task.plan, (job.batch_size,) * BATCHES)
    costs = ProfileCosts(Profile.from_json(emulation.profile), task.plan, job.optimizer.method)
    return list(simulate(program, Cluster.from_json(emulation.cluster), costs).end_seconds)


def emulated(rank: int, world_size: int, jobs: list[Job], mutant: str = "") -> list[float]:
    if mutant:
        MUTANTS[mutant]()
    clock = SharedClock(rank, world_size)
    shared_by(clock)
    found = []
    for job in jobs:
        stack, feed = stack_of(job, device_at(clock)), Feed(job.batch_size)
        engine: Any = DistributedEngine(job, job.tasks[0], stack, feed, rank)
        begin = clock.now()
        engine.train(Segment(0, (job.batch_size,) * BATCHES))
        found.append((engine.ended - begin) / 1e9)
    return found


#: By number of ranks.
JOBS = {
    2: [
        job(2, 2, 1, 1e8),
        job(2, 2, 2, 1e8, samples=8),
        job(2, 2, 2, 1e9, samples=6, advance=1),
        job(3, 2, 2, 2e8, samples=6),
        job(2, 2, 2, 2e8, samples=8, averaging="asynchronous"),
    ],
    3: [job(2, 3, 3, 3e8, samples=6, advance=1)],
}


@pytest.mark.parametrize("ranks", JOBS)
def test_streams_take_what_the_simulator_says(ranks: int) -> None:
    found = run_ranks(ranks, emulated, JOBS[ranks])
    for number, job in enumerate(JOBS[ranks]):
        assert [of[number] for of in found] == pytest.approx(simulated(job), abs=1e-6), number


# -- mutants ----------------------------------------------------------------------------------


def waits_for_the_last() -> None:
    """Of the messages that have come, the rank sleeps until the last is due."""
    dues = GroupEndpoint._dues
    GroupEndpoint._dues = lambda *words: [max(dues(*words))] if dues(*words) else []  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {"waits for the last": waits_for_the_last}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_another_choice_takes_another_time(mutant: str) -> None:
    found = run_ranks(2, emulated, JOBS[2], mutant)
    expected = [simulated(job) for job in JOBS[2]]
    pairs = zip(zip(*found, strict=True), expected, strict=True)
    assert any(list(times) != pytest.approx(right, abs=1e-6) for times, right in pairs)
