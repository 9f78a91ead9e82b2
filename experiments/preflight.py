"""What can be checked before minutes are spent."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

import psutil

from experiments.config import Config
from experiments.errors import UserError, one_line
from experiments.resolve import Layers, parameter_bytes
from experiments.store import RunDirectory
from runtimes.job import Task
from runtimes.manifest import Manifest, read_manifest
from runtimes.systems import SYSTEMS, get_system

__all__ = [
    "PROCESS_BYTES",
    "check_checkpoint",
    "check_launch",
    "disk_bytes",
    "missing_hardware",
    "rank_bytes",
]

#: What a rank takes before it holds a model: the interpreter, torch and its communication.
PROCESS_BYTES = 400_000_000
_RECORD_BYTES = 4_000_000


def _states(config: Config) -> int:
    """Numbers of optimizer state a parameter."""
    optimizer = config.train.optimizer
    return 2 if optimizer.name == "adamw" else int(optimizer.momentum > 0)


def rank_bytes(config: Config, task: Task, layers: Layers, rank: int) -> int:
    """Weights (of every version), gradients and optimizer state of one rank; no activations.

    So a lower bound: what does not fit by this count does not fit.
    """
    place, _ = task.plan.place(rank)
    stage = task.plan.stages[place]
    versions = 1
    if task.system in SYSTEMS:
        versions = get_system(task.system, task.options).live_versions(task.plan, place)
    parameters = sum(layers.parameters[stage.first : stage.last])
    return parameters * parameter_bytes(config) * (versions + 1 + _states(config))


def missing_hardware(config: Config, tasks: Sequence[Task], layers: Layers) -> str | None:
    """Why this machine cannot run the config, and the way out; None if nothing speaks against it.

    Raises UserError where no machine can.
    """
    world = tasks[0].plan.world_size
    here, rest = divmod(world, config.launch.nodes)
    if rest:
        raise UserError(
            f"{world} ranks do not share out over launch.nodes = {config.launch.nodes}: "
            "every node runs equally many"
        )
    held = [[rank_bytes(config, task, layers, rank) for rank in range(world)] for task in tasks]
    # All contenders of a benchmark are there at once; of two systems of one run, one at a time.
    together = sum if config.switch is None else max
    needed = [together(shares) for shares in zip(*held, strict=True)]
    if config.launch.transport == "in-process":
        here, needed = 1, [sum(needed)]
    if config.launch.device == "cpu":
        reason = _missing_memory(here, world, needed, config.launch.nodes)
    else:
        reason = _missing_accelerators(here, needed)
    return None if reason is None else f"{reason}: {_way_out(config)}"


def _missing_memory(processes: int, ranks: int, needed: Sequence[int], nodes: int) -> str | None:
    """``needed``: bytes of each process, whatever its node; ``processes`` of them are here."""
    most = sum(needed) / nodes + processes * PROCESS_BYTES
    free = psutil.virtual_memory().available
    if most <= free:
        return None
    return (
        f"{ranks // nodes} ranks need at least {most / 1e9:.1f} GB of memory here for weights, "
        f"gradients and optimizer state, and {free / 1e9:.1f} GB are free"
    )


def _missing_accelerators(processes: int, needed: Sequence[int]) -> str | None:
    import torch

    found = torch.cuda.device_count()
    if found < processes:
        who = (
            "1 process needs a CUDA device"
            if processes == 1
            else (f"{processes} ranks need a CUDA device each")
        )
        return f"{who}, and this machine has {found or 'none'}"
    memory = min(torch.cuda.get_device_properties(rank).total_memory for rank in range(processes))
    most = max(needed)
    if most > memory:
        return (
            f"a process needs at least {most / 1e9:.1f} GB for weights, gradients and optimizer "
            f"state, and a device here has {memory / 1e9:.1f} GB"
        )
    return None


def _way_out(config: Config) -> str:
    if config.scales:
        return f"a smaller twin runs with --set scale={config.scales[0]}"
    return "use fewer ranks, a smaller model, or another machine"


def check_launch(config: Config) -> None:
    """UserError for a port that is taken, or a precision that the device does not have."""
    launch, train = config.launch, config.train
    if launch.device == "cpu" and train.precision == "tf32":
        raise UserError(
            "train.precision is 'tf32', which only CUDA devices have, and launch.device is 'cpu': "
            "use float32"
        )
    if launch.port and launch.node_rank == 0:
        with contextlib.closing(socket.socket()) as probe:
            # As the store will bind it: a port that only waits for old connections is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", launch.port))
            except OSError as error:
                raise UserError(
                    f"launch.port is {launch.port}, which cannot be used "
                    f"({(error.strerror or str(error)).lower()}): choose another, or 0 for any"
                ) from None


def disk_bytes(config: Config, layers: Layers) -> int:
    """What a run may write: two checkpoints (the last, and the next until it is whole), records."""
    if config.bench is not None:
        return _RECORD_BYTES
    state = sum(layers.parameters) * parameter_bytes(config) * (1 + _states(config))
    return 2 * state + _RECORD_BYTES


def check_checkpoint(run: RunDirectory) -> Manifest | None:
    """The checkpoint that the run resumes from, if any; UserError if it is not all there."""
    try:
        return read_manifest(run.path)
    except ValueError as error:
        raise UserError(one_line(error)) from None
