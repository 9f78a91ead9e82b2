"""torch's DDP and pipelining against plain PyTorch: same losses, weights and accuracy."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from timm.layers import DropPath
from torch import Tensor, nn

from runtimes.execution.engine import Engine, Segment, SegmentReport
from runtimes.execution.optimizer import learning_rate
from runtimes.job import DataSpec, Job, LearningRate, ModelSpec, OptimizerSpec, Task
from runtimes.model.stack import LayerStack
from runtimes.peers.ddp import DdpEngine
from runtimes.peers.pipelining import PipeliningEngine
from runtimes.plan import Plan
from tests.oracles.synchronous import Batch, History, Recipe, evaluate, train, vision_transformer
from tests.processes import run_ranks

CLASSES = 5
VIT: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 4,
    "in_chans": 1,
    "num_classes": CLASSES,
    "embed_dim": 8,
    "depth": 2,
    "num_heads": 2,
    "pos_drop_rate": 0.1,
    "proj_drop_rate": 0.2,
    "attn_drop_rate": 0.2,
    "drop_path_rate": 0.4,
}


class Feed:
    """``samples`` random images, in another order each epoch."""

    def __init__(self, samples: int, batch_size: int, dtype: torch.dtype = torch.float64) -> None:
        generator = np.random.default_rng(samples)
        self.batch_size = batch_size
        self.dtype = dtype
        self.values = generator.normal(size=(samples, 1, 8, 8))
        self.classes = generator.integers(CLASSES, size=samples)

    def batch_sizes(self) -> tuple[int, ...]:
        full, rest = divmod(len(self.values), self.batch_size)
        return (self.batch_size,) * full + ((rest,) if rest else ())

    def indices(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        epoch, batch = divmod(step, len(self.batch_sizes()))
        order = np.random.default_rng(epoch).permutation(len(self.values))
        return order[batch * self.batch_size :][: self.batch_size]

    def images(self, indices: np.ndarray[Any, Any], step: int) -> Tensor:
        return torch.from_numpy(self.values[indices]).to(self.dtype)

    def labels(self, indices: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(self.classes[indices])


def build(model: str) -> nn.Module:
    if model == "vit":
        return vision_transformer(**VIT)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.Flatten(),
        nn.Sequential(nn.Linear(108, 9), nn.GELU(), nn.Dropout(0.3)),
        DropPath(0.2),
        nn.Linear(9, CLASSES),
    )


SGD = OptimizerSpec("sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAMW = OptimizerSpec("adamw", lr=0.01, weight_decay=0.1)


def job_of(
    system: str, plan: Plan, batch_size: int, optimizer: OptimizerSpec = SGD, **changes: Any
) -> Job:
    job = Job(
        tasks=(Task(system, system, plan),),
        model=ModelSpec("VisionTransformer", VIT),
        data=DataSpec("", ""),
        batch_size=batch_size,
        epochs=4,
        seed=3,
        label_smoothing=0.1,
        optimizer=optimizer,
        learning_rate=LearningRate("cosine", warmup_epochs=1),
        precision="float64",
    )
    return replace(job, **changes)


def engine_of(job: Job, model: str, feed: Feed, rank: int) -> Engine:
    stack = LayerStack.from_module(build(model))
    kind = DdpEngine if job.tasks[0].system == "torch-ddp" else PipeliningEngine
    return kind(job, job.tasks[0], stack, feed, rank)


def sizes(feed: Feed, first: int, last: int) -> tuple[int, ...]:
    return tuple(len(feed.indices(step)) for step in range(first, last))


def merged(states: list[Any]) -> dict[str, dict[str, Any]]:
    whole: dict[str, dict[str, Any]] = {"weights": {}, "optimizer": {}}
    for state in states:
        for kind, values in state.items():
            assert not whole[kind].keys() & values.keys(), "two ranks own the same parameter"
            whole[kind].update(values)
    return whole


def trained(
    rank: int, world_size: int, job: Job, model: str, feed: Feed, steps: int
) -> tuple[list[SegmentReport], list[Any], Any]:
    """Two segments, an evaluation before, between and after them."""
    engine = engine_of(job, model, feed, rank)
    middle = steps // 2
    accuracies = [engine.evaluate(feed, 7, 4)]
    reports = [engine.train(Segment(0, sizes(feed, 0, middle)))]
    accuracies.append(engine.evaluate(feed, 7, 4))
    reports.append(engine.train(Segment(middle, sizes(feed, middle, steps))))
    accuracies.append(engine.evaluate(feed, len(feed.values), 4))
    return reports, accuracies, engine.state()


def initial(job: Job, model: str) -> dict[str, Tensor]:
    stack = LayerStack.from_module(build(model))
    return stack.initial_weights(0, len(stack), job.seed, "cpu", torch.float64)


def reference(job: Job, model: str, feed: Feed, steps: int) -> History:
    spec = job.optimizer
    recipe = Recipe(
        spec.name,
        spec.momentum,
        spec.nesterov,
        spec.weight_decay,
        spec.betas,
        spec.eps,
        job.label_smoothing,
        job.seed,
    )
    batches = []
    for step in range(steps):
        indices = feed.indices(step)
        batches.append(Batch(indices, feed.values[indices], feed.classes[indices]))
    per_epoch = len(feed.batch_sizes())
    rates = [
        learning_rate(spec, job.learning_rate, step, per_epoch, job.epochs) for step in range(steps)
    ]
    return train(lambda: build(model), initial(job, model), recipe, batches, rates)


def check(job: Job, model: str, feed: Feed, steps: int = 5, tolerance: float = 1e-10) -> None:
    """Losses, weights, optimizer state and evaluations of all ranks against the reference."""
    expected = reference(job, model, feed, steps)
    results = run_ranks(job.world_size, trained, job, model, feed, steps)
    losses = [
        sum(report.losses.get(step, 0.0) for reports, _, _ in results for report in reports)
        for step in range(steps)
    ]
    assert losses == pytest.approx(expected.losses, rel=tolerance)

    state = merged([state for _, _, state in results])
    weights = expected.updates[-1].weights
    assert state["weights"].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(
            state["weights"][name].double(), value, rtol=tolerance, atol=tolerance / 100
        )
    assert state["optimizer"].keys() == expected.optimizer.keys()
    for name, values in expected.optimizer.items():
        for key, value in values.items():
            found = state["optimizer"][name][key]
            torch.testing.assert_close(
                found.double(), value.double(), rtol=tolerance, atol=tolerance / 100
            )

    middle = expected.updates[steps // 2 - 1].weights
    for number, (seen, count) in enumerate(
        [(initial(job, model), 7), (middle, 7), (weights, len(feed.values))]
    ):
        wanted = evaluate(lambda: build(model), seen, feed.values[:count], feed.classes[:count])
        shares = [accuracies[number] for _, accuracies, _ in results]
        assert sum(share.samples for share in shares) == count
        assert sum(share.correct for share in shares) == wanted[0]
        assert sum(share.loss_sum for share in shares) == pytest.approx(wanted[1], rel=tolerance)


# Batches of 8, 8, 3 or 1, 8, 8: three ranks cut 8 unevenly, and 1 leaves two of them empty.
@pytest.mark.parametrize(
    ("model", "ranks", "samples", "optimizer"),
    [("vit", 2, 19, ADAMW), ("sequential", 3, 17, SGD)],
)
def test_ddp_equals_plain_training(
    model: str, ranks: int, samples: int, optimizer: OptimizerSpec
) -> None:
    plan = Plan.even(len(LayerStack.from_module(build(model))), 1, [ranks])
    check(job_of("torch-ddp", plan, 8, optimizer), model, Feed(samples, 8))


@pytest.mark.parametrize(
    ("system", "model", "stages", "micro_batches", "samples", "optimizer"),
    [
        ("torch-gpipe", "vit", 2, 4, 19, SGD),
        ("torch-gpipe", "sequential", 3, 2, 17, ADAMW),
        ("torch-gpipe", "sequential", 4, 8, 19, SGD),
        ("torch-gpipe", "sequential", 1, 2, 17, SGD),
        ("torch-1f1b", "sequential", 2, 2, 17, ADAMW),
        ("torch-1f1b", "vit", 3, 8, 19, SGD),
        ("torch-1f1b", "sequential", 5, 8, 17, SGD),
        ("torch-1f1b", "sequential", 1, 1, 19, ADAMW),
    ],
)
def test_pipelining_equals_plain_training(
    system: str, model: str, stages: int, micro_batches: int, samples: int, optimizer: OptimizerSpec
) -> None:
    layers = len(LayerStack.from_module(build(model)))
    plan = Plan.even(layers, stages, micro_batches=micro_batches)
    check(job_of(system, plan, 8, optimizer), model, Feed(samples, 8))


@pytest.mark.parametrize("system", ["torch-ddp", "torch-1f1b"])
def test_lower_precisions_stay_near(system: str) -> None:
    plan = Plan.even(5, 1, [2]) if system == "torch-ddp" else Plan.even(5, 2, micro_batches=2)
    job = job_of(system, plan, 8, precision="float32")
    check(job, "sequential", Feed(17, 8, torch.float32), tolerance=1e-4)
    job = replace(job, precision="bf16")
    exact = reference(job, "sequential", Feed(17, 8), 5)
    results = run_ranks(2, trained, job, "sequential", Feed(17, 8, torch.float32), 5)
    losses = [
        sum(report.losses.get(step, 0.0) for reports, _, _ in results for report in reports)
        for step in range(5)
    ]
    assert losses == pytest.approx(exact.losses, rel=3e-2)
    assert losses != pytest.approx(exact.losses, rel=1e-6), "nothing was computed in bfloat16"
    for tensor in merged([state for _, _, state in results])["weights"].values():
        assert tensor.dtype == torch.float32


def resumed(
    rank: int, world_size: int, first: Job, second: Job, feed: Feed
) -> tuple[list[SegmentReport], Any, list[SegmentReport], Any]:
    """Five updates at once, and five of which the last two on what another engine saved."""
    whole = engine_of(first, "sequential", feed, rank)
    straight = [whole.train(Segment(0, sizes(feed, 0, 5)))]
    early = engine_of(first, "sequential", feed, rank)
    early.train(Segment(0, sizes(feed, 0, 3)))
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, early.state())
    saved = merged(states)
    before = copy.deepcopy(saved)
    late = engine_of(second, "sequential", feed, rank)
    # An engine that has its own state and weights already must drop them.
    late.train(Segment(0, sizes(feed, 0, 1)))
    late.load(saved)
    again = [late.train(Segment(3, sizes(feed, 3, 5)))]
    for name, tensor in before["weights"].items():
        assert torch.equal(tensor, saved["weights"][name]), "a loaded state was trained on"
    return straight, whole.state(), again, late.state()


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        ("torch-ddp", "torch-ddp", ADAMW),
        ("torch-1f1b", "torch-1f1b", SGD),
        ("torch-gpipe", "torch-ddp", ADAMW),
        ("torch-ddp", "torch-gpipe", SGD),
    ],
)
def test_training_goes_on_from_a_saved_state(
    before: str, after: str, optimizer: OptimizerSpec
) -> None:
    plans = {
        "torch-ddp": Plan.even(5, 1, [2]),
        "torch-gpipe": Plan.even(5, 2, micro_batches=2),
        "torch-1f1b": Plan.even(5, 2, micro_batches=2),
    }
    first, second = (job_of(name, plans[name], 8, optimizer) for name in (before, after))
    results = run_ranks(2, resumed, first, second, Feed(19, 8))
    weights = merged([straight for _, straight, _, _ in results])["weights"]
    found = merged([again for _, _, _, again in results])["weights"]
    tolerance = 0.0 if before == after else 1e-10
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance / 100)
    for step in (3, 4):
        expected, loss = (
            sum(report.losses.get(step, 0.0) for result in results for report in result[number])
            for number in (0, 2)
        )
        assert loss == pytest.approx(expected, rel=max(tolerance, 1e-15))


def timed(rank: int, world_size: int, job: Job, feed: Feed) -> SegmentReport:
    return engine_of(job, "sequential", feed, rank).train(Segment(0, sizes(feed, 0, 3)))


@pytest.mark.parametrize("system", ["torch-ddp", "torch-1f1b"])
def test_times_are_parts_of_the_wall(system: str) -> None:
    plan = Plan.even(5, 1, [2]) if system == "torch-ddp" else Plan.even(5, 2, micro_batches=4)
    reports = run_ranks(2, timed, job_of(system, plan, 8), Feed(24, 8))
    for report in reports:
        assert report.breakdown["compute"] > 0
        assert report.breakdown["optimizer"] > 0
        assert min(report.breakdown.values()) >= 0
        assert sum(report.breakdown.values()) <= report.wall_s
    assert [report.peak_in_flight for report in reports] == [1 if system == "torch-ddp" else 2, 1]


def misfit(rank: int, world_size: int, job: Job, feed: Feed) -> str:
    with pytest.raises(ValueError, match="layers|ranks") as info:
        engine_of(job, "sequential", feed, rank)
    return str(info.value)


@pytest.mark.parametrize("system", ["torch-ddp", "torch-gpipe"])
def test_plans_of_another_model_or_group_are_refused(system: str) -> None:
    def job(layers: int, ranks: int) -> Job:
        if system == "torch-ddp":
            return job_of(system, Plan.even(layers, 1, [ranks]), 8)
        return job_of(system, Plan.even(layers, ranks, micro_batches=2), 8)

    (message,) = run_ranks(1, misfit, job(4, 1), Feed(8, 8))
    assert message == "the plan ends at layer 4, but the model has 5 layers"
    (message,) = run_ranks(1, misfit, job(5, 2), Feed(8, 8))
    assert "all 1 ranks of the process group, but its plan has 2" in message
