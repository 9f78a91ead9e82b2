"""What holds of every simulation, whatever system, plan, cluster and costs."""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtimes.plan import Plan
from runtimes.schedule import Action, Op, Program, ScheduleError, validate
from runtimes.schedule.action import COMPUTE, RECEIVES, SENDS
from runtimes.schedule.program import Channel, channel
from runtimes.simulation.cluster import Cluster, Link, Node
from runtimes.simulation.costs import UniformCosts
from runtimes.simulation.simulator import simulate
from runtimes.system import evaluation_program
from runtimes.systems import SYSTEMS, get_system
from tests.random_schedules import RandomOrder, fitting_plan, random_plan

dice_of = st.integers(0, 2**32).map(random.Random)


@dataclass(frozen=True)
class PerSample(UniformCosts):
    """Times and bytes of computations are those of one sample."""

    def compute_seconds(self, op: Op, stage: int, replica: int, part: int | None, n: int) -> float:
        return n * super().compute_seconds(op, stage, replica, part, n)


def random_program(dice: random.Random, most_pipelines: int = 1) -> Program:
    options: dict[str, dict[str, Any]] = {
        "ashpipe": {"order": dice.choice(["ours", "published"])},
        "avgpipe": {
            "advance": dice.randint(0, 4),
            "averaging": dice.choice(["synchronous", "asynchronous"]),
            "every": dice.randint(1, 3),
        },
    }
    options["dp"] = {"overlap": dice.random() < 0.5}
    name = dice.choice([*SYSTEMS, "random", "evaluation"])
    parallel = most_pipelines if name == "avgpipe" else 1
    plan = random_plan(dice, layers=6, most_pipelines=parallel)
    if name == "random":
        return next(program for program in random_orders(dice, plan) if is_valid(program))
    if name == "evaluation":
        program = evaluation_program(plan, dice.randint(1, 20), dice.randint(1, 5))
        return replace(program, rendezvous=dice.random() < 0.3)
    system = get_system(name, options.get(name))
    sizes = tuple(dice.choice((1, 2, 7, 18)) for _ in range(dice.randint(1, 4)))
    norm = system.global_norm and dice.random() < 0.3
    phase = dice.randrange(system.period)
    return system.program(fitting_plan(system, plan), sizes, norm=norm, phase=phase)


def random_orders(dice: random.Random, plan: Plan) -> Iterator[Program]:
    while True:
        system = RandomOrder(dice.randint(0, 2**32), dice.choice((0.0, 0.0, 0.5)))
        yield system.program(plan, tuple(dice.choice((1, 2, 7)) for _ in range(2)))


def is_valid(program: Program) -> bool:
    try:
        validate(program)
    except ScheduleError as error:
        if error.rule != 6:
            raise
        return False
    return True


def random_costs(dice: random.Random, plan: Plan) -> UniformCosts:
    def each(choices: tuple[float, ...], number: int) -> list[float]:
        return [dice.choice(choices) for _ in range(number)]

    times, stages = (0.0, 0.25, 1.0, 3.0), len(plan.stages)
    return dice.choice([UniformCosts, PerSample])(
        plan,
        each(times, stages),
        each(times, stages),
        each(times, stages),
        each((0.0, 0.5), stages),
        each((0.0, 1.0, 4.0), stages - 1),
        each((0.0, 16.0, 64.0), stages),
        dice.randint(0, 3),
        {op: dice.choice((0.0, 0.125)) for op in Op},
        each((0.0, 0.25), stages),
    )


def random_link(dice: random.Random) -> Link:
    return Link(
        dice.choice((1.0, 4.0, 16.0, math.inf)), dice.choice((0.0, 0.25, 2.0)), dice.random() < 0.7
    )


def random_cluster(dice: random.Random, ranks: int) -> Cluster:
    each = dice.randint(1, ranks)
    return Cluster(
        "random",
        tuple(Node(each) for _ in range(-(-ranks // each))),
        random_link(dice),
        random_link(dice),
        shared_nic=dice.random() < 0.5,
        all_reduce=dice.choice(("ring", "hierarchical")),
        stolen_seconds_per_byte=dice.choice((0.0, 0.0, 0.03)),
    )


# -- an independent account of what a program costs ---------------------------------------------


class Account:
    """Of a program: the longest path over its streams, messages and reductions, as if ports and the
    devices of several streams were not shared; and the sum of everything, one after the other."""

    def __init__(self, program: Program, cluster: Cluster, costs: UniformCosts):
        self.program, self.plan, self.cluster, self.costs = program, program.plan, cluster, costs
        self.serial = 0.0
        self.sent: dict[Channel, deque[float]] = defaultdict(deque)
        self.joined: dict[Any, list[float]] = defaultdict(list)
        self.ends: dict[Any, float] = {}
        self.group_ends: dict[Any, float] = defaultdict(float)
        streams = [iter(stream) for stream in program.streams]
        self.clocks = [0.0] * len(streams)
        heads = [next(stream, None) for stream in streams]
        began: set[int] = set()
        moved = True
        while moved:
            moved = False
            for index, stream in enumerate(streams):
                while (action := heads[index]) is not None:
                    if index not in began:
                        if not self.begin(index, action):
                            break
                        began.add(index)
                        moved = True
                    if not self.end(index, action):
                        break
                    began.discard(index)
                    heads[index] = next(stream, None)
        assert heads == [None] * len(heads)
        self.longest = max(self.clocks)

    def spend(self, index: int, seconds: float) -> None:
        self.clocks[index] += seconds
        self.serial += seconds

    def updates_ends(self, action: Action) -> list[Any]:
        pipeline, stage, update = action.pipeline, action.stage, action.unit
        keys = [key for key in self.joined if key[:3] == (pipeline, stage, update)]
        if action.op == Op.STEP:
            keys += [key for key in self.joined if key == (pipeline, "norm", update)]
        return keys

    def begin(self, index: int, action: Action) -> bool:
        if action.op in RECEIVES:
            queue = self.sent[channel(action, self.plan)]
            if not queue:
                return False
            self.clocks[index] = max(self.clocks[index], queue.popleft())
        elif action.op in (Op.NORM, Op.STEP):
            keys = self.updates_ends(action)
            if any(key not in self.ends for key in keys):
                return False
            self.clocks[index] = max([self.clocks[index], *(self.ends[key] for key in keys)])
        self.spend(index, self.costs.overhead_seconds(action.op))
        stage, replica = action.stage, action.replica
        if action.op in COMPUTE:
            low, high = self.program.share(action.pipeline, stage, replica, action.unit)
            self.spend(
                index,
                self.costs.compute_seconds(action.op, stage, replica, action.part, high - low),
            )
        elif action.op == Op.STEP:
            self.spend(index, self.costs.step_seconds(stage, replica))
        elif action.op == Op.AVERAGE:
            self.spend(index, self.costs.average_seconds(stage, replica, 1))
        elif action.op in SENDS:
            self.send(index, action)
        elif action.op == Op.REDUCE:
            self.reduce(index, action)
        elif action.op == Op.NORM:
            self.norm(index, action)
        return True

    def end(self, index: int, action: Action) -> bool:
        if action.op != Op.REDUCE or action.part is not None:
            return True
        key = (action.pipeline, action.stage, action.unit, None)
        if key not in self.ends:
            return False
        self.clocks[index] = max(self.clocks[index], self.ends[key])
        return True

    def send(self, index: int, action: Action) -> None:
        key = channel(action, self.plan)
        boundary = action.stage - (action.op == Op.SEND_GRAD)
        assert action.interval is not None
        size = self.costs.message_bytes(boundary) * (action.interval[1] - action.interval[0])
        seconds = self.cluster.link(key.sender, key.receiver).seconds(size)
        self.serial += seconds + 2 * size * self.cluster.stolen_seconds_per_byte
        self.sent[key].append(self.clocks[index] + seconds)
        if self.program.rendezvous and action.op == Op.SEND_ACT:
            self.clocks[index] += seconds

    def reduce(self, index: int, action: Action) -> None:
        key = (action.pipeline, action.stage, action.unit, action.part)
        self.joined[key].append(self.clocks[index])
        ranks = self.plan.stages[action.stage].ranks
        if len(self.joined[key]) < len(ranks):
            return
        size, tensors = self.costs.reduced(action.stage, action.part)
        calls = tensors if action.part is None else min(1, tensors)
        seconds = self.cluster.all_reduce_seconds(ranks, size, calls) if calls else 0.0
        if calls:
            traffic = self.cluster.all_reduce_traffic(ranks, size).ranks
            self.serial += sum(traffic.values()) * self.cluster.stolen_seconds_per_byte
        self.serial += seconds
        group = (action.pipeline, action.stage)
        begin = max(self.joined[key])
        if calls:
            begin = max(begin, self.group_ends[group])
        self.ends[key] = begin + seconds
        if calls:
            self.group_ends[group] = self.ends[key]

    def norm(self, index: int, action: Action) -> None:
        key = (action.pipeline, "norm", action.unit)
        self.joined[key].append(self.clocks[index])
        if len(self.joined[key]) == self.plan.world_size:
            seconds = self.cluster.all_reduce_seconds(range(self.plan.world_size), 4)
            self.serial += seconds
            self.ends[key] = max(self.joined[key]) + seconds


# -- properties ---------------------------------------------------------------------------------


@settings(max_examples=150)
@given(dice_of)
def test_a_makespan_lies_between_the_longest_path_and_the_sum_of_all(dice: random.Random) -> None:
    program = random_program(dice, most_pipelines=3)
    costs = random_costs(dice, program.plan)
    cluster = random_cluster(dice, program.plan.world_size)
    account = Account(program, cluster, costs)
    found = simulate(program, cluster, costs)
    assert account.longest - 1e-9 <= found.makespan_seconds <= account.serial + 1e-9
    for parts in found.parts:
        assert sum(parts.values()) == pytest.approx(found.makespan_seconds)
        assert min(parts.values()) >= 0


@settings(max_examples=100)
@given(dice_of)
def test_without_queues_it_is_the_longest_path(dice: random.Random) -> None:
    """Messages take no bandwidth, and reductions stand in nobody's way."""
    program = random_program(dice)
    plan = program.plan
    alone = max(stage.replicas for stage in plan.stages) == 1
    link = Link(math.inf, dice.choice((0.0, 0.25, 2.0)) if alone else 0.0)
    cluster = Cluster("fast", (Node(plan.world_size),), link)
    costs = random_costs(dice, plan)
    program = replace(program, rendezvous=False)
    found = simulate(program, cluster, costs).makespan_seconds
    assert found == pytest.approx(Account(program, cluster, costs).longest, abs=1e-9)


@given(dice_of)
def test_it_repeats_exactly(dice: random.Random) -> None:
    program = random_program(dice, most_pipelines=3)
    costs = random_costs(dice, program.plan)
    cluster = random_cluster(dice, program.plan.world_size)
    first, again, short = (
        simulate(program, cluster, costs, keep=keep) for keep in (True, True, False)
    )
    assert first == again
    assert replace(first, timed=()) == short


def unshared(dice: random.Random) -> tuple[Program, Cluster]:
    """A program and a cluster on which times decide no order: of one channel a port, or so fast
    that nothing queues."""
    kind = dice.choice(("free", "forward", "two stages"))
    if kind == "free":
        program = random_program(dice)
        alone = max(stage.replicas for stage in program.plan.stages) == 1
        link = Link(math.inf, 0.5 if alone else 0.0)
    elif kind == "forward":
        plan = Plan.even(6, dice.randint(1, 6))
        program = evaluation_program(plan, dice.randint(1, 20), dice.randint(1, 5))
        program = replace(program, rendezvous=dice.random() < 0.5)
        link = replace(random_link(dice), full_duplex=True)
    else:
        name = dice.choice([name for name in SYSTEMS if name != "dp"])
        plan = Plan.even(6, 2, micro_batches=4)
        system = get_system(name)
        program = system.program(fitting_plan(system, plan), (7, 4, 8))
        link = replace(random_link(dice), full_duplex=True)
    return program, Cluster("unshared", (Node(program.plan.world_size),), link)


@settings(max_examples=150)
@given(dice_of)
def test_nothing_gets_faster_if_a_cost_grows(dice: random.Random) -> None:
    program, cluster = unshared(dice)
    costs = random_costs(dice, program.plan)
    before = simulate(program, cluster, costs, keep=False).makespan_seconds
    names = ["forward_seconds", "backward_seconds", "recompute_seconds", "optimizer_seconds"]
    names += ["sample_bytes", "parameter_bytes", "link"]
    name = dice.choice(names)
    if name == "link":
        slower = replace(cluster.inside, latency_seconds=cluster.inside.latency_seconds + 0.75)
        cluster = replace(cluster, inside=slower)
        if max(stage.replicas for stage in program.plan.stages) > 1:
            return
    else:
        grown = list(getattr(costs, name))
        if not grown:
            return
        grown[dice.randrange(len(grown))] += dice.choice((0.25, 3.0))
        costs = replace(costs, **{name: grown})
    assert simulate(program, cluster, costs, keep=False).makespan_seconds >= before - 1e-9


@settings(max_examples=100)
@given(dice_of)
def test_it_goes_on_where_the_validator_says_so(dice: random.Random) -> None:
    """A program in a deadlock ends in one line that names who waits for what."""
    plan = random_plan(dice, layers=4, most_stages=3, most_ranks=4)
    program = next(random_orders(dice, plan))
    program = replace(program, rendezvous=dice.random() < 0.5)
    cluster, costs = Cluster.ideal(plan.world_size), UniformCosts(plan)
    if is_valid(program):
        simulate(program, cluster, costs)
    else:
        with pytest.raises(ValueError, match=r"^the program is in a deadlock.*rank \d at p0\.s"):
            simulate(program, cluster, costs)
