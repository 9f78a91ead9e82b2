"""Training without a flush equals the delayed-gradient reference of its system, on any plan.

Three epochs of an odd number of batches, the last of them partial, with a drain after each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from runtimes.execution.engine import Segment
from runtimes.plan import Plan
from runtimes.schedule import Op
from tests.runtimes.transparency import (
    ODD_EPOCHS,
    Case,
    differences,
    engine_of,
    faults,
    reference,
    stack_of,
    train_in_process,
)

REPLICAS = [(1, 1), (2, 1), (1, 2), (3, 1), (2, 3), (4, 3, 1)]
Options = tuple[tuple[str, Any], ...]


def thrice(case: Case, batch: int) -> Case:
    epoch = ODD_EPOCHS[batch]
    return replace(case, epoch=epoch, segments=(epoch,) * 3)


def check(*cases: Case) -> None:
    for case in cases:
        assert not faults(case, train_in_process(case)), str(case)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("system", "options"),
    [
        ("ashpipe", ()),
        ("ashpipe", (("order", "published"),)),
        ("pipedream", ()),
        ("pipedream", (("vertical_sync", True),)),
    ],
    ids=["ashpipe", "ashpipe-published", "pipedream", "pipedream-vertical-sync"],
)
def test_straight_pipelines_of_any_depth(
    system: str, options: Options, stages: int, optimizer: str
) -> None:
    for recompute in (False, True):
        case = Case(system, stages, options=options, optimizer=optimizer, recompute=recompute)
        check(thrice(case, 18))


@pytest.mark.parametrize("batch", sorted(ODD_EPOCHS))
@pytest.mark.parametrize("replicas", REPLICAS)
def test_ashpipe_on_any_replicas(replicas: tuple[int, ...], batch: int) -> None:
    """A batch smaller than the replicas leaves some of them without a sample."""
    for optimizer, options, recompute, cuts in (
        ("sgd", (), False, (1, 3)),
        ("adamw", (("order", "published"),), True, ()),
        ("adamw", (), True, (1, 2)),
    ):
        base = Case("ashpipe", len(replicas), replicas=replicas, optimizer=optimizer)
        check(thrice(replace(base, options=options, recompute=recompute, cuts=cuts), batch))


@pytest.mark.parametrize("batch", [18, 1])
@pytest.mark.parametrize("replicas", [*REPLICAS, (2,), (3, 3), (1, 4), (2, 1, 3, 1)])
def test_pipedreams_rounds(replicas: tuple[int, ...], batch: int) -> None:
    """Five batches leave the last round of two, three or four replicas short."""
    for optimizer, scaling, recompute, cuts in (
        ("sgd", "none", False, ()),
        ("adamw", "published", True, (1, 3)),
    ):
        options = (("lr_scaling", scaling),)
        base = Case("pipedream", len(replicas), replicas=replicas, options=options)
        check(thrice(replace(base, optimizer=optimizer, recompute=recompute, cuts=cuts), batch))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_2bw(stages: int, optimizer: str) -> None:
    """Partial batches have fewer units than stages, also in the middle of a segment; the version
    before goes on over a drain."""
    for micro_batches, replicas, recompute in ((stages, 1, False), (5, 2, True), (6, 3, False)):
        case = Case(
            "pipedream_2bw",
            stages,
            micro_batches,
            (replicas,) * stages,
            recompute,
            (1, 3),
            optimizer=optimizer,
        )
        check(thrice(case, 18), thrice(case, 1))
        middle = replace(
            thrice(case, 7), segments=((7, 7, 7, 7, 3, 7, 7, 7), (7,), (3, 7, 7, 7, 7, 3))
        )
        check(middle)


@pytest.mark.parametrize("system", ["ashpipe", "pipedream"])
def test_segments_of_one_two_and_all_batches(system: str) -> None:
    """A segment may be shorter than the warm-up; drains may lie anywhere, or nowhere."""
    base = thrice(Case(system, 4), 18)
    sizes = base.sizes
    check(replace(base, segments=tuple((size,) for size in sizes)))
    check(replace(base, segments=(sizes[:2], sizes[2:3], sizes[3:10], sizes[10:])))
    check(replace(base, segments=(sizes,)))


@pytest.mark.parametrize(
    "case",
    [
        Case("ashpipe", 3, replicas=(2, 3, 1), clip_by="stage", cuts=(1, 3)),
        Case("pipedream", 3, replicas=(2, 3, 1), clip_by="stage"),
        Case("pipedream_2bw", 3, 5, (2, 2, 2), cuts=(1, 3)),
        Case("pipedream_2bw", 4, 4, recompute=True),
        Case("gpipe", 3, 5, (2, 1, 3), cuts=(1, 3)),
        Case("dapple", 4, 2),
        Case("dp", 1, 1, (3,), cuts=(2,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_clipping_by_the_norm_of_all_stages_or_of_each(case: Case, optimizer: str) -> None:
    free = thrice(replace(case, optimizer=optimizer), 18)
    clipped = replace(free, clip=1.0)
    check(clipped)
    assert reference(clipped).losses[1:] != reference(replace(free, clip=100.0)).losses[1:]


def test_one_replica_a_stage_makes_ashpipe_and_pipedream_the_same() -> None:
    for stages in (1, 2, 3, 4):
        cases = [thrice(Case(name, stages), 18) for name in ("ashpipe", "pipedream")]
        one, other = (train_in_process(case) for case in cases)
        assert one.losses == other.losses
        for step, weights in one.weights.items():
            for name, tensor in weights.items():
                assert torch.equal(tensor, other.weights[step][name]), (stages, step, name)


@pytest.mark.parametrize(
    "case",
    [
        Case("ashpipe", 3, replicas=(4, 3, 1), cuts=(1, 3)),
        Case("pipedream", 2, replicas=(2, 3)),
        Case("pipedream_2bw", 2, 5, (3, 3)),
    ],
    ids=str,
)
def test_replicas_hold_bitwise_equal_weights_after_every_step(case: Case) -> None:
    engine = engine_of(thrice(case, 7))
    for first in range(5):
        engine.train(Segment(first, (ODD_EPOCHS[7][first],)))
        stages: dict[int, list[dict[str, torch.Tensor]]] = {}
        for worker in engine.workers:
            weights = {name: p.detach() for name, p in worker.copies[0].versions.current.items()}
            stages.setdefault(worker.stage_index, []).append(weights)
        for copies in stages.values():
            for other in copies[1:]:
                assert all(torch.equal(tensor, other[name]) for name, tensor in copies[0].items())


@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(name, 4, options=(("vertical_sync", True),) * (name == "pipedream"))
            for name in ("ashpipe", "pipedream")
        ),
        Case("pipedream", 2, replicas=(3, 1)),
        Case("pipedream_2bw", 4, 5),
        Case("ashpipe", 3, replicas=(4, 3, 1)),
        Case("dapple", 4, 5),
    ],
    ids=str,
)
def test_live_versions_reach_the_formula_and_never_exceed_it(case: Case) -> None:
    engine, epoch = engine_of(thrice(case, 18)), ODD_EPOCHS[18]
    plan = engine.plan
    engine.train(Segment(0, epoch * 3))
    engine.train(Segment(15, epoch * 2))
    for worker in engine.workers:
        formula = engine.system.live_versions(plan, worker.stage_index)
        assert worker.copies[0].versions.most_live == formula, worker.rank


def test_a_stage_without_weights_knows_that_a_version_is_carried_over() -> None:
    """The first layers of this model have no weights, so no stash either."""
    case = replace(
        thrice(Case("pipedream_2bw", 3, 3, model="widths"), 18), segments=(ODD_EPOCHS[18],) * 2
    )
    plan = Plan.contiguous((2, 3, 4), micro_batches=3)
    one, other = (engine_of(case, plan) for _ in range(2))
    assert not any(one.workers[0].copies[0].versions.current)
    one.train(Segment(0, ODD_EPOCHS[18]))
    other.load(one.state())
    assert [worker.copies.carried for worker in other.workers] == [1, 1, 1]
    for engine in (one, other):
        engine.train(Segment(5, ODD_EPOCHS[18]))
    weights = one.state()["weights"]
    assert all(torch.equal(w, weights[name]) for name, w in other.state()["weights"].items())


def test_some_stages_recompute_and_others_do_not() -> None:
    base = thrice(Case("ashpipe", 3, replicas=(1, 2, 1)), 18)
    plain = train_in_process(base).weights[14]
    plan = Plan.even(len(stack_of(base.model)), 3, (1, 2, 1), recompute=(True, False, True))
    engine = engine_of(base, plan)
    ops = [{action.op for action in stream} for stream in engine.system.program(plan, (4,)).streams]
    assert [Op.R in found for found in ops] == [True, False, False, True]
    for number, segment in enumerate(base.segments):
        engine.train(Segment(5 * number, segment))
    assert not differences(engine.state()["weights"], plain, 1e-10)
