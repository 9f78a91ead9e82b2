"""From a config to the job that ranks run: plans, backward buckets, checks that need the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from experiments.config import Config, Contender
from experiments.config import Plan as PlanSection
from experiments.data import DATA_SETS
from experiments.data.arrays import check_held_out
from experiments.emulation import emulated_stack, emulation_of, profile_of
from experiments.errors import UserError, one_line
from experiments.profiles import model_of
from runtimes.job import (
    Augmentation,
    BenchSpec,
    DataSpec,
    Job,
    LearningRate,
    ModelSpec,
    OptimizerSpec,
    SwitchSpec,
    Task,
    whole_batches,
)
from runtimes.peers import check_peer
from runtimes.plan import Plan, split
from runtimes.schedule import validate
from runtimes.system import System, evaluation_program
from runtimes.systems import SYSTEMS, get_system, schedule_of

if TYPE_CHECKING:
    from runtimes.model.stack import LayerStack

__all__ = [
    "Layers",
    "bucket_cuts",
    "image_of",
    "job_of",
    "layers_of",
    "optimizer_of",
    "parameter_bytes",
    "plan_of",
    "samples_of",
    "stack_of",
    "tasks_of",
    "warnings_of",
]


@dataclass(frozen=True)
class Layers:
    """The model's layers in order, with the number of parameters of each; ``outputs``: numbers
    that the last one returns for a sample."""

    names: tuple[str, ...]
    parameters: tuple[int, ...]
    outputs: int


def layers_of(config: Config) -> Layers:
    """The layers of the config's model, which is built without memory for its weights, or of the
    profile that stands in for it.

    Raises UserError for a model that does not exist, cannot be cut, or does not fit the images.
    """
    known = DATA_SETS[config.data.set]
    classes = config.data.classes or known.classes
    name = config.model.name
    if config.launch.device == "emulated":
        layers = _profiled_layers(config)
    else:
        layers = _layers(_text(config), image_of(config))
    if layers.outputs != classes:
        way_out = f"model.args.num_classes = {classes}"
        if config.launch.device == "emulated":
            way_out = f"data.classes = {layers.outputs}"
        raise UserError(
            f"model {name!r} has {layers.outputs} outputs, but {known.title} has {classes} classes:"
            f" set {way_out}"
        )
    return layers


def image_of(config: Config) -> tuple[int, int, int]:
    """(C, H, W) of the config's images."""
    channels = config.data.channels or DATA_SETS[config.data.set].channels
    return channels, config.data.image_size, config.data.image_size


def stack_of(config: Config) -> LayerStack:
    """The config's model without memory for its weights, or what stands in for it, where no time
    passes; UserError if there is none."""
    if config.launch.device == "emulated":
        return emulated_stack(config, optimizer_of(config))
    return _stack(_text(config))


def _text(config: Config) -> str:
    """The model, as a key of caches."""
    return json.dumps(config.model.model_dump(), sort_keys=True, default=str)


def _profiled_layers(config: Config) -> Layers:
    """At their real sizes."""
    layers, size = profile_of(config, image_of(config)).layers, parameter_bytes(config)
    return Layers(
        tuple(layer.name for layer in layers),
        tuple(layer.parameter_bytes // size for layer in layers),
        layers[-1].output_bytes // size,
    )


@lru_cache(maxsize=8)
def _stack(model: str) -> LayerStack:
    from runtimes.model.stack import build_stack

    try:
        return build_stack(ModelSpec(**json.loads(model)))
    except ValueError as error:
        raise UserError(one_line(error)) from None


@lru_cache(maxsize=64)
def _layers(model: str, shape: tuple[int, int, int]) -> Layers:
    stack = _stack(model)
    try:
        outputs = stack.output_shapes(shape)[-1]
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UserError(
            f"model {json.loads(model)['name']!r} does not take images of {shape[0]} channels and "
            f"{shape[1]} × {shape[2]} pixels (a VisionTransformer's model.args in_chans and "
            f"img_size must be those, torchvision's models take 3 channels): {one_line(error)}"
        ) from None
    return Layers(tuple(stack.names), stack.parameter_counts, outputs[-1])


def optimizer_of(config: Config) -> OptimizerSpec:
    return OptimizerSpec(**config.train.optimizer.model_dump())


def parameter_bytes(config: Config) -> int:
    """Bytes of one parameter: weights are kept in float32 also where bf16 computes."""
    return 8 if config.train.precision == "float64" else 4


def bucket_cuts(
    layer_bytes: Sequence[int], first: int, last: int, bucket_bytes: float
) -> tuple[int, ...]:
    """Where to cut the backward of layers [first, last), so that each part fills a bucket.

    Layers are collected in the order of the backward, last to first, until they reach the bucket's
    size; the rest, which may be smaller, is the last part.
    """
    cuts, filled = [], 0
    for layer in range(last - 1, first, -1):
        filled += layer_bytes[layer]
        if filled >= bucket_bytes:
            cuts.append(layer)
            filled = 0
    return tuple(reversed(cuts))


def samples_of(config: Config) -> tuple[int, int]:
    """How many images are trained on, and how many validated."""
    known, sizes = DATA_SETS[config.data.set], config.data.sizes
    if sizes.held_out is None:
        return sizes.train or known.train_samples, sizes.validation or known.validation_samples
    check_held_out(sizes.held_out, known.train_samples, sizes.train)
    return sizes.train or known.train_samples - sizes.held_out, sizes.held_out


def plan_of(section: PlanSection, layers: Layers, *, size: int, buckets: bool) -> Plan:
    """The plan over these layers; ``size``: bytes of a parameter, ``buckets``: cut backwards where
    replicas reduce their gradients.  Raises UserError if there are too few layers."""
    count = len(layers.names)
    replicas = section.replicas or (1,) * section.stages
    if section.stages > count:
        raise UserError(
            f"plan.stages is {section.stages}, but the model has {count} layers: "
            f"use 1 … {count} stages"
        )
    sizes = section.layers or tuple(high - low for low, high in split(count, section.stages))
    if sum(sizes) != count:
        raise UserError(
            f"plan.layers {list(sizes)} are {sum(sizes)} layers, but the model has {count}: "
            + ", ".join(layers.names)
        )
    cuts: list[int] = []
    layer_bytes = [parameters * size for parameters in layers.parameters]
    first = 0
    for length, copies in zip(sizes, replicas, strict=True):
        if buckets and copies > 1:
            cuts += bucket_cuts(layer_bytes, first, first + length, section.bucket_mb * 1e6)
        first += length
    return Plan.contiguous(
        sizes,
        replicas,
        micro_batches=section.micro_batches,
        pipelines=section.pipelines,
        recompute=section.recompute,
        cuts=cuts,
    )


def _task(config: Config, contender: Contender, section: PlanSection, layers: Layers) -> Task:
    name = contender.system
    system = get_system(name, contender.options) if name in SYSTEMS else None
    plan = plan_of(
        section,
        layers,
        size=parameter_bytes(config),
        buckets=system is not None and not system.blocking_reduce,
    )
    options = dict(contender.options)
    if name == "torch-ddp":
        # What dp may tune, its peer may too.
        options |= {"bucket_mb": section.bucket_mb}
    task = Task(contender.label, name, plan, options, contender.batch_size)
    size = contender.batch_size or config.train.batch_size
    if system is not None:
        _prove(config, system, plan, size)
        _check_lone_samples(config, plan, size, rounds=system.rounds)
    else:
        if config.train.optimizer.clip is not None:
            raise ValueError(f"{name} does not clip gradients: leave optimizer.clip out")
        check_peer(task, size, config.model.batch_norm)
    return task


def _prove(config: Config, system: System, plan: Plan, size: int) -> None:
    """Hold what will run to the validator's rules: some full batches stand for any number of them,
    beside the last one, and the evaluation."""
    trained, validated = samples_of(config)
    full, rest = divmod(trained, size)
    # Enough for every stage to be in its steady state, and to drain.
    sizes = (size,) * min(full, 2 + 2 * plan.world_size) + ((rest,) if rest else ())
    # Where the pipeline stays full, the next epoch's first batch follows on the smaller last one.
    sizes *= 1 if system.drain == "epoch" else 2
    norm = optimizer_of(config).global_norm
    # What is periodic falls on the first update, or on the last there is.
    phases = {0, system.period - 1}
    for carried, phase in product(range(system.carries + 1), sorted(phases)):
        program = system.program(plan, sizes, carried=carried, norm=norm, phase=phase)
        validate(program, system.declared(plan, carried=carried))
    validate(evaluation_program(plan, validated, config.train.evaluation_batch_size))


def _check_lone_samples(config: Config, plan: Plan, size: int, *, rounds: bool) -> None:
    """ValueError if a replica would compute a unit of one sample where BatchNorm needs more."""
    if config.model.batch_norm is None:
        return
    from runtimes.model.batch_norm import lone_samples

    norms = stack_of(config).lone_norms(image_of(config))
    full, rest = divmod(samples_of(config)[0], size)
    sizes = [size] * (full > 0) + [rest] * (rest > 0)
    for number in sorted(lone_samples(plan, sizes, rounds=rounds)):
        stage = plan.stages[number]
        for norm in filter(None, norms[stage.first : stage.last]):
            listed = " and ".join(map(str, sizes))
            raise ValueError(
                f"a replica of stage {number} gets units of 1 sample (batches of {listed}), of "
                f"which {norm} sees 1 value a channel, too few to normalise: use fewer "
                "micro-batches or replicas, larger images, or another train.batch_size or "
                "data.sizes.train"
            )


def _check_whole_batches(config: Config) -> None:
    """A benchmark's batches are all of one size, so its training images must be a multiple."""
    if config.bench is None:
        return
    samples, _ = samples_of(config)
    own = {entry.label: entry.batch_size for entry in config.bench.contenders if entry.batch_size}
    whose = {f"{label}'s batch_size": size for label, size in own.items()}
    for name, size in ({"train.batch_size": config.train.batch_size} | whose).items():
        if rest := samples % size:
            way_out = f"data.sizes.train = {samples - rest}" if samples > size else "a smaller one"
            raise UserError(
                f"{config.name}: a benchmark trains whole batches, but {samples} training images "
                f"are no multiple of {name} {size}: set {way_out}"
            )
    for label, size in own.items():
        for steps in (config.bench.steps, config.bench.warmup_steps):
            try:
                whole_batches(label, steps, config.train.batch_size, size)
            except ValueError as error:
                raise UserError(f"{config.name}: {error}") from None


def tasks_of(config: Config, layers: Layers) -> tuple[Task, ...]:
    """What each contender trains, or the one system and then the one that it switches to, if any;
    UserError for a plan that it cannot run."""
    _check_whole_batches(config)
    chosen = [(entry, config.plan.changed(entry.plan)) for entry in config.contenders()]
    if config.switch is not None:
        then = config.switch.system
        entry = Contender(label=then.name, system=then.name, options=then.options)
        chosen.append((entry, config.switch.plan))
    tasks = []
    for entry, section in chosen:
        try:
            tasks.append(_task(config, entry, section, layers))
        except ValueError as error:
            raise UserError(f"{config.name}: {one_line(error)}") from None
    sizes = [(task.label, task.plan.world_size) for task in tasks]
    if len({size for _, size in sizes}) > 1:
        listed = ", ".join(f"{label} {size}" for label, size in sizes)
        who = "contenders share one launch" if config.switch is None else "both systems share ranks"
        raise UserError(f"{config.name}: {who} and need equally many ranks, not {listed}")
    return tuple(tasks)


def warnings_of(config: Config, tasks: Sequence[Task]) -> list[str]:
    """What their systems have to say of plans that they can run."""
    return [
        f"{config.title}: {task.label}: {text}"
        for task in tasks
        for text in schedule_of(task.system, task.options).warnings(task.plan)
    ]


def _switch(config: Config, tasks: Sequence[Task]) -> SwitchSpec | None:
    if config.switch is None:
        return None
    plateau = config.switch.plateau
    if plateau is None:
        return SwitchSpec(tasks[1], config.switch.epoch)
    return SwitchSpec(tasks[1], patience=plateau.patience, min_delta=plateau.min_delta)


def job_of(
    config: Config, tasks: tuple[Task, ...], data: DataSpec, start_from: str | None = None
) -> Job:
    """The job of the config: ``tasks`` as of :func:`tasks_of`, ``data`` the directories that were
    prepared for it, ``start_from`` that of the run whose checkpoint is the start."""
    train, rate, bench = config.train, config.train.learning_rate, config.bench
    return Job(
        tasks=tasks if config.switch is None else tasks[:1],
        model=model_of(config),
        data=DataSpec(
            data.train, data.validation, Augmentation(**config.data.augmentation.model_dump())
        ),
        batch_size=train.batch_size,
        epochs=train.epochs,
        seed=train.seed,
        label_smoothing=train.label_smoothing,
        optimizer=optimizer_of(config),
        learning_rate=LearningRate(**rate.model_dump()),
        precision=train.precision,
        device="cpu" if config.launch.device == "emulated" else config.launch.device,
        evaluate_every=train.evaluate_every,
        checkpoint_every=train.checkpoint_every,
        evaluation_batch_size=train.evaluation_batch_size,
        action_timeout_s=train.action_timeout_s,
        pin_cores=config.launch.pin_cores,
        bench=None
        if bench is None
        else BenchSpec(bench.rounds, bench.steps, bench.warmup_steps, bench.bound),
        switch=_switch(config, tasks),
        transport=config.launch.transport,
        start_from=start_from,
        start_from_reference=config.train.start_from_reference,
        emulation=emulation_of(config),
    )
