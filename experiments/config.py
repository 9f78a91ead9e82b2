"""What a config file may say: TOML sections as typed data, nothing of it computed yet."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from experiments.data_section import Data
from experiments.recipe import Train
from experiments.section import Count, Label, Positive, Section
from experiments.sweep import axes_of, point_text

__all__ = [
    "Bench",
    "BestOf",
    "Config",
    "Contender",
    "Data",
    "Launch",
    "Model",
    "Paper",
    "Plan",
    "PlanChanges",
    "Plateau",
    "Switch",
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
    pipelines: Count | None = None
    recompute: bool | tuple[bool, ...] | None = None
    bucket_mb: float | None = Field(default=None, gt=0)


class Plan(Section):
    """``replicas`` and ``layers`` of each stage: one, and as equal as can be, unless given;
    ``recompute``: of all stages, or of each.  ``pipelines``: parallel ones, which share each batch;
    ``micro_batches``: of the share of one.

    ``bucket_mb``: megabytes (10⁶ bytes) of gradients that replicas reduce at a time, while the
    backward goes on.
    """

    stages: Count = 1
    replicas: tuple[Count, ...] | None = None
    layers: tuple[Count, ...] | None = None
    micro_batches: Count = 1
    pipelines: Count = 1
    recompute: bool | tuple[bool, ...] = False
    bucket_mb: float = Field(default=25.0, gt=0)

    @model_validator(mode="after")
    def _as_many_as_stages(self) -> Plan:
        several = None if isinstance(self.recompute, bool) else self.recompute
        for name, values in (
            ("replicas", self.replicas),
            ("layers", self.layers),
            ("recompute", several),
        ):
            if values is not None and len(values) != self.stages:
                raise ValueError(
                    f"{name} has {len(values)} values for {self.stages} stages: one a stage"
                )
        return self

    def changed(self, changes: PlanChanges) -> Plan:
        """This plan with a contender's changes; other stages drop what was said of each stage."""
        given = changes.model_dump(exclude_none=True)
        values = self.model_dump()
        if given.get("stages", self.stages) != self.stages:
            values |= {"replicas": None, "layers": None}
            if not isinstance(self.recompute, bool):
                values["recompute"] = False
        return Plan(**values | given)


class Model(Section):
    """A timm model of class VisionTransformer, by name, "VisionTransformer" itself, or one of
    torchvision's alexnet, vgg… and resnet….

    ``batch_norm``: "per-unit" lets BatchNorm run, on the statistics of each unit on each replica; a
    model that has it is refused without.
    """

    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    batch_norm: Literal["per-unit"] | None = None


class Launch(Section):
    """Where ranks run: each in a process of its own, or, in-process, all in one, for what they
    learn and not for how fast.

    On ``device`` "emulated" layers only wait, as long as a ``profile`` says (a name, or the path of
    a .json file), and tensors have one of ``truncation`` elements.  With a ``cluster`` (a name, or
    the path of a .toml file) messages and reductions take as long as on it, its links reaching
    ``bandwidth_share`` of their bandwidth.  The ``…_hash`` of either's content is filled in when
    the config is loaded.

    ``nodes`` hosts, this one being ``node_rank``, meet at ``address``:``port`` (0: any free one);
    ``local_address`` is this host's own, if not found by its name.
    """

    device: Literal["cpu", "cuda", "emulated"] = "cpu"
    profile: str | None = None
    profile_hash: str | None = None
    cluster: str | None = None
    cluster_hash: str | None = None
    bandwidth_share: Positive | None = None
    truncation: Count | None = None
    transport: Literal["distributed", "in-process"] = "distributed"
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
        if self.transport == "in-process" and self.nodes > 1:
            raise ValueError(
                f'transport "in-process" is one process, but nodes is {self.nodes}: set nodes to 1'
            )
        if self.port == 0 and (self.nodes > 1 or self.rendezvous == "static"):
            raise ValueError("port is 0 (any), but several nodes, or static ones, need a fixed one")
        return self

    @property
    def emulated(self) -> bool:
        """Whether times are those of hardware that is not here."""
        return self.device == "emulated" or self.cluster is not None

    @model_validator(mode="after")
    def _what_stands_in(self) -> Launch:
        if self.device == "emulated" and self.profile is None:
            raise ValueError('device "emulated" waits as a profile says: give one in profile')
        for name in ("profile", "truncation"):
            if self.device != "emulated" and getattr(self, name) is not None:
                raise ValueError(
                    f'{name} is for device "emulated", but device is "{self.device}": leave it out'
                )
        if self.bandwidth_share is not None and self.cluster is None:
            raise ValueError("bandwidth_share is of a cluster's links: name one in cluster")
        if self.cluster is not None and self.device == "cuda":
            raise ValueError(
                'cluster delays messages between CPU processes, but device is "cuda": use "cpu" or '
                '"emulated"'
            )
        if self.emulated and self.nodes > 1:
            raise ValueError(
                f"what is emulated takes one host, whose clock all ranks read, but nodes is "
                f"{self.nodes}: set nodes to 1"
            )
        return self


class Plateau(Section):
    """``patience`` evaluations in a row without an accuracy ``min_delta`` above the best before."""

    patience: Count
    min_delta: float = Field(default=0.0, ge=0, le=1)


class Switch(Section):
    """The system and plan that take over in the course of a run, on the same ranks: after
    ``epoch`` epochs, or when the validation accuracy has reached a ``plateau``."""

    epoch: int | None = None
    plateau: Plateau | None = None
    system: System
    plan: Plan

    @model_validator(mode="after")
    def _one_moment(self) -> Switch:
        if (self.epoch is None) == (self.plateau is None):
            raise ValueError(
                "needs either an epoch, or a plateau = { patience = … }, and not both, to say when"
            )
        return self

    @property
    def moment(self) -> str:
        """In short, for a label."""
        return "plateau" if self.epoch is None else str(self.epoch)


class Tracking(Section):
    """W&B; ``offline`` keeps its files in the run's directory."""

    mode: Literal["offline", "online", "off"] = "offline"


class Contender(Section):
    """One system of a benchmark; ``batch_size``: its own, of which it trains so many more or fewer
    that all see equally many images."""

    label: Label
    system: str
    options: dict[str, Any] = Field(default_factory=dict)
    plan: PlanChanges = PlanChanges()
    batch_size: Count | None = None


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


class Paper(Section):
    """What a paper says: ``of`` is ``ratio`` times as fast as ``over``; ``source``: where."""

    ratio: float = Field(gt=0)
    of: str
    over: str
    source: str


class Config(Section):
    """One run, or one benchmark if there is a ``bench`` section.

    ``name`` is the file's, relative to the configs; ``tiers`` are what `matrix --tier` asks
    for, ``scales`` the names of the sizes that `--set scale=…` may still choose.  A ``sweep``
    stands for a run at each of its points; ``swept`` is the point that one of these runs is at.
    ``paper`` is shown beside what is found.
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
    switch: Switch | None = None
    sweep: Annotated[dict[str, tuple[Any, ...]], BeforeValidator(axes_of)] | None = None
    swept: dict[str, Any] | None = None
    best_of: BestOf | None = None
    paper: Paper | None = None

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
        if self.bench is not None and self.launch.transport == "in-process":
            raise ValueError(
                'launch.transport is "in-process", in which ranks take turns: a [bench] measures '
                'time, so set it to "distributed"'
            )
        return self

    @model_validator(mode="after")
    def _in_the_course_of_training(self) -> Config:
        if self.bench is not None and (self.switch is not None or self.train.start_from):
            raise ValueError(
                "[switch] and train.start_from are for training runs, and this is a [bench]: leave "
                "them out"
            )
        epoch = None if self.switch is None else self.switch.epoch
        if epoch is not None and not 1 <= epoch < self.train.epochs:
            limit = f"1 … {self.train.epochs - 1}" if self.train.epochs > 1 else "below the epochs"
            raise ValueError(
                f"switch.epoch is {epoch}, but must be {limit}, as train.epochs is "
                f"{self.train.epochs}: choose an earlier epoch, or train for longer"
            )
        return self

    @model_validator(mode="after")
    def _emulated_benchmarks_only(self) -> Config:
        launch = self.launch
        if launch.emulated and self.bench is None:
            which = 'device "emulated"' if launch.device == "emulated" else "a cluster"
            raise ValueError(
                f"launch: {which} is for benchmarks, and this is a training run, whose accuracy "
                "would be none: give it a [bench]"
            )
        if launch.device == "emulated" and self.data.set != "random":
            raise ValueError(
                f'data.set is "{self.data.set}", but layers that only wait see nothing: set it to '
                '"random"'
            )
        return self

    @property
    def evidence(self) -> Literal["measured", "emulated"]:
        """The class of its times."""
        return "emulated" if self.launch.emulated else "measured"

    @property
    def label(self) -> str:
        """What a training run runs, in short: "dapple", or "dp → dapple@3"."""
        assert self.system is not None
        if self.switch is None:
            return self.system.name
        return f"{self.system.name} → {self.switch.system.name}@{self.switch.moment}"

    @model_validator(mode="after")
    def _a_norm_to_clip_by(self) -> Config:
        optimizer = self.train.optimizer
        to_come = self.waits_for is not None or "train.optimizer.clip" in (self.sweep or {})
        # "global" says nothing: a recorded config has every default written down.
        if optimizer.clip is None and optimizer.clip_by == "stage" and not to_come:
            raise ValueError(
                'train.optimizer.clip_by is "stage", but nothing is clipped: set '
                "train.optimizer.clip to the largest norm, or leave clip_by out"
            )
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
