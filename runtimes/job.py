"""A job: everything one rank needs to know to take part in a run, as plain JSON data.

The launcher writes it, every rank reads it; neither torch nor anything of experiments is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from runtimes.plan import Plan

__all__ = [
    "Augmentation",
    "BatchNorm",
    "BenchSpec",
    "DataSpec",
    "Emulation",
    "Job",
    "LearningRate",
    "ModelSpec",
    "OptimizerSpec",
    "Precision",
    "SwitchSpec",
    "Task",
    "Transport",
    "whole_batches",
]

Precision = Literal["float32", "tf32", "bf16", "float64"]
Transport = Literal["distributed", "in-process"]
BatchNorm = Literal["per-unit"]


@dataclass(frozen=True)
class ModelSpec:
    """``name`` is "VisionTransformer" (timm's class, ``args`` to its constructor), any timm model
    of that class (``args`` to timm.create_model), e.g. "vit_huge_patch14_224", or torchvision's
    AlexNet, a VGG or a ResNet (``args`` to its function), e.g. "vgg16_bn" or "resnet50".

    ``batch_norm``: how BatchNorm runs, without which a model that has it is refused.
    """

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    batch_norm: BatchNorm | None = None


@dataclass(frozen=True)
class Augmentation:
    """Keyed by (seed, epoch, sample): the same on every rank, whatever the split.

    ``cutout`` is the side of the square in pixels (0: off), applied with probability epoch/epochs;
    ``crop_padding`` pixels of random crop (0: off); ``flip``: horizontal, with probability 1/2.
    """

    cutout: int = 0
    crop_padding: int = 0
    flip: bool = False


@dataclass(frozen=True)
class DataSpec:
    """Directories prepared by experiments: images.npy (N, C, H, W) uint8, labels.npy (N,) int64,
    meta.json {"mean": [C floats], "std": [C floats], "classes": int}, of values scaled to 0 … 1.
    """

    train: str
    validation: str
    augmentation: Augmentation = Augmentation()


@dataclass(frozen=True)
class OptimizerSpec:
    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    #: Largest norm of the gradients of an update, of the whole model or of each stage.
    clip: float | None = None
    clip_by: Literal["global", "stage"] = "global"

    @property
    def global_norm(self) -> bool:
        return self.clip is not None and self.clip_by == "global"

    @property
    def states(self) -> int:
        """Numbers of state that a parameter has."""
        return 2 if self.name == "adamw" else int(self.momentum > 0)

    @property
    def method(self) -> str:
        """What a step costs goes by this, and profiles name it so: sgd, sgd-momentum or adamw."""
        return "sgd-momentum" if self.name == "sgd" and self.states else self.name


@dataclass(frozen=True)
class LearningRate:
    """A pure function of the update's index: linear warm-up over ``warmup_epochs``, per update;
    then constant, cosine to ``floor`` × peak at the last epoch, or × ``gamma`` at each of
    ``milestones`` (epochs)."""

    kind: Literal["constant", "cosine", "step"] = "constant"
    warmup_epochs: float = 0.0
    floor: float = 0.0
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1


@dataclass(frozen=True)
class Task:
    """What one system trains: one run, or one contender of a benchmark.  ``batch_size`` is the
    job's unless a contender has its own."""

    label: str
    system: str
    plan: Plan
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None


@dataclass(frozen=True)
class SwitchSpec:
    """Another system and plan, for the same ranks, in the course of a training run.

    It takes over after ``epoch`` epochs, or, if ``patience`` is set instead, at the first drain by
    which ``patience`` evaluations in a row have not been ``min_delta`` better in accuracy than the
    best before them.
    """

    task: Task
    epoch: int | None = None
    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if (self.epoch is None) == (self.patience is None):
            raise ValueError(
                f"a switch is due after an epoch ({self.epoch}) or at a plateau (patience "
                f"{self.patience}): set one of them"
            )


@dataclass(frozen=True)
class BenchSpec:
    """``rounds`` interleaved rounds; in each, every task trains ``steps`` batches of the job's
    size, or as many samples in batches of its own size, timed."""

    rounds: int = 9
    steps: int = 4
    warmup_steps: int = 2
    bound: bool = True


@dataclass(frozen=True)
class Emulation:
    """What stands in for hardware, in the forms that ``Profile.to_json`` and ``Cluster.to_json``
    give, as read from a file.

    ``profile``: layers wait as long as it says, and have one of ``truncation`` elements; None: they
    compute.  ``cluster``: messages and reductions take as long as on it; None: as long as they do.
    """

    profile: Mapping[str, Any] | None = None
    cluster: Mapping[str, Any] | None = None
    truncation: int = 1

    def __post_init__(self) -> None:
        if self.truncation < 1:
            raise ValueError(f"truncation is {self.truncation}, but must be at least 1")


def whole_batches(label: str, steps: int, batch_size: int, own_size: int) -> int:
    """So many batches of ``own_size`` hold as many samples as ``steps`` of ``batch_size``; those of
    contenders have to, which see equally many."""
    count, rest = divmod(steps * batch_size, own_size)
    if rest:
        raise ValueError(
            f"{label}: {steps} batches of {batch_size} samples are no whole number of batches of "
            f"{own_size}: choose a batch_size that divides them"
        )
    return count


@dataclass(frozen=True)
class Job:
    """``bench`` is None for a training run, which has exactly one task, to begin with.

    ``transport``: a process for each rank, or "in-process", all ranks in one.  ``start_from`` is
    the directory of another run, whose last checkpoint is this run's start;
    ``start_from_reference``: of its parallel pipelines only the reference, not their copies.
    """

    tasks: tuple[Task, ...]
    model: ModelSpec
    data: DataSpec
    batch_size: int
    epochs: int
    seed: int = 0
    label_smoothing: float = 0.0
    optimizer: OptimizerSpec = OptimizerSpec()
    learning_rate: LearningRate = LearningRate()
    precision: Precision = "float32"
    device: str = "cpu"
    evaluate_every: int = 1
    checkpoint_every: int = 1
    evaluation_batch_size: int = 256
    action_timeout_s: float = 300.0
    pin_cores: bool = False
    bench: BenchSpec | None = None
    switch: SwitchSpec | None = None
    transport: Transport = "distributed"
    start_from: str | None = None
    start_from_reference: bool = False
    emulation: Emulation | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, but must be at least 1")
        if not self.tasks or (self.bench is None and len(self.tasks) != 1):
            raise ValueError(f"a training job has one task, a benchmark one or more: {self.tasks}")
        if self.bench is not None and (self.switch is not None or self.transport == "in-process"):
            raise ValueError("a benchmark has a process for each rank, and switches to nothing")
        if self.bench is None and self.emulation is not None:
            raise ValueError("layers that only wait learn nothing: only benchmarks are emulated")
        tasks = [*self.tasks, *([self.switch.task] if self.switch is not None else [])]
        sizes = {task.plan.world_size for task in tasks}
        if len(sizes) != 1:
            raise ValueError(f"the tasks of one job need equally many ranks, not {sorted(sizes)}")
        epoch = None if self.switch is None else self.switch.epoch
        if epoch is not None and not 1 <= epoch < self.epochs:
            raise ValueError(
                f"the switch is after epoch {epoch}, but must be after 1 … {self.epochs - 1} of "
                f"the {self.epochs} epochs"
            )

    def batches(self, task: Task, steps: int) -> tuple[int, ...]:
        """Sizes of the task's batches that hold as many samples as ``steps`` of the job's."""
        size = task.batch_size or self.batch_size
        return (size,) * whole_batches(task.label, steps, self.batch_size, size)

    @property
    def evidence(self) -> Literal["measured", "emulated"]:
        """The class of its times."""
        return "measured" if self.emulation is None else "emulated"

    @property
    def world_size(self) -> int:
        return self.tasks[0].plan.world_size

    @property
    def processes(self) -> int:
        """How many processes run its ranks."""
        return 1 if self.transport == "in-process" else self.world_size

    def to_json(self) -> dict[str, Any]:
        return {"schema": "pipebench.job/1", **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Job:
        values = dict(document)
        schema = values.pop("schema", None)
        if schema != "pipebench.job/1":
            raise ValueError(f"not a job of schema pipebench.job/1: {schema!r}")
        values["tasks"] = tuple(_task(task) for task in values["tasks"])
        data = values["data"]
        values["data"] = DataSpec(
            data["train"], data["validation"], Augmentation(**data["augmentation"])
        )
        values["model"] = ModelSpec(**values["model"])
        optimizer = OptimizerSpec(**values["optimizer"])
        values["optimizer"] = replace(optimizer, betas=(optimizer.betas[0], optimizer.betas[1]))
        rate = LearningRate(**values["learning_rate"])
        values["learning_rate"] = replace(rate, milestones=tuple(rate.milestones))
        if values["bench"] is not None:
            values["bench"] = BenchSpec(**values["bench"])
        if values["switch"] is not None:
            switch = values["switch"]
            values["switch"] = SwitchSpec(**{**switch, "task": _task(switch["task"])})
        if values.get("emulation") is not None:
            values["emulation"] = Emulation(**values["emulation"])
        return cls(**values)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1))

    @classmethod
    def load(cls, path: Path) -> Job:
        return cls.from_json(json.loads(path.read_text()))


def _task(document: Mapping[str, Any]) -> Task:
    plan = Plan.from_json(document["plan"])
    return Task(
        document["label"],
        document["system"],
        plan,
        document["options"],
        document.get("batch_size"),
    )
