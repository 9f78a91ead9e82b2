"""The rules of the executor, one by one, on programs small enough to follow by hand."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from runtimes.execution.trace import PARTS
from runtimes.plan import Plan
from runtimes.schedule import Action, Batches, Op, Program, Stream, parse
from runtimes.simulation.agenda import Agenda
from runtimes.simulation.cluster import Cluster, Link, Node
from runtimes.simulation.costs import Reduced, UniformCosts
from runtimes.simulation.network import Network
from runtimes.simulation.simulator import Simulation, simulate
from runtimes.system import evaluation_program
from runtimes.systems import get_system
from tests.runtimes.simulation.closed_forms import forwards, single_node


def times(simulation: Simulation, rank: int) -> list[str]:
    """What a rank did, from when to when."""
    return [
        f"{str(timed.action).split('.')[3]} {timed.start:g}–{timed.end:g}"
        for timed in simulation.timed[rank]
    ]


def spent(simulation: Simulation, rank: int) -> dict[str, float]:
    return {name: seconds for name, seconds in simulation.parts[rank].items() if seconds}


def test_a_receive_waits_for_its_message_and_a_send_for_nothing() -> None:
    simulation = forwards(single_node(2, Link(4.0, 0.5)), (1.0, 2.0), size=4.0)
    assert times(simulation, 0)[:4] == [
        "F0@0 0–1",
        "SEND_ACT0>r0[0:1]@0 1–1",
        "F1@0 1–2",
        "SEND_ACT1>r0[0:1]@0 2–2",
    ]
    assert times(simulation, 1)[:4] == [
        "RECV_ACT0<r0[0:1]@0 0–2.5",
        "F0@0 2.5–4.5",
        "RECV_ACT1<r0[0:1]@0 4.5–4.5",
        "F1@0 4.5–6.5",
    ]


def test_the_parts_are_those_of_a_trace_and_add_up() -> None:
    """Rank 1 waits for a message: a second of it before that was sent, then while it travels."""
    simulation = forwards(single_node(2, Link(4.0, 0.5)), (1.0, 2.0), size=4.0)
    assert tuple(simulation.parts[0]) == PARTS
    assert spent(simulation, 0) == {"compute": 6.0, "idle": 8.5}
    assert spent(simulation, 1) == {"compute": 12.0, "idle": 1.0, "communication": 1.5}
    assert simulation.makespan_seconds == 14.5
    assert simulation.end_seconds == (6.0, 14.5)


def test_all_that_a_step_waits_for_is_reduction() -> None:
    plan = Plan.even(2, 1, (2,), cuts=(1,))
    costs = UniformCosts(plan, 1.0, 2.0, optimizer_seconds=0.5, parameter_bytes=8.0)
    cluster = single_node(2, Link(2.0), action_seconds={"REDUCE": 0.25})
    simulation = simulate(get_system("dp").program(plan, (2,)), cluster, costs)
    # B/0 1 … 2, its reduction 2.25 … 4.25, B/1 2.25 … 3.25, its reduction 4.25 … 6.25.
    assert spent(simulation, 0) == {
        "compute": 3.0,
        "overhead": 0.5,
        "reduce": 2.75,
        "optimizer": 0.5,
    }


def test_overheads_are_the_clusters_or_else_the_costs() -> None:
    plan = Plan.even(1, 1)
    program = get_system("gpipe").program(plan, (1,))
    costs = UniformCosts(plan, action_seconds={Op.F: 8.0, Op.B: 16.0})
    cluster = single_node(1, Link(1.0), action_seconds={"F": 0.5})
    assert spent(simulate(program, cluster, costs), 0) == {"compute": 3.0, "overhead": 16.5}


def test_a_rendezvous_begins_when_the_receive_is_posted() -> None:
    simulation = forwards(single_node(2, Link(4.0, 0.5)), (1.0, 4.0), rendezvous=True, size=4.0)
    assert times(simulation, 0)[:4] == [
        "F0@0 0–1",
        "SEND_ACT0>r0[0:1]@0 1–2.5",
        "F1@0 2.5–3.5",
        # Stage 1 computes until 6.5, and posts its next receive then.
        "SEND_ACT1>r0[0:1]@0 3.5–8",
    ]
    assert simulation.parts[0]["communication"] == 1.5 + 5 * 4.5
    assert simulation.parts[1]["communication"] == 6 * 1.5


def test_a_message_that_waits_for_one_port_holds_up_nothing_at_another() -> None:
    """Stage 0's two replicas send to the one of stage 1, whose port in takes one at a time; what
    they send is through their own ports out at once."""
    plan = Plan.even(2, 2, (2, 1))
    costs = UniformCosts(plan, sample_bytes=4.0)
    simulation = simulate(evaluation_program(plan, 2, 2), single_node(3, Link(4.0, 0.5)), costs)
    assert times(simulation, 2) == [
        "RECV_ACT0<r0[0:1]@0 0–2.5",
        "RECV_ACT0<r1[1:2]@0 2.5–3.5",
        "F0@0 3.5–4.5",
    ]
    assert simulation.port_bytes == {("out", 0): 4.0, ("out", 1): 4.0, ("in", 2): 8.0}


def test_what_transfers_steal_makes_a_busy_rank_compute_longer() -> None:
    """Of 4 bytes that arrive while stage 1 computes, at 0.125 s each; stage 0 sends them while it
    computes the next unit, but for the last one."""
    cluster = single_node(2, Link(4.0), stolen_seconds_per_byte=0.125)
    simulation = forwards(cluster, (2.0, 2.0), size=4.0)
    assert times(simulation, 0)[:3:2] == ["F0@0 0–2", "F1@0 2–4.5"]
    assert simulation.parts[0]["interference"] == 5 * 0.5
    # Unit 0 comes in from 2 to 3, while stage 1 is idle, and so pays for itself.
    assert times(simulation, 1)[:2] == ["RECV_ACT0<r0[0:1]@0 0–3", "F0@0 3–5.5"]


def test_what_was_stolen_while_idle_is_made_up_for_while_idle() -> None:
    cluster = single_node(2, Link(4.0), stolen_seconds_per_byte=0.5)
    simulation = forwards(cluster, (8.0, 1.0), size=4.0)
    # 2 s are due from 8 on, when the message begins, and half of them from its arrival at 9 on.
    assert times(simulation, 1)[:2] == ["RECV_ACT0<r0[0:1]@0 0–9", "F0@0 9–11"]


def stream_of(rank: int, pipeline: int, actions: Sequence[str]) -> Stream:
    fixed = tuple(parse(f"p{pipeline}.s0.r0.{action}") for action in actions)
    return Stream(rank, pipeline, lambda: fixed)


def test_of_several_streams_the_first_that_can_goes_on() -> None:
    """As runtimes.execution.worker has it; an edge holds the first one up until the second is done
    with its forward."""
    plan = Plan.even(1, 1)
    program = Program(
        plan,
        Batches((2,), pipelines=2),
        (
            stream_of(0, 0, ["F0@0", "B0@0", "STEP0@1"]),
            stream_of(0, 1, ["F0@0", "B0@0", "STEP0@1"]),
        ),
    )
    names = "p0.F0 p0.B0 p0.STEP0 p1.F0 p1.B0 p1.STEP0"
    assert order(program) == names
    edge = {parse("p0.s0.r0.B0@0"): (parse("p1.s0.r0.F0@0"),)}
    assert order(replace(program, after=edge)) == "p0.F0 p1.F0 p0.B0 p0.STEP0 p1.B0 p1.STEP0"
    never = {parse("p0.s0.r0.B0@0"): (parse("p1.s0.r0.F1@0"),)}
    with pytest.raises(ValueError, match=r"deadlock, all wait: rank 0 at p0\.s0\.r0\.B0@0$"):
        order(replace(program, after=never))


def order(program: Program) -> str:
    (timed,) = simulate(program, Cluster.ideal(1), UniformCosts(program.plan)).timed
    names = [str(item.action).split("@")[0].split(".") for item in timed]
    return " ".join(f"{name[0]}.{name[3]}" for name in names)


def test_a_part_without_weights_is_reduced_at_once() -> None:
    class Bare(UniformCosts):
        def reduced(self, stage: int, part: int | None) -> Reduced:
            return Reduced(0, 0) if part == 0 else super().reduced(stage, part)

    plan = Plan.even(2, 1, (2,), cuts=(1,))
    program = get_system("dp").program(plan, (2,))
    found = simulate(program, single_node(2, Link(8.0, 1.0)), Bare(plan, parameter_bytes=16.0))
    assert found.makespan_seconds == 1.0 + 2.0 + (8.0 / 8.0 + 2 * 1.0)


def test_a_reduction_keeps_its_ports() -> None:
    """What a stage of two replicas sends back waits for a reduction that was issued before."""
    plan = Plan.even(4, 2, (1, 2), cuts=(3,))
    program = get_system("ashpipe").program(plan, (2,))
    costs = UniformCosts(plan, 1.0, 3.0, sample_bytes=4.0, parameter_bytes=(0.0, 32.0))
    simulation = simulate(program, single_node(3, Link(4.0)), costs)
    # The replicas' forwards begin at 2 and 3, and so part 0 is reduced from 5.5 to 9.5; gradients
    # issued at 6 and 7 wait for that, and then come in one after the other.
    received = [line for line in times(simulation, 0) if line.startswith("RECV_GRAD")]
    assert received == ["RECV_GRAD0<r0[0:1]@0 1–10.5", "RECV_GRAD0<r1[1:2]@0 10.5–11.5"]
    # Each of two reductions has 2 (n − 1) / n · 16 bytes of every rank.
    assert simulation.port_bytes["out", 1] == 2 * 16.0 + 4.0


def test_a_shorter_time_can_make_a_longer_whole_where_transfers_share_a_port() -> None:
    """A Graham anomaly: over half-duplex links a forward of 2 s at the last stage lets another
    message pass first than one of 1 s does."""
    plan = Plan.even(3, 3, micro_batches=2)
    program, cluster = (
        get_system("dapple").program(plan, (2,)),
        single_node(3, Link(1.0, 0.0, False)),
    )
    short, long = (
        simulate(
            program,
            cluster,
            UniformCosts(plan, (5.0, 0.0, last), (1.0, 3.0, 2.0), sample_bytes=(1.0, 2.0)),
        ).makespan_seconds
        for last in (1.0, 2.0)
    )
    assert (short, long) == (25.0, 24.0)


def test_a_program_that_nobody_checked_ends_in_one_line() -> None:
    plan = Plan.even(3, 3, micro_batches=2)
    program = get_system("dapple").program(plan, (2,))
    cut = [action for action in program.streams[1] if action.op != Op.SEND_ACT]
    with pytest.raises(ValueError, match="deadlock") as error:
        simulate(program.replaced(1, cut), Cluster.ideal(3), UniformCosts(plan))
    assert "rank 2 at p0.s2.r0.RECV_ACT0<r0[0:1]@0" in str(error.value)
    assert "\n" not in str(error.value)
    swapped = list(program.streams[1])
    sends = [i for i, action in enumerate(swapped) if action.op == Op.SEND_ACT]
    swapped[sends[0]], swapped[sends[1]] = swapped[sends[1]], swapped[sends[0]]
    with pytest.raises(ValueError, match=r"RECV_ACT0.* meets 1 samples of unit 1: messages cross"):
        simulate(program.replaced(1, swapped), Cluster.ideal(3), UniformCosts(plan))


def test_of_many_that_wait_the_first_are_named() -> None:
    plan = Plan.even(12, 12)
    program = get_system("gpipe").program(plan, (1,))
    cut: list[Action] = []
    with pytest.raises(ValueError, match=r"rank 8 at .*; and 3 more$"):
        simulate(program.replaced(0, cut), Cluster.ideal(12), UniformCosts(plan))


def test_costs_and_clusters_that_cannot_be_are_refused() -> None:
    plan = Plan.even(2, 2, micro_batches=2)
    program = get_system("gpipe").program(plan, (2,))
    with pytest.raises(ValueError, match="the plan has 2 ranks, but free links has 1 devices"):
        simulate(program, Cluster.ideal(1), UniformCosts(plan))

    class Backwards(UniformCosts):
        def compute_seconds(self, op: Op, stage: int, *rest: object) -> float:
            return -1.0

    with pytest.raises(ValueError, match=r"p0\.s0\.r0\.F0@0 costs -1.0 seconds"):
        simulate(program, Cluster.ideal(2), Backwards(plan))
    for values in ({"forward_seconds": -1.0}, {"backward_seconds": (1.0, math.nan)}):
        with pytest.raises(ValueError, match="must be 0 or more"):
            UniformCosts(plan, **values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="forward_seconds needs 2 numbers, not 3"):
        UniformCosts(plan, (1.0, 1.0, 1.0))


def test_devices_that_the_plan_leaves_idle_change_nothing() -> None:
    small = forwards(single_node(2, Link(4.0, 0.5)), (1.0, 2.0), size=4.0)
    large = forwards(Cluster("large", (Node(9),), Link(4.0, 0.5)), (1.0, 2.0), size=4.0)
    assert small == replace(large, program=small.program)


def test_a_message_without_bytes_overtakes_none_that_queues() -> None:
    """At the moment in which a port is free again, the one that waits for it goes first."""
    agenda, came = Agenda(), list[tuple[str, float]]()
    cluster = Cluster("one node", (Node(2),), Link(1.0, 0.5))
    network = Network[str](
        cluster, agenda, lambda message, time: came.append((message.subject, time)), _nothing
    )
    route = network.route(0, 1)
    agenda.at(3.0, lambda subject, now: network.send(route, 0.0, subject, now), "late")
    for subject, size in (("long", 3.0), ("empty", 0.0)):
        network.send(route, size, subject, 0.0)
    agenda.run()
    assert came == [("long", 3.5), ("empty", 3.5), ("late", 3.5)]


def _nothing(rank: int, seconds: float, now: float) -> None:
    """No time is stolen."""


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_is_collected_after_a_simulation_as_before_it(collecting: bool) -> None:
    """Of one that ends, and of one that cannot begin to: a cost that is no time."""
    before = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        forwards(single_node(2, Link(4.0, 0.5)), (1.0, 2.0), size=4.0)
        assert gc.isenabled() == collecting
        with pytest.raises(ValueError, match="seconds"):
            forwards(single_node(2, Link(4.0, 0.5)), (1.0, -2.0), size=4.0)
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if before else gc.disable)()
