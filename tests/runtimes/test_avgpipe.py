"""Parallel pipelines learn what N plain models learn that are drawn together, whatever the order in
which workers get there, and equal plain training where they should."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.plan import split
from runtimes.schedule import validate
from runtimes.systems import get_system
from tests.runtimes import transparency
from tests.runtimes.averaging import Tied, at_random, copies_of, faults, last_first, start_of, train
from tests.runtimes.transparency import EPOCH, ArrayFeed, Case, differences, job_of, stack_of

FORMS = ["centre-first", "symmetric"]
ASYNCHRONOUS = Tied(
    stages=3, micro_batches=3, pipelines=3, options=(("averaging", "asynchronous"),)
)


def check(case: Tied, **how: Any) -> None:
    assert not faults(case, train(case, **how)), str(case)


# ---- against the reference ---------------------------------------------------------------------


@pytest.mark.parametrize("pipelines", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_both_forms_at_every_period_and_strength(stages: int, pipelines: int) -> None:
    for form, every, part in product(FORMS, [1, 4], [1.0, 0.9]):
        case = Tied(stages=stages, micro_batches=2, pipelines=pipelines, segments=(EPOCH, (18,)))
        check(case.having(form=form, every=every, alpha=part / pipelines, advance=1))


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adamw"])
def test_every_optimizer_has_a_state_for_each_copy(optimizer: str) -> None:
    """Gradients are clipped by the norm of one pipeline's, over all its stages."""
    case = Tied(stages=3, micro_batches=2, pipelines=3, model="vit-drops", optimizer=optimizer)
    check(replace(case, segments=(EPOCH, (18,))).having(every=2))
    check(replace(case, clip=0.5, segments=(EPOCH,)).having(form="symmetric", alpha=0.3))


@pytest.mark.parametrize("advance", [0, 1, 2, 5])
def test_forwards_in_advance_and_recomputation_change_nothing(advance: int) -> None:
    case = Tied(stages=3, micro_batches=4, pipelines=2, segments=(EPOCH,)).having(advance=advance)
    check(case)
    check(replace(case, recompute=True, cuts=(1,), model="vit-drops"))


@pytest.mark.parametrize("replicas", [(2,), (1, 2), (3, 1), (2, 2), (1, 2, 3)])
def test_replicas_of_a_stage_hold_the_same_copies(replicas: tuple[int, ...]) -> None:
    case = Tied(stages=len(replicas), micro_batches=2, pipelines=2, replicas=replicas, cuts=(3,))
    check(replace(case, segments=(EPOCH, (18,))).having(every=2, form="symmetric"))
    check(replace(case, segments=(EPOCH,), clip=0.5, recompute=True))


@pytest.mark.parametrize("pipelines", [2, 3])
def test_batches_smaller_than_the_number_of_pipelines(pipelines: int) -> None:
    """A pipeline without a sample makes no step, and averages all the same."""
    epoch = (2, 1, 5, 1)
    case = Tied(micro_batches=2, pipelines=pipelines, epoch=epoch, segments=(epoch[:3], epoch[3:]))
    for stages, every in product([1, 3], [1, 2]):
        check(replace(case, stages=stages).having(every=every))
        check(replace(case, stages=stages, optimizer="adamw", clip=0.5).having(form="symmetric"))


@pytest.mark.parametrize("every", [1, 3])
def test_one_pipeline_alone_at_full_strength(every: int) -> None:
    """The copy is plain training's; the reference is what it was at the last averaging."""
    case = Tied(stages=2, micro_batches=2, pipelines=1).having(every=every)
    check(case)
    outcome = train(case)
    (copy,) = copies_of(case, outcome.states[-1])
    apart = differences(outcome.states[-1]["weights"], copy["weights"], 1e-9)
    assert bool(apart) == (every == 3)


def test_batch_norm_runs_per_unit_of_a_pipeline() -> None:
    """Each copy has running statistics of its own, and the reference their mean."""
    epoch = (18, 18, 12)
    case = Tied(model="norms", epoch=epoch, segments=(epoch, epoch[:2]), stages=2, micro_batches=2)
    check(case.having(every=2))
    check(replace(case, recompute=True).having(form="symmetric"))


def test_a_state_restores_all_copies() -> None:
    case = Tied(stages=2, micro_batches=2, pipelines=3, optimizer="adamw").having(every=4)
    check(case, resumed=True)
    check(replace(ASYNCHRONOUS, optimizer="adamw"), resumed=True)


# ---- whatever the order ------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("every", [1, 2])
def test_the_asynchronous_form_equals_the_reference_fed_with_the_observed_order(
    form: str, every: int
) -> None:
    orders, apart = set(), 0
    for stages, pipelines in product([1, 3], [2, 3]):
        case = replace(ASYNCHRONOUS, stages=stages, pipelines=pipelines)
        case = case.having(form=form, every=every)
        with at_random(seed=every):
            outcome = train(case)
        assert not faults(case, outcome), str(case)
        assert outcome.said == outcome.seen
        for stage in (stage for segment in outcome.seen for stage in segment):
            orders.add((stages, pipelines, *stage))
            turns = [stage[i : i + pipelines] for i in range(0, len(stage), pipelines)]
            apart += any(len(set(turn)) < pipelines for turn in turns)
    assert len(orders) >= 5
    assert apart or every > 1, "no pipeline was ever an averaging ahead of another"


def test_asynchronously_stages_can_disagree_on_the_order() -> None:
    with at_random(5):
        outcome = train(ASYNCHRONOUS)
    assert any(stage != segment[0] for segment in outcome.seen for stage in segment)
    assert not faults(ASYNCHRONOUS, outcome)


@pytest.mark.parametrize("form", FORMS)
def test_the_synchronous_form_does_not_depend_on_the_order(form: str) -> None:
    """Also where one pipeline has no sample, and averages are updates apart."""
    case = Tied(stages=3, micro_batches=2, pipelines=3, segments=(EPOCH * 2,))
    for replicas in (None, (1, 2, 1)):
        case = replace(case, replicas=replicas).having(form=form, every=2)
        plain = train(case)
        with at_random(3):
            outcome = train(case)
        assert not faults(case, outcome)
        for name, weight in plain.states[-1]["weights"].items():
            assert torch.equal(outcome.states[-1]["weights"][name], weight)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipeline_without_a_sample_is_waited_for_all_the_same(stages: int) -> None:
    """The last has the only sample of update 1; the others may still have update 0 to make."""
    case = Tied(stages=stages, micro_batches=2, pipelines=3, epoch=(9, 1), segments=((9, 1, 9, 1),))
    for every in (2, 4):
        with last_first():
            check(case.having(every=every))


# ---- identities --------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("averaging", ["synchronous", "asynchronous"])
def test_one_pipeline_at_full_strength_is_dapple_and_plain_training(
    averaging: str, optimizer: str
) -> None:
    """In the centre-first form; in the symmetric one, one pipeline is not."""
    dapple = Case("dapple", 3, 4, model="vit-drops", optimizer=optimizer, recompute=True)
    ours = Tied(stages=3, micro_batches=4, pipelines=1, model="vit-drops", optimizer=optimizer)
    ours = replace(ours, segments=dapple.segments, recompute=True).having(averaging=averaging)
    plain, one = transparency.train_in_process(dapple), train(ours)
    assert not transparency.faults(dapple, plain)
    for step, state in zip(plain.weights, one.states, strict=True):
        assert not differences(state["weights"], plain.weights[step], 1e-13)
    assert one.losses == pytest.approx(plain.losses, rel=1e-13)
    symmetric = train(ours.having(form="symmetric"))
    assert differences(symmetric.states[0]["weights"], plain.weights[2], 1e-3)


@dataclass(frozen=True)
class ShareFeed(ArrayFeed):
    """Of every batch one pipeline's share alone."""

    pipelines: int = 1
    pipeline: int = 0

    def indices(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        whole = super().indices(step)
        low, high = split(len(whole), self.pipelines)[self.pipeline]
        return whole[low:high]

    def batch_sizes(self) -> tuple[int, ...]:
        cut = [split(size, self.pipelines)[self.pipeline] for size in self.epoch_sizes]
        return tuple(high - low for low, high in cut)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("averaging", ["synchronous", "asynchronous"])
def test_pipelines_that_are_hardly_drawn_are_dapple_each_on_its_share(
    averaging: str, form: str
) -> None:
    epoch = (17, 18, 5)
    case = Tied(stages=2, micro_batches=3, pipelines=3, epoch=epoch, segments=(epoch, epoch[:1]))
    case = case.having(alpha=1e-18, averaging=averaging, form=form)
    outcome = train(case)
    assert not differences(outcome.states[-1]["weights"], start_of(case)["weights"], 1e-14)
    for pipeline, copy in enumerate(copies_of(case, outcome.states[-1])):
        feed, first = ShareFeed("float64", epoch, pipelines=3, pipeline=pipeline), 0
        job = job_of(replace(case, pipelines=1))
        task = replace(job.tasks[0], system="dapple", options={})
        engine = InProcess(job, task, stack_of(case.model), feed)
        engine.load(start_of(case))
        for segment in case.segments:
            sizes = [feed.batch_sizes()[i] for i in range(len(segment))]
            engine.train(Segment(first, tuple(sizes)))
            first += len(segment)
        state = engine.state()
        assert not differences(copy["weights"], state["weights"], 1e-13)
        momentum = [
            {name: moments["momentum_buffer"] for name, moments in optimizer.items()}
            for optimizer in (copy["optimizer"], state["optimizer"])
        ]
        assert not differences(*momentum, 1e-12)


def test_no_advance_is_1f1b_and_all_of_it_is_gpipe() -> None:
    """Of one pipeline; of several, each by itself."""
    for stages, micro_batches in product([1, 2, 4], [1, 3, 5]):
        case = Tied(stages=stages, micro_batches=micro_batches, pipelines=2)
        sizes = (18, 7)
        for advance, other in [(0, "dapple"), (micro_batches, "gpipe")]:
            ours = case.having(advance=advance)
            streams = ours.built.program(ours.plan, sizes).streams
            plain = actions_of(other, ours, sizes)
            for stream in streams:
                if stream.pipeline == 0:
                    mine = [(a.op, a.unit) for a in stream if a.op != "AVERAGE"]
                    assert mine == plain[stream.rank], (str(ours), other)


def actions_of(system: str, case: Tied, sizes: tuple[int, ...]) -> dict[int, Any]:
    """Rank → the actions of a plain system on the first pipeline's share."""
    plan = Case(system, case.stages, case.micro_batches, model=case.model).plan
    shares = tuple(size // case.pipelines for size in sizes)
    program = get_system(system).program(plan, shares)
    return {stream.rank: [(a.op, a.unit) for a in stream] for stream in program.streams}


# ---- anything ----------------------------------------------------------------------------------


@st.composite
def cases(draw: Any) -> Tied:
    """Batches may be smaller than the pipelines, stages without weights, segments short."""
    model = draw(st.sampled_from(["widths", "in-place"]))
    stages, layers = draw(st.integers(1, 4)), len(stack_of(model))
    averaging = draw(st.sampled_from(["synchronous", "asynchronous"]))
    replicas = None
    if averaging == "synchronous":
        replicas = tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in range(stages))
    pipelines, size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 5, 9]))
    epoch = (size,) * draw(st.integers(1, 3)) + (draw(st.integers(1, size)),)
    rest, segments = epoch * 2, []
    while rest:
        length = draw(st.integers(1, len(rest)))
        segments.append(rest[:length])
        rest = rest[length:]
    case = Tied(
        stages=stages,
        micro_batches=draw(st.integers(1, 5)),
        pipelines=pipelines,
        replicas=replicas,
        recompute=draw(st.booleans()),
        cuts=tuple(sorted(draw(st.sets(st.integers(1, layers - 1), max_size=2)))),
        segments=tuple(segments),
        model=model,
        optimizer=draw(st.sampled_from(["sgd", "nesterov", "adamw"])),
        clip=draw(st.sampled_from([None, 0.5])),
        epoch=epoch,
    )
    return case.having(
        averaging=averaging,
        form=draw(st.sampled_from(FORMS)),
        every=draw(st.integers(1, 4)),
        alpha=draw(st.sampled_from([None, 0.9 / pipelines, 0.1])),
        advance=draw(st.integers(0, 6)),
    )


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(0, 2**16), st.booleans())
def test_whatever_is_drawn_equals_the_reference(case: Tied, seed: int, resumed: bool) -> None:
    system, plan, first = case.built, case.plan, 0
    promised = system.declared(plan)
    for segment in case.segments:
        phase = first % system.period
        validate(system.program(plan, segment, norm=case.clip is not None, phase=phase), promised)
        first += len(segment)
    with at_random(seed):
        outcome = train(case, resumed=resumed)
    assert not faults(case, outcome)
    for rank, report in enumerate(outcome.reports):
        stage, _ = plan.place(rank % plan.world_size)
        assert report.live_versions == 1
        assert report.peak_in_flight <= plan.pipelines * promised.in_flight(stage)


def test_a_difference_of_one_part_in_a_million_is_seen() -> None:
    """Of α: the limit is far below what the settings do."""
    case = Tied(stages=2, micro_batches=2, pipelines=2).having(alpha=0.5)
    outcome = train(case.having(alpha=0.5 * (1 + 1e-6)))
    found = faults(case, outcome)
    assert any("reference" in line for line in found)
    assert any("weight of copy" in line for line in found)


def test_tensors_are_compared_by_name() -> None:
    case = Tied(stages=2, micro_batches=2, pipelines=2)
    outcome = train(case)
    weights: dict[str, Tensor] = outcome.states[0]["weights"]
    name = next(iter(weights))
    weights["other"] = weights.pop(name)
    assert {f"after segment 0: reference, {n}: on one side only" for n in (name, "other")} <= set(
        faults(case, outcome)
    )
