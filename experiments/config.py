"""What a config file may say: TOML sections as typed data, nothing of it computed yet."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from experiments.data_section import Data
from experiments.section import BelowOne, Count, Label, Seconds, Section, Seed, Share
from experiments.sweep import axes_of, point_text

__all__ = [
    "Bench",
    "BestOf",
    "Config",
    "Contender",
    "Data",
    "Launch",
    "Model",
    "Plan",
    "PlanChanges",
    "System",
    "Tracking",
    "Train",
]


class System(Section):
    """``name`` as listed by `pipebench systems`; ``options`` are that system's own."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class PlanChanges(Section):
    """What a contender may change of the benchmark's plan; None: as it is there."""

    stages: Count | None = None
    replicas: tuple[Count, ...] | None = None
    layers: tuple[Count, ...] | None = None
    micro_batches: Count | None = None
    recompute: bool | None = None
    bucket_mb: float | None = Field(default=None, gt=0)


class Plan(Section):
    """``replicas`` and ``layers`` of each stage: one, and as equal as can be, unless given.

    ``bucket_mb``: megabytes (10⁶ bytes) of gradients that replicas reduce at a time, while the
    backward goes on.
    """

    stages: Count = 1
    replicas: tuple[Count, ...] | None = None
    layers: tuple[Count, ...] | None = None
    micro_batches: Count = 1
    recompute: bool = False
    bucket_mb: float = Field(default=25.0, gt=0)

    @model_validator(mode="after")
    def _as_many_as_stages(self) -> Plan:
        for name, values in (("replicas", self.replicas), ("layers", self.layers)):
            if values is not None and len(values) != self.stages:
                raise ValueError(
                    f"{name} has {len(values)} numbers for {self.stages} stages: one a stage"
                )
        return self

    def changed(self, changes: PlanChanges) -> Plan:
        """This plan with a contender's changes; other stages drop what was said of each stage."""
        given = changes.model_dump(exclude_none=True)
        values = self.model_dump()
        if given.get("stages", self.stages) != self.stages:
            values |= {"replicas": None, "layers": None}
        return Plan(**values | given)


class Model(Section):
    """A timm model of class VisionTransformer, by name, or "VisionTransformer" itself."""

    name: str
    args: dict[str, Any] = Field(default_factory=dict)


class Optimizer(Section):
    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = Field(default=0.1, ge=0)
    momentum: BelowOne = 0.0
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)

    @model_validator(mode="after")
    def _of_the_method(self) -> Optimizer:
        if self.name == "adamw" and self.momentum:
            raise ValueError(
                f"momentum is {self.momentum}, but adamw has betas instead: set it to 0"
            )
        if self.nesterov and not (self.name == "sgd" and self.momentum):
            raise ValueError(
                "nesterov needs sgd with a momentum above 0: set one, or nesterov = false"
            )
        return self


class LearningRate(Section):
    """Of the peak ``optimizer.lr``; epochs may be fractions."""

    kind: Literal["constant", "cosine", "step"] = "constant"
    warmup_epochs: float = Field(default=0.0, ge=0)
    floor: Share = 0.0
    milestones: tuple[Annotated[float, Field(ge=0)], ...] = ()
    gamma: float = Field(default=0.1, gt=0)


class Train(Section):
    """``seeds`` stands for one run a seed; ``evaluate_every`` and ``checkpoint_every`` in epochs.

    ``action_timeout_s``: a rank that waits longer for another ends the run.
    """

    batch_size: Count
    epochs: Count = 1
    seed: Seed = 0
    seeds: tuple[Seed, ...] | None = Field(default=None, min_length=1)
    label_smoothing: BelowOne = 0.0
    precision: Literal["float32", "tf32", "bf16", "float64"] = "float32"
    optimizer: Optimizer = Optimizer()
    learning_rate: LearningRate = LearningRate()
    evaluate_every: Count = 1
    checkpoint_every: Count = 1
    evaluation_batch_size: Count = 256
    action_timeout_s: Seconds = 300.0

    @field_validator("precision", mode="before")
    @classmethod
    def _no_half(cls, value: object) -> object:
        if value in ("fp16", "float16", "half"):
            raise ValueError(
                "fp16 is refused: its gradients underflow without loss scaling, which would make "
                "the step differ from system to system; use bf16"
            )
        return value

    @model_validator(mode="after")
    def _within_epochs(self) -> Train:
        if self.learning_rate.warmup_epochs > self.epochs:
            raise ValueError(
                f"learning_rate.warmup_epochs is {self.learning_rate.warmup_epochs}, but there are "
                f"only {self.epochs} epochs"
            )
        if self.seeds is not None and len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds {self.seeds} repeat one")
        return self


class Launch(Section):
    """Where ranks run.  ``nodes`` hosts, this one being ``node_rank``, meet at ``address``:``port``
    (0: any free one); ``local_address`` is this host's own, if not found by its name."""

    device: Literal["cpu", "cuda"] = "cpu"
    pin_cores: bool = False
    nodes: Count = 1
    node_rank: int = Field(default=0, ge=0)
    address: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    local_address: str | None = None
    rendezvous: Literal["c10d", "static"] = "c10d"

    @model_validator(mode="after")
    def _one_of_the_nodes(self) -> Launch:
        if self.node_rank >= self.nodes:
            raise ValueError(f"node_rank is {self.node_rank}, but must be below nodes {self.nodes}")
        if self.port == 0 and (self.nodes > 1 or self.rendezvous == "static"):
            raise ValueError("port is 0 (any), but several nodes, or static ones, need a fixed one")
        return self


class Tracking(Section):
    """W&B; ``offline`` keeps its files in the run's directory."""

    mode: Literal["offline", "online", "off"] = "offline"


class Contender(Section):
    """One system of a benchmark."""

    label: Label
    system: str
    options: dict[str, Any] = Field(default_factory=dict)
    plan: PlanChanges = PlanChanges()


class Bench(Section):
    """``rounds`` in which every contender trains ``steps`` batches, in turn, in one launch."""

    contenders: tuple[Contender, ...] = Field(min_length=1)
    rounds: Count = 9
    steps: Count = 4
    warmup_steps: int = Field(default=2, ge=0)
    bound: bool = True

    @model_validator(mode="after")
    def _labels_differ(self) -> Bench:
        labels = [contender.label for contender in self.contenders]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"contenders need labels of their own: {', '.join(twice)} repeats")
        return self


class BestOf(Section):
    """Values that come from a finished ``sweep``, a config's name or path: those of the point with
    the best held-out accuracy, which ``chosen`` then tells."""

    sweep: str
    chosen: dict[str, Any] | None = None


class Config(Section):
    """One run, or one benchmark if there is a ``bench`` section.

    ``name`` is the file's, relative to the configs; ``tiers`` are what `matrix --tier` asks
    for, ``scales`` the names of the sizes that `--set scale=…` may still choose.  A ``sweep``
    stands for a run at each of its points; ``swept`` is the point that one of these runs is at.
    """

    name: str
    tiers: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    system: System | None = None
    plan: Plan
    model: Model
    data: Data
    train: Train
    launch: Launch = Launch()
    tracking: Tracking = Tracking()
    bench: Bench | None = None
    sweep: Annotated[dict[str, tuple[Any, ...]], BeforeValidator(axes_of)] | None = None
    swept: dict[str, Any] | None = None
    best_of: BestOf | None = None

    @property
    def title(self) -> str:
        """The name, with the point of the sweep."""
        return self.name if self.swept is None else f"{self.name} {point_text(self.swept)}"

    @property
    def waits_for(self) -> str | None:
        """The sweep whose best values are still to be put in."""
        if self.best_of is None or self.best_of.chosen is not None:
            return None
        return self.best_of.sweep

    @property
    def kind(self) -> Literal["train", "bench"]:
        return "train" if self.bench is None else "bench"

    @model_validator(mode="after")
    def _what_runs(self) -> Config:
        if (self.system is None) == (self.bench is None):
            raise ValueError(
                "needs a [system] that trains, or a [bench] with contenders, and not both"
            )
        if self.bench is not None and self.train.seeds is not None:
            raise ValueError("train.seeds is for training runs: a benchmark has one train.seed")
        return self

    @model_validator(mode="after")
    def _where_values_come_from(self) -> Config:
        given = [name for name in ("sweep", "best_of") if getattr(self, name) is not None]
        if self.bench is not None and given:
            raise ValueError(f"{given[0]} is for training runs, and this is a benchmark")
        if len(given) > 1:
            raise ValueError(
                "sweep sets values and best_of takes them from another sweep: leave one of them out"
            )
        return self

    def contenders(self) -> tuple[Contender, ...]:
        """What runs: the benchmark's contenders, or the one system."""
        if self.bench is not None:
            return self.bench.contenders
        assert self.system is not None
        return (
            Contender(label=self.system.name, system=self.system.name, options=self.system.options),
        )
