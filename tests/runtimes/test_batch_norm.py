"""BatchNorm per unit: runs equal references that normalise unit by unit and share by share.

Running statistics are compared at every drain, as weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtimes.execution import inprocess
from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.endpoint import GroupEndpoint
from runtimes.execution.engine import Segment
from runtimes.execution.team import DistributedTeam
from runtimes.execution.worker import Worker
from runtimes.job import SwitchSpec, Task
from runtimes.model.stack import LayerStack
from runtimes.model.stage import Stage
from runtimes.plan import Plan
from tests.oracles import asynchronous, synchronous
from tests.processes import run_ranks
from tests.runtimes.execution import runs
from tests.runtimes.transparency import (
    MODELS,
    SGD,
    ArrayFeed,
    Case,
    differences,
    engine_of,
    faults,
    initial_weights,
    job_of,
    recipe_of,
    reference,
    stack_of,
    train_in_process,
)
from tests.runtimes.transparency_ranks import Share, merged, train_cases

#: The last batch is partial; no unit of it has a single sample on a replica.
SIZES = (18, 18, 12)


def of(model: str, system: str, *place: Any, **rest: Any) -> Case:
    case = Case(system, *place, model=model, epoch=SIZES, segments=(SIZES, SIZES[:2]))
    return replace(case, **rest)


def check(*cases: Case) -> None:
    for case in cases:
        assert not faults(case, train_in_process(case)), str(case)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("system", ["gpipe", "dapple", "pipedream_2bw"])
def test_micro_batches_are_normalised_by_themselves(system: str, stages: int) -> None:
    first = stages if system == "pipedream_2bw" else 1
    for micro_batches in range(first, 4):
        model = ("resnet", "norms", "vgg")[(stages + micro_batches) % 3]
        recompute = (len(system) + stages + micro_batches) % 2 == 0
        check(of(model, system, stages, micro_batches, recompute=recompute))


@pytest.mark.parametrize("replicas", [(2,), (2, 1), (1, 2), (3, 1, 2)])
def test_replicas_normalise_their_own_samples(replicas: tuple[int, ...]) -> None:
    """Neighbours hold other samples of a unit, and so other statistics."""
    stages = len(replicas)
    check(
        of("resnet", "ashpipe", stages, replicas=replicas, recompute=True),
        of("norms", "gpipe", stages, 2, replicas, cuts=(1,)),
        of("vgg", "pipedream", stages, replicas=replicas),
    )
    if stages == 1:
        check(of("resnet", "dp", 1, 1, replicas, cuts=(2, 4), recompute=True))


@pytest.mark.parametrize("stages", [2, 3])
def test_units_in_flight_leave_their_running_statistics_in_order(stages: int) -> None:
    check(
        of("resnet", "ashpipe", stages, recompute=stages == 3),
        of("norms", "ashpipe", stages, recompute=stages == 2, options=(("order", "published"),)),
    )


def test_a_batch_of_one_sample_leaves_replicas_and_units_empty() -> None:
    """Of maps of several pixels; an empty replica's statistics count in the mean as they are."""
    sizes = (18, 18, 1)
    for case in (Case("ashpipe", 2, replicas=(2, 1)), Case("gpipe", 2, 3, (1, 2), recompute=True)):
        check(replace(case, model="resnet", epoch=sizes, segments=(sizes, sizes)))


def test_in_single_precision() -> None:
    check(of("resnet", "ashpipe", 2, replicas=(2, 1), precision="float32", recompute=True))


def test_alexnet_needs_no_rule() -> None:
    """Its layers work in place, and the first of its classifier begins with a dropout."""
    check(
        Case("gpipe", 3, 5, model="alexnet", recompute=True),
        Case("ashpipe", 3, replicas=(2, 1, 1), model="alexnet"),
    )


@pytest.mark.parametrize(
    "case",
    [
        of("resnet", "ashpipe", 2, replicas=(2, 1), recompute=True),
        of("norms", "dapple", 2, 3),
        of("vgg", "pipedream", 2, replicas=(1, 2)),
    ],
    ids=str,
)
def test_evaluation_uses_the_averages_and_leaves_them_alone(case: Case) -> None:
    engine, history = engine_of(case), reference(case)
    validation = ArrayFeed(epoch_sizes=(37,), data=1, augmented=False)
    images, labels = validation.arrays
    engine.train(Segment(0, SIZES))
    end = history.ends[0]
    for samples, batch_size in ((37, 8), (37, 50), (9, 1)):
        accuracy = engine.evaluate(validation, samples, batch_size)
        correct, loss = synchronous.evaluate(
            MODELS[case.model], {**end.weights, **end.running}, images[:samples], labels[:samples]
        )
        assert (accuracy.samples, accuracy.correct) == (samples, correct)
        assert accuracy.loss_sum == pytest.approx(loss, rel=1e-10)
    for worker in engine.workers:  # Every replica, not only the one that speaks for all.
        running = {name: end.running[name] for name in worker.copies[0].running}
        assert not differences(worker.copies[0].running, running, 1e-10)
    engine.train(Segment(3, SIZES[:2]))
    after = history.ends[1]
    assert not differences(engine.state()["weights"], {**after.weights, **after.running}, 1e-10)


def test_a_switch_hands_the_averages_over() -> None:
    first, then = of("norms", "dp", 1, 1, (2,)), of("norms", "ashpipe", 2)
    one, other = engine_of(first), engine_of(then)
    one.train(Segment(0, SIZES))
    other.load(one.state())
    other.train(Segment(3, SIZES))
    feed, steps = ArrayFeed(epoch_sizes=SIZES), range(3, 6)
    history = asynchronous.ashpipe(
        MODELS["norms"],
        reference(first).ends[0],
        recipe_of(job_of(then)),
        [(stage.first, stage.last) for stage in then.plan.stages],
        [[feed.batch(step) for step in steps]],
        [0.5 * SGD.lr] * 3,
    )
    end = history.ends[0]
    assert not differences(other.state()["weights"], {**end.weights, **end.running}, 1e-10)
    assert {int(value) for name, value in end.running.items() if "num_batches" in name} == {7 + 6}


def test_a_run_killed_around_its_switch_ends_as_if_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise, from a checkpoint that holds the averages."""
    monkeypatch.setattr(runs, "build_stack", lambda spec: stack_of("resnet"))
    data = runs.write_data(tmp_path)
    plans = Plan.even(7, 2, (2, 1)), Plan.even(7, 3, recompute=True, micro_batches=2)
    switch = SwitchSpec(Task("then", "dapple", plans[1]), 2)
    job = runs.job_of(plans[0], 3, "ashpipe", switch=switch)
    for name, killed_at in (("whole", 0), ("parts", 2)):
        runs.train_in_process(tmp_path / name, data, job, killed_at)
    runs.cut_back(tmp_path / "parts")
    runs.train_in_process(tmp_path / "parts", data, job)
    one, other = runs.state_of(tmp_path / "whole"), runs.state_of(tmp_path / "parts")
    assert one.keys() == other.keys() >= {"bn1.running_mean", "layer4.0.bn3.num_batches_tracked"}
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["bn1.num_batches_tracked"] == 2 * 3 + 2 * 3, "units: 3 an epoch, then 6"


# -- over processes --------------------------------------------------------------------------------

ON_RANKS = [
    of("resnet", "ashpipe", 2, replicas=(2, 1), recompute=True),
    of("norms", "pipedream", 2, replicas=(1, 2)),
]


THREE = Plan.even(7, 3)


def _train(rank: int, world_size: int) -> tuple[list[Share], list[Share], dict[str, Tensor]]:
    """As it should be, without averages, and handed over to another plan after a segment."""
    right = train_cases(rank, world_size, ON_RANKS)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(GroupEndpoint, "average", lambda self, running: None)
        wrong = train_cases(rank, world_size, ON_RANKS)
    job, stack = job_of(ON_RANKS[0]), stack_of("resnet")
    engine = DistributedEngine(job, job.tasks[0], stack, ArrayFeed(epoch_sizes=SIZES), rank)
    engine.load({"weights": initial_weights("resnet"), "optimizer": {}})
    engine.train(Segment(0, SIZES))
    handed = DistributedTeam(engine, engine.plan, stack, rank, "cpu").hand_over(THREE)
    return right, wrong, handed["weights"]


def test_ranks_in_processes_of_their_own() -> None:
    ranks = run_ranks(3, _train, timeout_s=110)
    for number, case in enumerate(ON_RANKS):
        right, wrong = (merged([rank[way][number] for rank in ranks]) for way in (0, 1))
        assert not faults(case, right), str(case)
        assert any("running_mean" in line for line in faults(case, wrong)), str(case)
    end = reference(ON_RANKS[0]).ends[0]
    values = {**end.weights, **end.running}
    for stage, (_, _, handed) in zip(THREE.stages, ranks, strict=True):
        names = stack_of("resnet").tensor_names(stage.first, stage.last)
        assert not differences(handed, {name: values[name] for name in names}, 1e-10)


# -- mutants ---------------------------------------------------------------------------------------

Original = Callable[..., Any]


def counts_recomputation(repeated: Original, self: Stage) -> Any:
    """The published AshPipe's recomputation updates BatchNorm twice."""
    return nullcontext()


def evaluates_in_training_mode(
    start: Original, self: Worker, program: Any, *rest: Any, **more: Any
) -> None:
    start(self, program, *rest, **more)
    self.module.train()


def statistics_of_the_batch(run: Original, self: Worker, flight: Any, x: Tensor) -> Any:
    """As if units were normalised with their whole batch: here with statistics that stand still."""
    norms = [part for part in self.module.modules() if isinstance(part, nn.BatchNorm2d)]
    for part in norms:
        part.eval()
    try:
        return run(self, flight, x)
    finally:
        for part in norms:
            part.train(self.program.training)


def averages_nothing(average: Original, copies: Sequence[Any]) -> None:
    """Every replica goes on with its own; the first speaks for all."""


def first_replica_only(average: Original, copies: Sequence[Any]) -> None:
    for copy in copies[1:]:
        for name, value in copies[0].items():
            copy[name].copy_(value)


MUTANTS: list[tuple[Original, Any, str, Case]] = [
    (counts_recomputation, Stage, "repeated", of("resnet", "ashpipe", 2, recompute=True)),
    (statistics_of_the_batch, Worker, "_run", of("resnet", "gpipe", 2, 3)),
    (averages_nothing, inprocess, "average_copies", of("resnet", "ashpipe", 2, replicas=(2, 1))),
    (first_replica_only, inprocess, "average_copies", of("resnet", "dp", 1, 1, (2,))),
    (first_replica_only, inprocess, "average_copies", of("norms", "pipedream", 2, replicas=(1, 2))),
]


@pytest.mark.parametrize(
    ("mutant", "owner", "name", "case"),
    MUTANTS,
    ids=[f"{mutant.__name__}-{case.system}" for mutant, *_, case in MUTANTS],
)
def test_a_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutant: Original, owner: Any, name: str, case: Case
) -> None:
    original, calls = getattr(owner, name), []

    def mutated(*args: Any) -> Any:
        calls.append(name)
        return mutant(original, *args)

    monkeypatch.setattr(owner, name, mutated)
    found = faults(case, train_in_process(case))
    assert calls
    assert any("running_mean" in line for line in found), found


def test_an_evaluation_that_updates_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    case = of("resnet", "gpipe", 2, 2)
    engine, validation = engine_of(case), ArrayFeed(epoch_sizes=(37,), data=1, augmented=False)
    engine.train(Segment(0, SIZES))
    running = reference(case).ends[0].running
    start = Worker.start
    monkeypatch.setattr(Worker, "start", lambda *a, **k: evaluates_in_training_mode(start, *a, **k))
    engine.evaluate(validation, 37, 8)
    weights = engine.state()["weights"]
    assert differences({name: weights[name] for name in running}, running, 1e-10)


def test_a_model_that_the_references_cannot_have_by_chance() -> None:
    """Cut otherwise, the same batches give other weights: the rule of a unit matters."""
    by_cut = [
        train_in_process(of("resnet", "gpipe", 1, micro_batches)).weights[4]
        for micro_batches in (1, 3)
    ]
    assert differences(by_cut[0], by_cut[1], 1e-3)


def test_running_statistics_begin_as_torch_has_them() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        model(torch.randn(8, 4))
    stack = LayerStack.from_module(model, "per-unit")
    weights = stack.initial_weights(0, 2, 0, dtype=torch.float64)
    fresh = nn.BatchNorm1d(3).double().state_dict()
    for name, value in fresh.items():
        assert torch.equal(weights[f"1.{name}"], value)
        assert weights[f"1.{name}"].dtype == value.dtype
