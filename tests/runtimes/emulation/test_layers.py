"""Emulated layers: real functions of fewer elements, which take the time of all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtimes.emulation.layers import EmulatedLayer, EmulatedStack
from runtimes.emulation.uniform import uniform_profile
from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.execution.optimizer import build_optimizer
from runtimes.execution.rehearsal import rehearsals
from runtimes.job import Emulation, OptimizerSpec
from runtimes.plan import Plan
from runtimes.planning.profile import COPY, Profile, Spread
from tests.runtimes.emulation.clocks import Clock, device_at
from tests.runtimes.emulation.emulated import Feed, job_of, stack_of

MS = 1_000_000
#: 1 ms forward and 2 ms backward a sample and layer, 4 ms a step of a layer.
PROFILE = uniform_profile(
    4,
    forward_seconds=1e-3,
    backward_seconds=2e-3,
    output_bytes=40_000,
    parameter_bytes=4_000_000,
    step_seconds_per_byte=1e-9,
)
EMULATION = Emulation(PROFILE.to_json(), truncation=1000)
PLAIN = OptimizerSpec(lr=0.1)


def stack_at(clock: Clock | None, profile: Profile = PROFILE) -> EmulatedStack:
    device = None if clock is None else device_at(clock)
    return EmulatedStack(profile, PLAIN, truncation=1000, device=device)


def stage_at(clock: Clock | None, first: int, last: int, profile: Profile = PROFILE) -> Any:
    stack = stack_at(clock, profile)
    stage = stack.stage(first, last)
    stage.materialise(stack.initial_weights(first, last, 0))
    stage.random.set(0, np.arange(3))
    return stage


def test_one_element_in_a_thousand_is_there_but_all_logits() -> None:
    stack = stack_at(None)
    assert stack.parameter_counts == (1000,) * 4
    assert stack.output_shapes((1, 1, 1)) == ((10,), (10,), (10,), (10,))
    fewer = EmulatedStack(PROFILE, PLAIN, truncation=10**6)
    assert fewer.parameter_counts == (1,) * 4
    assert fewer.output_shapes((1, 1, 1)) == ((1,), (1,), (1,), (10,))


def test_a_layer_without_weights_has_none() -> None:
    bare = replace(PROFILE.layers[1], parameter_bytes=0, parameter_tensors=0)
    profile = replace(PROFILE, layers=(PROFILE.layers[0], bare, *PROFILE.layers[2:]))
    assert stack_at(None, profile).parameter_counts == (1000, 0, 1000, 1000)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize(("weights", "shape"), [(5, (3, 4)), (0, (3, 4)), (1, (2, 1, 2, 3))])
def test_gradients_are_those_of_the_layer(
    weights: int, shape: tuple[int, ...], logits: bool
) -> None:
    layer = EmulatedLayer(PROFILE.layers[0], weights, 3, None, logits=logits)
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator).requires_grad_()

    if not weights:
        assert torch.autograd.gradcheck(layer, (draw(*shape),))
        return

    def function(x: Tensor, weight: Tensor) -> Tensor:
        layer._parameters["weight"] = weight  # type: ignore[assignment]
        return layer(x)

    assert torch.autograd.gradcheck(function, (draw(*shape), draw(weights)))


def test_a_weight_changed_under_a_unit_in_flight_is_noticed() -> None:
    stage = stage_at(None, 0, 2)
    out = stage(torch.ones(3, 1, 1, 1))
    with torch.no_grad():
        stage.layers[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_stage_takes_what_its_layers_take() -> None:
    clock = Clock()
    stage = stage_at(clock, 1, 4)
    x = torch.ones(3, 10, requires_grad=True)
    begin = clock.time
    out = stage(x)
    assert clock.time - begin == 3 * 3 * MS
    out.sum().backward()
    assert clock.time - begin == 3 * 3 * (1 + 2) * MS
    assert x.grad is not None


def test_parts_of_a_stage_add_up_to_it() -> None:
    clock = Clock()
    stage = stage_at(clock, 0, 4)
    begin, seen = clock.time, []
    x, pieces = torch.ones(3, 1, 1, 1), []
    for first, last in ((0, 1), (1, 4)):
        out = stage.part(first, last)(x)
        pieces.append(out)
        seen.append(clock.time - begin)
        x = out.detach().requires_grad_()
    pieces[1].sum().backward()
    seen.append(clock.time - begin)
    pieces[0].sum().backward()
    seen.append(clock.time - begin)
    assert seen == [3 * MS, 12 * MS, 12 * MS + 18 * MS, 36 * MS]


def test_tying_copies_takes_what_the_simulator_says_once_for_all_or_for_each() -> None:
    """Two passes of a step of plain SGD a copy, and two thirds for the reference: of the three
    layers of a stage, of which only a thousandth of the weights is there."""
    pass_ns = 3 * 4 * MS
    for averaging, expected in (
        ("synchronous", [(2 * 2 + 2 / 3) * pass_ns, 0.0]),
        ("asynchronous", [(2 + 2 / 3) * pass_ns] * 2),
    ):
        clock = Clock()
        stack = stack_at(clock)
        plan = Plan.contiguous([1, 3], micro_batches=1, pipelines=2)
        job = job_of("avgpipe", plan, EMULATION, optimizer=PLAIN, options={"averaging": averaging})
        engine = InProcess(job, job.tasks[0], stack, Feed(8))
        ties = engine.workers[1].copies.averaging
        assert ties is not None
        seen = []
        for pipeline in range(2):
            begin = clock.time
            ties.average(pipeline, 0)
            seen.append(clock.time - begin)
        assert seen == pytest.approx(expected, abs=2)


@pytest.mark.parametrize("watched", [False, True])
def test_layers_wait_together_unless_somebody_watches_their_gradients(watched: bool) -> None:
    clock, seen = Clock(), []
    stage = stage_at(clock, 0, 4)
    if watched:
        stage.watch_gradients()
    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(clock.time))
    out, sleeps = stage(torch.ones(3, 1, 1, 1)), clock.sleeps
    begin = clock.time
    out.sum().backward()
    assert sleeps == 1
    assert clock.sleeps - sleeps == (4 if watched else 1)
    assert clock.time - begin == 24 * MS
    ends = [6 * MS, 12 * MS, 18 * MS, 24 * MS]
    assert [time - begin for time in seen] == (ends if watched else [0, 0, 0, 24 * MS])


@pytest.mark.parametrize(("work", "versions"), [(0, 1), (5 * MS, 1), (20 * MS, 1), (0, 3)])
def test_a_step_takes_what_all_weights_take(work: int, versions: int) -> None:
    """What the step of the few that are there takes is part of it; one of several versions makes a
    further one."""
    clock = Clock()
    known = PROFILE.optimizer_seconds_per_byte
    stage = stage_at(
        clock, 0, 3, replace(PROFILE, optimizer_seconds_per_byte={**known, COPY: 1e-9})
    )
    optimizer = build_optimizer(stage.parameters(), PLAIN)
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    stage.charge(optimizer, versions)
    optimizer.register_step_pre_hook(lambda *_: clock.work(work))
    begin = clock.time
    optimizer.step()
    assert clock.time - begin == max(12 * MS, work) + (12 * MS if versions > 1 else 0)


def test_trials_take_no_time_and_know_any_number_of_samples() -> None:
    clock, times = Clock(), {8: Spread(1, 1, 1)}
    layers = tuple(
        replace(layer, forward_seconds=times, backward_seconds=times) for layer in PROFILE.layers
    )
    stack = stack_at(clock, replace(PROFILE, layers=layers))
    assert len(stack.output_shapes((1, 1, 1))) == 4
    assert clock.time == 1


def test_virtual_ranks_take_the_time_of_all_of_them() -> None:
    """And learn, whatever the plan, the same."""
    losses = []
    for stages, micro_batches, recompute in ((1, 1, False), (2, 4, False), (4, 2, True)):
        clock = Clock()
        plan = Plan.even(4, stages, micro_batches=micro_batches, recompute=recompute)
        job = job_of("gpipe" if stages > 1 else "dp", plan, EMULATION)
        stack, feed = stack_of(job, device_at(clock)), Feed(job.batch_size)
        begin = clock.time
        reports = InProcess(job, job.tasks[0], stack, feed).train(Segment(0, (8,) * 3))
        forwards = 2 if recompute else 1
        assert clock.time - begin == 3 * 4 * (8 * (forwards + 2) + 4) * MS
        found = [report.losses for report in reports if report.losses]
        losses.append([found[0][step] for step in range(3)])
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0] == pytest.approx(losses[2])
    assert len({round(loss, 6) for loss in losses[0]}) == 3


@pytest.mark.parametrize("recompute", [False, True])
def test_a_bound_is_made_of_the_profile(recompute: bool) -> None:
    plan = Plan.even(4, 2, micro_batches=4, recompute=recompute)
    job = job_of("dapple", plan, EMULATION)
    (slice_,) = (r.measure(0) for r in rehearsals(job, stack_of(job), [Feed(8)], 0))
    assert slice_.forward_s == pytest.approx(4e-3)
    assert slice_.again_s == pytest.approx(4e-3 * recompute)
    assert slice_.backward_s == pytest.approx(8e-3)
    assert slice_.step_s == pytest.approx(8e-3)
