"""Emulated runs over processes: every rank's clock is where events put it, to the nanosecond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtimes.emulation.layers import EmulatedStack, EmulatedStage
from runtimes.emulation.links import Delays, Joined
from runtimes.emulation.ports import Ports
from runtimes.emulation.uniform import uniform_profile
from runtimes.execution.collection import collect
from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.job import Emulation, Job, OptimizerSpec
from runtimes.plan import Plan
from runtimes.simulation.cluster import Cluster, Link, Node
from tests.processes import run_ranks
from tests.runtimes.emulation.clocks import Clock
from tests.runtimes.emulation.emulated import Feed, Run, job_of, stack_of, train

#: A sample and layer: 1 ms forward, 2 ms backward, 0.4 MB out; a layer: 1 MB of weights in three
#: tensors, 1 ms a step.
UNIFORM = uniform_profile(
    4,
    forward_seconds=1e-3,
    backward_seconds=2e-3,
    output_bytes=400_000,
    parameter_bytes=1_000_000,
    step_seconds_per_byte=1e-9,
)
PROFILE = replace(
    UNIFORM, layers=tuple(replace(layer, parameter_tensors=3) for layer in UNIFORM.layers)
)
MS = 1e-3
TIMEOUT_S = 110


def cluster(bandwidth: float, latency: float, nodes: int = 1) -> Cluster:
    link = Link(bandwidth, latency)
    return Cluster("test", (Node(4 // nodes),) * nodes, link, link)


def emulation(of: Cluster | None) -> Emulation:
    return Emulation(PROFILE.to_json(), None if of is None else of.to_json(), 1000)


# -- wrong on purpose -------------------------------------------------------------------------


PASS_THROUGH, JOIN = Ports.pass_through, Delays.join


def _no_latency(self: Ports, way: Any, ready: int, hold: int, latency: int) -> tuple[int, int]:
    return PASS_THROUGH(self, way, ready, hold, 0)


def _no_queue(self: Ports, way: Any, ready: int, hold: int, latency: int) -> tuple[int, int]:
    return ready, ready + latency + hold


def _alone(self: Delays, group: Any, ranks: Sequence[int], size: float, calls: int = 1) -> Joined:
    """The start of a reduction is when this rank joins it."""
    own = torch.tensor(self.now())
    return replace(JOIN(self, group, ranks, size, calls), latest=own)


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "latency dropped": (Ports, "pass_through", _no_latency),
    "no queue at the ports": (Ports, "pass_through", _no_queue),
    "bytes of the truncated tensors": (Delays, "_message_bytes", lambda s, a, t: t.nbytes),
    "step not waited": (EmulatedStage, "charge", lambda self, optimizer, versions: None),
    "step of the truncated weights": (
        EmulatedStack,
        "step_seconds",
        lambda self, first, last, versions: sum(self.parameter_counts[first:last]) * 4e-9,
    ),
    "reduction begins at the first join": (Delays, "join", _alone),
}


def several(
    rank: int, world_size: int, jobs: Sequence[Job], batches: int, mutant: str | None = None
) -> list[Run]:
    if mutant is not None:
        setattr(*MUTANTS[mutant])
    return [train(rank, world_size, job, batches, clock=Clock()) for job in jobs]


def seconds(jobs: Sequence[Job], rank: int = 0, mutant: str | None = None) -> list[float]:
    """Of two batches, as a rank sees them."""
    runs: list[list[Run]] = run_ranks(
        jobs[0].world_size, several, jobs, 2, mutant, timeout_s=TIMEOUT_S
    )
    return [run.seconds for run in runs[rank]]


# -- pipelines --------------------------------------------------------------------------------

SLOW = cluster(1e8, 0.5e-3)
TWO = Plan.even(4, 2)
#: A batch of 4 on two stages, and what a stage or message takes of it.
PAIR = [
    job_of("dapple", TWO, emulation(SLOW), batch_size=4),
    job_of("gpipe", replace(TWO, micro_batches=2), emulation(SLOW), batch_size=4),
    job_of("gpipe", replace(TWO, micro_batches=2), emulation(cluster(1e18, 0)), batch_size=4),
    job_of("dapple", TWO, emulation(SLOW), batch_size=4, optimizer=OptimizerSpec(lr=0.1, clip=1.0)),
]
F, B, HOLD, LATENCY, STEP = 8 * MS, 16 * MS, 16 * MS, 0.5 * MS, 2 * MS
PAIR_SECONDS = [
    # One unit there and back.
    2 * (2 * (F + B) + 2 * (HOLD + LATENCY) + STEP),
    # Two of half the size, of which the second waits for the first at the ports, both ways.
    2 * (F / 2 + HOLD + LATENCY + F / 2 + B / 2 + HOLD + LATENCY + B / 2 + STEP),
    # On links that take no time, the schedule's bound.
    2 * (3 * (F + B) / 2 + STEP),
    # Before the step a sum of 8 bytes over all ranks.
    2 * (2 * (F + B) + 2 * (HOLD + LATENCY) + (2 * LATENCY + 8e-8) + STEP),
]


def test_a_message_takes_latency_and_all_its_bytes_and_waits_for_its_ports() -> None:
    assert seconds(PAIR) == pytest.approx(PAIR_SECONDS, abs=1e-7)


@pytest.mark.parametrize(
    ("mutant", "caught_by"),
    [
        ("latency dropped", 0),
        ("no queue at the ports", 1),
        ("bytes of the truncated tensors", 0),
        ("step not waited", 2),
        ("step of the truncated weights", 2),
    ],
)
def test_the_exact_time_catches(mutant: str, caught_by: int) -> None:
    (found,) = seconds([PAIR[caught_by]], mutant=mutant)
    assert found != pytest.approx(PAIR_SECONDS[caught_by], abs=1e-7)


def test_flush_schedules_reach_their_bound_on_four_stages() -> None:
    plan = Plan.even(4, 4, micro_batches=8)
    free = emulation(cluster(1e18, 0))
    jobs = [job_of(system, plan, free, batch_size=16) for system in ("dapple", "gpipe")]
    bound = 2 * ((8 + 3) * 2 * 3 * MS + MS)
    assert seconds(jobs) == pytest.approx([bound] * 2, abs=1e-6)


# -- reductions -------------------------------------------------------------------------------

FAST, DEAR = cluster(1e9, 0.5e-3), cluster(1e8, 0.5e-3)
WHOLE, CUT = Plan.even(4, 1, [2]), Plan.even(4, 1, [2], cuts=[2])
REPLICAS = [
    job_of("dp", CUT, emulation(FAST), batch_size=4),
    job_of("dp", CUT, emulation(DEAR), batch_size=4),
    job_of("dp", WHOLE, emulation(FAST), batch_size=4, options={"overlap": False}),
    job_of("dp", CUT, emulation(FAST), batch_size=3),
]
REPLICAS_SECONDS = [
    # Two parts of 2 MB: one while the backward goes on, one after it.
    2 * (8 * MS + 16 * MS + 3 * MS + 4 * MS),
    # The second waits for the first.
    2 * (8 * MS + 8 * MS + 2 * 21 * MS + 4 * MS),
    # Each of twelve tensors for itself.
    2 * (8 * MS + 16 * MS + 4 * (1 * MS + 3 * 1 * MS) + 4 * MS),
    # The replica with one sample waits for that with two.
    2 * (8 * MS + 16 * MS + 3 * MS + 4 * MS),
]


def test_a_reduction_begins_when_all_have_joined_it_and_the_one_before_is_over() -> None:
    for rank in (0, 1):
        assert seconds(REPLICAS, rank) == pytest.approx(REPLICAS_SECONDS, abs=1e-7)


def test_replicas_that_do_not_wait_for_each_other_are_caught() -> None:
    mutant = "reduction begins at the first join"
    (found,) = seconds(REPLICAS[3:], mutant=mutant)
    assert found != pytest.approx(REPLICAS_SECONDS[3], abs=1e-7)


# -- peers, and what is learnt ----------------------------------------------------------------


def test_peers_pay_for_computation_and_step_as_ours_do() -> None:
    nothing = emulation(None)
    pairs = [("dapple", replace(TWO, micro_batches=2)), ("dp", WHOLE)]
    for system, plan in pairs:
        peer = {"dapple": "torch-1f1b", "dp": "torch-ddp"}[system]
        jobs = [job_of(name, plan, nothing, batch_size=4) for name in (system, peer)]
        compute = (F + B + STEP) if system == "dapple" else (8 + 16 + 4) * MS
        for rank in (0, 1):
            assert seconds(jobs, rank) == pytest.approx([2 * compute] * 2, abs=1e-7)


def in_process(job: Job) -> tuple[dict[int, float], dict[str, Tensor]]:
    engine = InProcess(job, job.tasks[0], stack_of(job), Feed(job.batch_size))
    engine.train(Segment(0, (job.batch_size,)))
    reports = engine.train(Segment(1, (job.batch_size,) * 2))
    losses = {step: loss for report in reports for step, loss in report.losses.items()}
    return losses, engine.state()["weights"]


def test_delays_change_nothing_that_is_learnt() -> None:
    """Messages keep their order, headers and values apart: of two elements, or one in float64."""
    three = replace(TWO, micro_batches=3)
    jobs = [
        job_of("dapple", three, emulation(SLOW), batch_size=7),
        job_of("pipedream", TWO, emulation(SLOW), batch_size=4),
        job_of("pipedream_2bw", three, emulation(SLOW), batch_size=7),
        job_of("ashpipe", TWO, emulation(SLOW), batch_size=4, options={"order": "published"}),
        job_of("dapple", three, emulation(SLOW), batch_size=7, precision="float64"),
    ]
    runs: list[list[Run]] = run_ranks(2, several, jobs, 2, timeout_s=TIMEOUT_S)
    for number, job in enumerate(jobs):
        losses, weights = in_process(job)
        first, last = (of_rank[number] for of_rank in runs)
        assert last.report.losses == pytest.approx(losses)
        assert len(set(losses.values())) == 2
        for name, value in (first.weights | last.weights).items():
            assert torch.equal(value, weights[name]), name
    assert runs[0][1].report.live_versions == 2


def rendezvous(rank: int, world_size: int, job: Job) -> float:
    """In real time: a sender that waits for its receiver reads no clock of its."""
    return train(rank, world_size, job, 2).seconds


def test_real_clocks_wait_as_long_at_least() -> None:
    quick = uniform_profile(4, output_bytes=400_000, forward_seconds=1e-4, backward_seconds=1e-4)
    link = cluster(1e9, 0.02).to_json()
    for order in ("ours", "published"):
        job = job_of(
            "ashpipe", TWO, Emulation(quick.to_json(), link, 1000), options={"order": order}
        )
        found = run_ranks(2, rendezvous, job)
        assert min(found) >= 2 * 0.02 + 8 * 2e-4


def class_of_the_trace(rank: int, world_size: int, job: Job) -> str | None:
    engine = DistributedEngine(job, job.tasks[0], stack_of(job), Feed(job.batch_size), rank)
    engine.train(Segment(0, (job.batch_size,)))
    timeline = collect(engine, "run", first=0, words="a segment")
    return None if timeline is None else timeline.evidence


def test_a_trace_of_what_was_emulated_says_so() -> None:
    link = cluster(1e9, 1e-3).to_json()
    quick = uniform_profile(4, forward_seconds=1e-4, backward_seconds=1e-4).to_json()
    for given in (Emulation(quick, None, 1000), Emulation(quick, link, 1000)):
        assert run_ranks(2, class_of_the_trace, job_of("dapple", TWO, given))[0] == "emulated"
