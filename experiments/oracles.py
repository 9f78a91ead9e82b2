"""How far a system's weights are from those of an oracle: plain PyTorch in one process.

The oracles share no code with what they judge.  They are part of the tests, and so of a checkout of
the repository, not of an installation.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any

import torch
from torch import Tensor, nn

from experiments.errors import UserError
from experiments.paths import REPOSITORY
from runtimes.avgpipe import AvgPipe
from runtimes.conformance.cases import EPOCH, SEGMENTS, Case
from runtimes.conformance.feed import MemoryFeed
from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.job import DataSpec, Job, LearningRate, ModelSpec, OptimizerSpec, Task
from runtimes.model.stack import LayerStack
from runtimes.schedule.action import Action, Op
from runtimes.system import FlushSystem

__all__ = ["check_oracles", "oracle_error"]

SEED = 5
#: The rate falls to a half after the first epoch.
SGD = OptimizerSpec("sgd", lr=0.1, momentum=0.9, weight_decay=0.01)
RATE = LearningRate("step", milestones=(1.0,), gamma=0.5)


def check_oracles() -> None:
    """UserError if this is not a checkout."""
    folder = REPOSITORY / "tests" / "oracles"
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not there, and the oracles with it: run pipebench from a checkout of "
            "the repository"
        )


def _oracles(name: str) -> Any:
    """Module ``name`` of tests/oracles, wherever the working directory and sys.path lead."""
    check_oracles()
    for package, parent in (("tests", REPOSITORY), ("tests.oracles", REPOSITORY / "tests")):
        if package not in sys.modules:
            spec = PathFinder.find_spec(package, [str(parent)])
            assert spec is not None
            sys.modules[package] = module_from_spec(spec)
    return importlib.import_module(f"tests.oracles.{name}")


def model() -> nn.Sequential:
    """Every kind of layer whose gradient depends on its weights, its input, or its mask."""
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.LayerNorm(12),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(12, 12),
        nn.LayerNorm(12),
        nn.GELU(),
        nn.Linear(12, 10),
        nn.LayerNorm(10),
        nn.Linear(10, 3),
    )


def oracle_error(case: Case) -> float:
    """max over tensors of ‖ours − oracle's‖ / ‖oracle's‖, after all segments.

    A tensor ten thousand times smaller than the largest counts as that big.
    """
    generator = torch.Generator().manual_seed(SEED)
    samples = sum(EPOCH)
    feed = MemoryFeed(
        torch.randn(samples, 6, dtype=torch.float64, generator=generator),
        torch.randint(0, 3, (samples,), generator=generator),
        EPOCH,
    )
    stack = LayerStack.from_module(model())
    initial = stack.initial_weights(0, len(stack), SEED, dtype=torch.float64)
    ours, orders = _trained(case, stack, feed)
    reference = _reference(case, len(stack), initial, feed, orders)
    assert ours.keys() == reference.keys()
    least = 1e-4 * max(float(value.norm()) for value in reference.values())
    return max(
        float((ours[name] - value).norm()) / max(float(value.norm()), least)
        for name, value in reference.items()
    )


def _trained(
    case: Case, stack: LayerStack, feed: MemoryFeed
) -> tuple[dict[str, Tensor], list[list[list[int]]]]:
    """The weights, and by segment and stage the pipelines in the order in which they averaged."""
    task = Task("conformance", case.system, case.plan(len(stack)), case.options)
    job = Job(
        tasks=(task,),
        model=ModelSpec("oracle"),
        data=DataSpec("", ""),
        batch_size=EPOCH[0],
        epochs=SEGMENTS * case.epochs,
        seed=SEED,
        label_smoothing=0.1,
        optimizer=SGD,
        learning_rate=RATE,
        precision="float64",
    )
    orders: list[list[list[int]]] = []

    def observe(action: Action) -> None:
        if action.op is Op.AVERAGE:
            orders[-1][action.stage].append(action.pipeline)

    engine = InProcess(job, task, stack, feed, before=observe)
    for segment in range(SEGMENTS):
        orders.append([[] for _ in range(case.stages)])
        engine.train(Segment(segment * len(case.batches), case.batches))
    weights: dict[str, Tensor] = engine.state()["weights"]
    return weights, orders


def _reference(
    case: Case,
    layers: int,
    weights: dict[str, Tensor],
    feed: MemoryFeed,
    orders: list[list[list[int]]],
) -> dict[str, Tensor]:
    plain = _oracles("synchronous")
    recipe = plain.Recipe(
        momentum=SGD.momentum, weight_decay=SGD.weight_decay, label_smoothing=0.1, seed=SEED
    )
    segment = len(case.batches)
    steps = range(SEGMENTS * segment)
    batches = []
    for step in steps:
        ids = feed.indices(step)
        images, labels = feed.images(ids, step).numpy(), feed.labels(ids).numpy()
        batches.append(plain.Batch(ids, images, labels))
    rates = [SGD.lr if step < len(EPOCH) else SGD.lr * RATE.gamma for step in steps]
    system, plan = case.build(), case.plan(layers)
    segments = [batches[first : first + segment] for first in steps[::segment]]
    ranges = [(stage.first, stage.last) for stage in plan.stages]
    found: dict[str, Tensor]
    if isinstance(system, AvgPipe):
        elastic = _oracles("avgpipe")
        start = elastic.Ensemble.of(plain.State(weights), plan.pipelines)
        tie = elastic.Elastic(plan.pipelines, system.strength(plan), system.every, system.form)
        if system.averaging == "asynchronous":
            history = elastic.asynchronous(
                model, start, recipe, tie, ranges, segments, rates, orders
            )
        else:
            history = elastic.synchronous(model, start, recipe, tie, segments, rates)
        found = history.ends[-1].weights
        return found
    if isinstance(system, FlushSystem):
        history = plain.train(model, weights, recipe, batches, rates)
    else:
        oracle = getattr(_oracles("asynchronous"), case.system)
        history = oracle(model, weights, recipe, ranges, segments, rates, **_arguments(case))
    found = history.updates[-1].weights
    return found


def _arguments(case: Case) -> dict[str, Any]:
    """What an oracle needs to know beside the recipe and the data.  An order of AshPipe's, or a
    number of micro-batches, is nothing to it: they change no result.  It is told the segments."""
    if case.system == "pipedream":
        options = {name: value for name, value in case.options.items() if name != "drain"}
        return {"replicas": case.replicas, **options}
    return {}
