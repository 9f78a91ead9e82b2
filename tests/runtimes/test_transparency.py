"""Training by a pipeline equals plain training of the whole model, whatever the plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from tests.oracles import synchronous
from tests.runtimes.transparency import (
    EPOCH,
    MODELS,
    SAMPLES,
    ArrayFeed,
    Case,
    differences,
    engine_of,
    faults,
    initial_weights,
    job_of,
    reference,
    stack_of,
    train_in_process,
)

SYSTEMS: list[tuple[str, tuple[tuple[str, Any], ...]]] = [
    ("gpipe", ()),
    ("dapple", (("policy", "A"),)),
    ("dapple", (("policy", "B"),)),
]


def check(*cases: Case) -> None:
    for case in cases:
        assert not faults(case, train_in_process(case)), str(case)


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize(("system", "options"), SYSTEMS, ids=["gpipe", "dapple-A", "dapple-B"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_pipeline_of_any_depth_and_any_number_of_units(
    system: str, options: tuple[tuple[str, Any], ...], stages: int, recompute: bool
) -> None:
    """B = 18 in 5 or 8 units is uneven, a batch of 1 leaves all units but one empty, M < S is
    among them, and dropout and DropPath are on."""
    for micro_batches in (1, 2, 5, 8):
        check(Case(system, stages, micro_batches, options=options, recompute=recompute))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_shapes_that_change_from_layer_to_layer(stages: int) -> None:
    for micro_batches, (system, options) in product((1, 2, 5, 8), SYSTEMS):
        recompute = micro_batches in (2, 8)
        check(
            Case(
                system,
                stages,
                micro_batches,
                options=options,
                model="widths",
                recompute=recompute,
            )
        )


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_data_parallelism(replicas: int, overlap: bool) -> None:
    """The last batch, of one sample, leaves all replicas but one empty."""
    base = Case("dp", replicas=(replicas,), options=(("overlap", overlap),))
    check(base, replace(base, cuts=(1, 3)), replace(base, cuts=(2,), recompute=True))
    # The last part of the backward has no weights here.
    check(replace(base, model="widths", cuts=(2, 5)), replace(base, micro_batches=2))


@pytest.mark.parametrize(
    ("replicas", "micro_batches"),
    [
        ((2, 1), 5),
        ((1, 2), 2),
        ((3, 2), 5),
        ((2, 3), 8),
        ((3, 1, 2), 2),
        ((1, 3, 2, 1), 5),
        ((2, 2, 2), 1),
    ],
)
def test_stages_of_unequal_numbers_of_replicas(
    replicas: tuple[int, ...], micro_batches: int
) -> None:
    """Neighbours hold different intervals of the same unit, and exchange where they overlap."""
    base = Case("gpipe", len(replicas), micro_batches, replicas)
    dapple = replace(base, system="dapple", options=(("policy", "B"),), cuts=(1,))
    check(base, replace(dapple, recompute=True, model="widths", cuts=(1, 5, 8)), dapple)


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adamw"])
def test_optimizers_keep_their_state_across_segments(optimizer: str) -> None:
    base = Case("dapple", 2, 5, (2, 1), optimizer=optimizer)
    data_parallel = Case("dp", 1, 1, (3,), cuts=(2,), optimizer=optimizer)
    check(base, Case("gpipe", 3, 2, optimizer=optimizer), data_parallel)


@pytest.mark.parametrize("model", ["vit", "vit-registers"])
def test_other_vision_transformers(model: str) -> None:
    """Fused attention where nothing is dropped; registers, pooling, normalised keys, scales."""
    check(Case("dapple", 2, 5, model=model), Case("gpipe", 3, 2, model=model, recompute=True))


@pytest.mark.parametrize("stages", [1, 3, 4])
def test_layers_that_work_in_place(stages: int) -> None:
    base = Case("gpipe", stages, 2, model="in-place", recompute=True)
    check(base, replace(base, recompute=False), replace(base, replicas=(2,) * stages, cuts=(3, 5)))


def test_in_single_precision() -> None:
    check(
        Case("gpipe", 2, 5, precision="float32"),
        Case("dapple", 3, 8, (1, 2, 1), precision="float32", recompute=True),
    )


@pytest.mark.parametrize("case", [Case("dapple", 3, 5), Case("gpipe", 2, 2, (1, 2))], ids=str)
def test_drains_between_any_two_updates_change_nothing(case: Case) -> None:
    """One update a segment, each compared; and one segment of all, whose end is compared."""
    sizes = case.sizes
    check(replace(case, segments=tuple((size,) for size in sizes)))
    check(replace(case, segments=(sizes,)))


@pytest.mark.parametrize(
    "case",
    [
        Case("gpipe", 3, 5, recompute=True),
        Case("dapple", 2, 2, (3, 2)),
        Case("dp", 1, 1, (2,), cuts=(2,)),
    ],
    ids=str,
)
def test_evaluation_before_between_and_after_training(case: Case) -> None:
    """Over all samples, whatever the batch: without random layers, and without leaving a trace."""
    engine, history = engine_of(case), reference(case)
    validation = ArrayFeed(data=1, augmented=False)
    images, labels = validation.arrays

    def evaluate(weights: dict[str, torch.Tensor]) -> None:
        for samples, batch_size in ((SAMPLES, 8), (SAMPLES, 50), (9, 1)):
            accuracy = engine.evaluate(validation, samples, batch_size)
            correct, loss = synchronous.evaluate(
                MODELS[case.model], weights, images[:samples], labels[:samples]
            )
            assert (accuracy.samples, accuracy.correct) == (samples, correct)
            assert accuracy.loss_sum == pytest.approx(loss, rel=1e-10)

    evaluate(initial_weights(case.model))
    engine.train(Segment(0, EPOCH))
    evaluate(history.updates[2].weights)
    engine.train(Segment(3, (18, 18)))
    evaluate(history.updates[4].weights)
    assert not differences(engine.state()["weights"], history.updates[4].weights, 1e-10)


def test_initial_weights_do_not_depend_on_the_plan() -> None:
    job = job_of(Case("gpipe"))
    one, cut = (
        InProcess(job, job_of(case).tasks[0], stack_of("vit"), ArrayFeed()).state()["weights"]
        for case in (Case("gpipe", model="vit"), Case("dapple", 3, 2, (2, 1, 2), model="vit"))
    )
    assert one.keys() == cut.keys() == MODELS["vit"]().state_dict().keys()
    assert all(torch.equal(one[name], cut[name]) for name in one)
