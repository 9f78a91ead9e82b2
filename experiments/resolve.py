"""From a config to the job that ranks run: plans, backward buckets, checks that need the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from experiments.config import Config, Contender
from experiments.config import Plan as PlanSection
from experiments.data import DATA_SETS
from experiments.data.arrays import check_held_out
from experiments.errors import UserError, one_line
from runtimes.job import (
    Augmentation,
    BenchSpec,
    DataSpec,
    Job,
    LearningRate,
    ModelSpec,
    OptimizerSpec,
    Task,
)
from runtimes.peers import check_peer
from runtimes.plan import Plan, split
from runtimes.schedule import validate
from runtimes.system import System, evaluation_program
from runtimes.systems import SYSTEMS, get_system

__all__ = ["Layers", "bucket_cuts", "job_of", "layers_of", "parameter_bytes", "plan_of", "tasks_of"]


@dataclass(frozen=True)
class Layers:
    """The model's layers in order, with the number of parameters of each; ``outputs``: numbers
    that the last one returns for a sample."""

    names: tuple[str, ...]
    parameters: tuple[int, ...]
    outputs: int


def layers_of(config: Config) -> Layers:
    """The layers of the config's model, which is built without memory for its weights.

    Raises UserError for a model that does not exist, cannot be cut, or does not fit the images.
    """
    known = DATA_SETS[config.data.set]
    channels, classes = config.data.channels or known.channels, config.data.classes or known.classes
    shape = (channels, config.data.image_size, config.data.image_size)
    name = config.model.name
    layers = _layers(name, json.dumps(config.model.args, sort_keys=True, default=str), shape)
    if layers.outputs != classes:
        raise UserError(
            f"model {name!r} has {layers.outputs} outputs, but {known.title} has {classes} classes:"
            f" set model.args.num_classes = {classes}"
        )
    return layers


@lru_cache(maxsize=64)
def _layers(name: str, args: str, shape: tuple[int, int, int]) -> Layers:
    from runtimes.model.stack import build_stack

    try:
        stack = build_stack(ModelSpec(name, json.loads(args)))
    except ValueError as error:
        raise UserError(one_line(error)) from None
    try:
        outputs = stack.output_shapes(shape)[-1]
    except (ValueError, RuntimeError, AssertionError) as error:
        raise UserError(
            f"model {name!r} does not take images of {shape[0]} channels and {shape[1]} × "
            f"{shape[2]} pixels (model.args in_chans and img_size must be those): {one_line(error)}"
        ) from None
    return Layers(tuple(stack.names), stack.parameter_counts, outputs[-1])


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


def _samples(config: Config) -> tuple[int, int]:
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
        recompute=section.recompute,
        cuts=cuts,
    )


def _task(config: Config, contender: Contender, layers: Layers) -> Task:
    name = contender.system
    system = get_system(name, contender.options) if name in SYSTEMS else None
    plan = plan_of(
        config.plan.changed(contender.plan),
        layers,
        size=parameter_bytes(config),
        buckets=system is not None and not system.blocking_reduce,
    )
    options = dict(contender.options)
    if name == "torch-ddp":
        # What dp may tune, its peer may too.
        options |= {"bucket_mb": config.plan.changed(contender.plan).bucket_mb}
    task = Task(contender.label, name, plan, options)
    if system is not None:
        _prove(config, system, plan)
    else:
        check_peer(task, config.train.batch_size)
    return task


def _prove(config: Config, system: System, plan: Plan) -> None:
    """Hold what will run to the validator's rules: two full batches stand for any number of them,
    beside the last one, and the evaluation."""
    trained, validated = _samples(config)
    size = config.train.batch_size
    full, rest = divmod(trained, size)
    sizes = (size,) * min(full, 2) + ((rest,) if rest else ())
    validate(system.program(plan, sizes), system.declared(plan))
    validate(evaluation_program(plan, validated, config.train.evaluation_batch_size))


def _check_whole_batches(config: Config) -> None:
    """A benchmark's batches are all of one size, so its training images must be a multiple."""
    samples, _ = _samples(config)
    size = config.train.batch_size
    if config.bench is not None and (rest := samples % size):
        way_out = f"data.sizes.train = {samples - rest}" if samples > size else "a smaller batch"
        raise UserError(
            f"{config.name}: a benchmark trains whole batches, but {samples} training images are "
            f"no multiple of train.batch_size {size}: set {way_out}"
        )


def tasks_of(config: Config, layers: Layers) -> tuple[Task, ...]:
    """What each contender trains, or the one system; UserError for a plan it cannot run."""
    _check_whole_batches(config)
    tasks = []
    for contender in config.contenders():
        try:
            tasks.append(_task(config, contender, layers))
        except ValueError as error:
            raise UserError(f"{config.name}: {one_line(error)}") from None
    sizes = {task.label: task.plan.world_size for task in tasks}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{label} {size}" for label, size in sizes.items())
        raise UserError(
            f"{config.name}: contenders share one launch and need equally many ranks, not {listed}"
        )
    return tuple(tasks)


def job_of(config: Config, tasks: tuple[Task, ...], data: DataSpec) -> Job:
    """The job of the config: ``data`` are the directories that were prepared for it."""
    train, rate, optimizer = config.train, config.train.learning_rate, config.train.optimizer
    bench = config.bench
    return Job(
        tasks=tasks,
        model=ModelSpec(config.model.name, config.model.args),
        data=DataSpec(
            data.train, data.validation, Augmentation(**config.data.augmentation.model_dump())
        ),
        batch_size=train.batch_size,
        epochs=train.epochs,
        seed=train.seed,
        label_smoothing=train.label_smoothing,
        optimizer=OptimizerSpec(**optimizer.model_dump()),
        learning_rate=LearningRate(**rate.model_dump()),
        precision=train.precision,
        device=config.launch.device,
        evaluate_every=train.evaluate_every,
        checkpoint_every=train.checkpoint_every,
        evaluation_batch_size=train.evaluation_batch_size,
        action_timeout_s=train.action_timeout_s,
        pin_cores=config.launch.pin_cores,
        bench=None
        if bench is None
        else BenchSpec(bench.rounds, bench.steps, bench.warmup_steps, bench.bound),
    )
