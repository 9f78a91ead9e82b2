"""Models, data and references of the transparency tests, for the test process and for ranks.

A pipeline is transparent if its losses, gradients and weights are those of its reference: plain
training for the synchronous systems, delayed gradients for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models import VGG, AlexNet, ResNet
from torchvision.models.resnet import BasicBlock, Bottleneck

from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.job import DataSpec, Job, LearningRate, ModelSpec, OptimizerSpec, Task
from runtimes.model.stack import LayerStack
from runtimes.plan import Plan
from tests.oracles import asynchronous
from tests.oracles.synchronous import Batch, History, Recipe, State, train, vision_transformer
from tests.oracles.units import flushed

__all__ = [
    "BATCH_NORM",
    "EPOCH",
    "MODELS",
    "ODD_EPOCHS",
    "SAMPLES",
    "SGD",
    "ArrayFeed",
    "Case",
    "Outcome",
    "differences",
    "engine_of",
    "faults",
    "initial_weights",
    "job_of",
    "recipe_of",
    "reference",
    "stack_of",
    "train_in_process",
]

VIT: dict[str, Any] = {
    "img_size": 8,
    "patch_size": 4,
    "in_chans": 1,
    "num_classes": 4,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
}
DROPS = {
    "pos_drop_rate": 0.1,
    "attn_drop_rate": 0.15,
    "proj_drop_rate": 0.1,
    "drop_path_rate": 0.3,
    "drop_rate": 0.1,
}


def _widths() -> nn.Sequential:
    """Every boundary has another shape; the first layers have no weights, and one is nested."""
    return nn.Sequential(
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(64, 24),
        nn.GELU(),
        nn.Sequential(nn.Linear(24, 12), nn.Dropout(0.2)),
        nn.LayerNorm(12),
        nn.Linear(12, 20),
        nn.Tanh(),
        nn.Linear(20, 4),
    )


def _in_place() -> nn.Sequential:
    """Layers that overwrite their input, which at a cut somebody else may still need."""
    return nn.Sequential(
        nn.ELU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.ELU(inplace=True),
        nn.Linear(16, 8),
        nn.Dropout(0.2, inplace=True),
        nn.Linear(8, 4),
    )


def _on_meta(kind: type[nn.Module], *arguments: Any, **more: Any) -> nn.Module:
    """A model of torchvision's, whose parts are then replaced by ones of a size for tests."""
    with torch.device("meta"):
        return kind(*arguments, **more)


def _classifier(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 10), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.Linear(10, 8), nn.ReLU(inplace=True), nn.Dropout(0.2),
        nn.Linear(8, 4),
    )  # fmt: skip


def _alexnet() -> nn.Module:
    model = _on_meta(AlexNet)
    model.features = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 1),
        nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(6, 5, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    )  # fmt: skip
    model.avgpool = nn.AdaptiveAvgPool2d(2)
    model.classifier = nn.Sequential(nn.Dropout(0.3), *_classifier(20))
    return model


def _normalised(inside: int, outside: int) -> list[nn.Module]:
    # Without a bias, whose gradient would be 0 but for rounding.
    convolution = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]


def _vgg() -> nn.Module:
    features = nn.Sequential(
        *_normalised(1, 4), nn.MaxPool2d(2), *_normalised(4, 6), *_normalised(6, 6), nn.MaxPool2d(2)
    )
    model = _on_meta(VGG, features, init_weights=False)
    model.avgpool = nn.AdaptiveAvgPool2d(3)
    model.classifier = _classifier(54)
    return model


def _reduced(kind: Any, inside: int, width: int, outside: int, stride: int) -> nn.Module:
    """A block that shrinks the map, or widens it."""
    down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
    block: nn.Module = kind(inside, width, stride, down)
    return block


def _resnet() -> nn.Module:
    """Maps of 8, 4 and 2 pixels a side."""
    model = _on_meta(ResNet, BasicBlock, [1, 1, 1, 1])
    model.conv1, model.bn1 = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
    model.layer1 = nn.Sequential(BasicBlock(4, 4))
    model.layer2 = nn.Sequential(_reduced(BasicBlock, 4, 6, 6, 2), BasicBlock(6, 6))
    model.layer3 = nn.Sequential(_reduced(Bottleneck, 6, 2, 8, 1))
    model.layer4 = nn.Sequential(Bottleneck(8, 2))
    model.fc = nn.Linear(8, 4)
    return model


def _norms() -> nn.Sequential:
    """BatchNorm of one value a channel and sample, without weights, and at an end of a stage."""
    return nn.Sequential(
        nn.Sequential(nn.BatchNorm2d(1), nn.GELU()),
        nn.Flatten(),
        nn.Linear(64, 12, bias=False),
        nn.Sequential(nn.BatchNorm1d(12, momentum=0.3), nn.ReLU(inplace=True)),
        nn.Dropout(0.2),
        nn.Linear(12, 8, bias=False),
        nn.BatchNorm1d(8, affine=False),
        nn.Linear(8, 4),
    )


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "vit": lambda: vision_transformer(**VIT),
    "vit-drops": lambda: vision_transformer(**VIT, **DROPS),
    "vit-registers": lambda: vision_transformer(
        **VIT, **DROPS, reg_tokens=2, global_pool="avg", qk_norm=True, init_values=0.5
    ),
    "widths": _widths,
    "in-place": _in_place,
    "alexnet": _alexnet,
    "vgg": _vgg,
    "resnet": _resnet,
    "norms": _norms,
}
#: Those whose results depend on how a batch is cut.
BATCH_NORM = frozenset({"vgg", "resnet", "norms"})
#: Three batches an epoch, the last of them smaller than most numbers of units and of replicas.
EPOCH = (18, 18, 1)
SAMPLES = sum(EPOCH)
#: By batch size: an epoch of an odd number of batches, the last of them partial.
ODD_EPOCHS = {85: (85, 85, 20), 18: (18, 18, 18, 18, 5), 7: (7, 7, 7, 7, 3), 1: (1,) * 5}
SEED = 2**32 + 11
EPOCHS = 3
#: Relative to the size of each tensor, by precision.
LIMITS = {"float64": 1e-10, "float32": 1e-4}
SGD = OptimizerSpec("sgd", lr=0.2, momentum=0.9, weight_decay=0.01)
NESTEROV = OptimizerSpec("sgd", lr=0.1, momentum=0.8, nesterov=True)
# A larger eps than usual: a key bias has no gradient but rounding, which AdamW divides by itself.
ADAMW = OptimizerSpec("adamw", lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-4)
OPTIMIZERS = {"sgd": SGD, "nesterov": NESTEROV, "adamw": ADAMW}


@dataclass(frozen=True)
class Case:
    """One way to train one of the models: everything but system, plan and segments decides the
    reference."""

    system: str
    stages: int = 1
    micro_batches: int = 1
    replicas: tuple[int, ...] | None = None
    recompute: bool = False
    cuts: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    segments: tuple[tuple[int, ...], ...] = (EPOCH, (18, 18))
    model: str = "vit-drops"
    optimizer: str = "sgd"
    precision: str = "float64"
    smoothing: float = 0.1
    clip: float | None = None
    clip_by: str = "global"
    #: Batches of an epoch, of which segments are made.
    epoch: tuple[int, ...] = EPOCH
    pipelines: int = 1

    def __str__(self) -> str:
        words = [self.system, *(f"{key}={value}" for key, value in self.options)]
        words += [f"S{self.stages}", f"M{self.micro_batches}"]
        words += [f"N{self.pipelines}"] * (self.pipelines > 1)
        words += [f"R{'-'.join(map(str, self.replicas))}"] if self.replicas else []
        words += ["recompute"] * self.recompute
        words += [f"clip-{self.clip_by}"] * (self.clip is not None)
        words += [f"B{self.epoch[0]}"] * (self.epoch != EPOCH)
        words += [f"cuts{'-'.join(map(str, self.cuts))}"] if self.cuts else []
        return " ".join([*words, self.model, self.optimizer, self.precision])

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for segment in self.segments for size in segment)

    @property
    def plan(self) -> Plan:
        return Plan.even(
            len(stack_of(self.model)),
            self.stages,
            self.replicas,
            micro_batches=self.micro_batches,
            pipelines=self.pipelines,
            recompute=self.recompute,
            cuts=self.cuts,
        )


@dataclass
class Outcome:
    """What came of training by a case, merged over ranks: ``losses`` by step; by the last step of
    each segment the ``gradients`` of every rank and the ``weights``; in the end the optimizer's
    state by parameter and state name."""

    losses: dict[int, float] = field(default_factory=dict)
    gradients: dict[int, list[dict[str, Tensor]]] = field(default_factory=dict)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ArrayFeed:
    """Shuffled anew every epoch, and brighter with the step, if ``augmented``.  A feed as any
    other, but of plain arrays, which the reference gets too; ``data`` tells data sets apart."""

    precision: str = "float64"
    epoch_sizes: tuple[int, ...] = EPOCH
    data: int = 0
    augmented: bool = True

    @property
    def arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return _arrays(self.data, sum(self.epoch_sizes))

    def batch_sizes(self) -> tuple[int, ...]:
        return self.epoch_sizes

    def indices(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        epoch, position = divmod(step, len(self.epoch_sizes))
        order = np.random.default_rng((epoch, 5)).permutation(sum(self.epoch_sizes))
        first = sum(self.epoch_sizes[:position])
        return order[first : first + self.epoch_sizes[position]]

    def batch(self, step: int) -> Batch:
        """The same once more, whole, for the reference."""
        indices, (images, labels) = self.indices(step), self.arrays
        return Batch(indices, images[indices] * self._gain(step), labels[indices])

    def images(self, indices: np.ndarray[Any, Any], step: int) -> Tensor:
        values = self.arrays[0][indices] * self._gain(step)
        return torch.from_numpy(values).to(getattr(torch, self.precision))

    def _gain(self, step: int) -> float:
        return 1 + 0.1 * (step % 4) if self.augmented else 1.0

    def labels(self, indices: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(self.arrays[1][indices])


@cache
def _arrays(data: int, samples: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = np.random.default_rng(data)
    return generator.normal(size=(samples, 1, 8, 8)), generator.integers(0, 4, samples)


@cache
def stack_of(model: str) -> LayerStack:
    batch_norm: Any = "per-unit" if model in BATCH_NORM else None
    return LayerStack.from_module(MODELS[model](), batch_norm)


@cache
def initial_weights(model: str) -> dict[str, Tensor]:
    """Values larger than a usual initialisation's, so that every layer's effect is seen."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        state = MODELS[model]().double().state_dict()
        return {name: _larger(name, value) for name, value in state.items()}


def _larger(name: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value + 7
    noisy = value + 0.2 * torch.randn_like(value)
    return noisy.abs() if name.endswith("running_var") else noisy


def job_of(case: Case) -> Job:
    """The rate falls to a half after the first epoch, so a wrong step index shows."""
    return Job(
        tasks=(Task("t", case.system, case.plan, dict(case.options)),),
        model=ModelSpec("VisionTransformer"),
        data=DataSpec("", ""),
        batch_size=case.epoch[0],
        epochs=EPOCHS,
        seed=SEED,
        label_smoothing=case.smoothing,
        optimizer=replace(
            OPTIMIZERS[case.optimizer],
            clip=case.clip,
            clip_by=case.clip_by,  # type: ignore[arg-type]
        ),
        learning_rate=LearningRate("step", milestones=(1.0,), gamma=0.5),
        precision=case.precision,  # type: ignore[arg-type]
    )


def engine_of(case: Case, plan: Plan | None = None) -> InProcess:
    job = job_of(case)
    if plan is not None:
        job = replace(job, tasks=(replace(job.tasks[0], plan=plan),))
    feed = ArrayFeed(case.precision, case.epoch)
    engine = InProcess(job, job.tasks[0], stack_of(case.model), feed, keep_gradients=True)
    engine.load({**engine.state(), "weights": initial_weights(case.model)})
    return engine


def train_in_process(case: Case) -> Outcome:
    engine, outcome, first = engine_of(case), Outcome(), 0
    for segment in case.segments:
        for report in engine.train(Segment(first, segment)):
            for step, share in report.losses.items():
                outcome.losses[step] = outcome.losses.get(step, 0.0) + share
        first += len(segment)
        outcome.gradients[first - 1] = [
            worker.copies[0].updates.last_gradients for worker in engine.workers
        ]
        # State refers to the live tensors, which the next segment changes.
        weights = engine.state()["weights"].items()
        outcome.weights[first - 1] = {name: weight.clone() for name, weight in weights}
    outcome.optimizer = engine.state()["optimizer"]
    return outcome


def reference(case: Case) -> History:
    """What the same batches give in one process; equal references are computed once."""
    bare = replace(case, recompute=False, cuts=())
    if case.model in BATCH_NORM:
        delayed = case.system in ("ashpipe", "pipedream", "pipedream_2bw")
        options = case.options if case.system == "pipedream" else ()
        bare = replace(bare, system=case.system if delayed else "flush", options=options)
    elif case.system == "ashpipe":
        bare = replace(bare, replicas=None, options=())
    elif case.system == "pipedream_2bw":
        bare = replace(bare, replicas=None)
    elif case.system != "pipedream":
        plain = replace(bare, system="", stages=1, micro_batches=1, replicas=None, options=())
        bare = replace(plain, segments=(case.sizes,))
    return _reference(bare)


def recipe_of(job: Job) -> Recipe:
    """What the references need to know of a job's recipe, but for its learning rates."""
    spec = job.optimizer
    return Recipe(
        spec.name,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        weight_decay=spec.weight_decay,
        betas=spec.betas,
        eps=spec.eps,
        label_smoothing=job.label_smoothing,
        seed=job.seed,
        clip=spec.clip,
        clip_by=spec.clip_by,
    )


@cache
def _reference(case: Case) -> History:
    spec, recipe = OPTIMIZERS[case.optimizer], recipe_of(job_of(case))
    feed, steps = ArrayFeed(epoch_sizes=case.epoch), range(len(case.sizes))
    rates = [spec.lr if step < len(case.epoch) else spec.lr * 0.5 for step in steps]
    dtype = getattr(torch, case.precision)
    batches = [feed.batch(step) for step in steps]
    start: Any = MODELS[case.model], initial_weights(case.model), recipe
    if not case.system:
        return train(*start, batches, rates, dtype)
    if case.model in BATCH_NORM:
        start = MODELS[case.model], _state(case.model), recipe
    following = iter(batches)
    segments = [[next(following) for _ in segment] for segment in case.segments]
    ranges = [(stage.first, stage.last) for stage in case.plan.stages]
    rest = ranges, segments, rates, dtype
    units: dict[str, Any] = {"micro_batches": case.micro_batches, "replicas": case.replicas}
    if case.system == "flush":
        return flushed(*start, *rest, **units)
    if case.system == "ashpipe":
        return asynchronous.ashpipe(*start, *rest, replicas=case.replicas)
    if case.system == "pipedream_2bw":
        return asynchronous.pipedream_2bw(*start, *rest, **units)
    options = dict(case.options)
    options.pop("drain", None)
    return asynchronous.pipedream(*start, *rest, replicas=case.replicas, **options)


def _state(model: str) -> State:
    """The initial weights, with running statistics apart."""
    values, buffers = initial_weights(model), dict(MODELS[model]().named_buffers())
    weights = {name: value for name, value in values.items() if name not in buffers}
    return State(weights, running={name: values[name] for name in buffers})


def differences(
    ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], limit: float
) -> list[str]:
    """The tensors that are further than ``limit`` apart, in the Euclidean norm, relative to the
    reference; and the names that only one side has.

    A tensor ten thousand times smaller than the largest counts as that big: the gradient of a
    key's bias is 0 but for rounding, whoever computes it.
    """
    wrong = [f"{name}: on one side only" for name in sorted(ours.keys() ^ reference.keys())]
    sizes = {name: float(value.double().norm()) for name, value in reference.items()}
    least = 1e-4 * max(sizes.values(), default=0.0)
    for name in ours.keys() & reference.keys():
        error = float((ours[name].double() - reference[name].double()).norm())
        # Written so that a NaN is a difference.
        if not error <= limit * max(sizes[name], least):
            wrong.append(f"{name}: off by {error:.2e} of {sizes[name]:.2e}, {limit:.0e} allowed")
    return wrong


def faults(case: Case, outcome: Outcome) -> list[str]:
    """What of ``outcome`` differs from the reference: nothing, if all is well."""
    history, limit = reference(case), LIMITS[case.precision]
    found = []
    for step, update in enumerate(history.updates):
        loss = outcome.losses.get(step)
        if loss is None or not abs(loss - update.loss) <= limit * update.loss:
            found.append(f"loss of step {step}: {loss}, but {update.loss}")
    last = -1
    # The references of synchronous systems have no drains, and no running statistics.
    drains = [end.running for end in history.ends] if case.model in BATCH_NORM else []
    for segment, running in zip_longest(case.segments, drains, fillvalue={}):
        last += len(segment)
        update, seen = history.updates[last], set()
        for rank, gradients in enumerate(outcome.gradients[last]):
            seen |= gradients.keys()
            expected = {name: update.gradients[name] for name in gradients}
            wrong = differences(gradients, expected, limit)
            found += [f"gradient of step {last} on rank {rank}: {line}" for line in wrong]
        found += [f"no gradient of {name}" for name in update.gradients.keys() - seen]
        wrong = differences(outcome.weights[last], update.weights | dict(running), limit)
        found += [f"weight after step {last}: {line}" for line in wrong]
    wrong = differences(_flat(outcome.optimizer), _flat(history.optimizer), limit)
    return found + [f"optimizer's state: {line}" for line in wrong]


def _flat(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    return {
        f"{name}, {key}": torch.as_tensor(value)
        for name, values in state.items()
        for key, value in values.items()
    }
