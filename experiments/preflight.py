"""What can be checked before minutes are spent."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

import psutil

from experiments.config import Config
from experiments.errors import UserError, one_line
from experiments.memory import largest_batch, largest_pipelines, memory_needed
from experiments.resolve import Layers, optimizer_of, parameter_bytes
from experiments.store import RunDirectory
from runtimes.job import Task
from runtimes.manifest import Manifest, read_manifest

__all__ = [
    "check_checkpoint",
    "check_launch",
    "disk_bytes",
    "missing_hardware",
]

_RECORD_BYTES = 4_000_000


def missing_hardware(config: Config, tasks: Sequence[Task]) -> str | None:
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
    if config.launch.device != "cuda":
        return _missing_memory(config, tasks, f"{here} ranks need", "memory here")
    processes = 1 if config.launch.transport == "in-process" else here
    reason = _missing_accelerators(processes)
    if reason is not None:
        return f"{reason}: {_way_out(config)}"
    return _missing_memory(config, tasks, "a process needs", "a device's memory")


def _missing_memory(config: Config, tasks: Sequence[Task], who: str, what: str) -> str | None:
    free = _free_memory(config)
    size = config.train.batch_size
    needed = memory_needed(config, tasks, size)
    if needed.total() <= free:
        return None
    parts = ", ".join(
        f"{kind} {count / 1e9:.1f}" for kind, count in needed.most_common() if count >= 5e7
    )
    fits = largest_batch(
        size, tasks, lambda smaller: memory_needed(config, tasks, smaller).total() <= free
    )
    fewer = largest_pipelines(
        tasks, lambda changed: memory_needed(config, changed, size).total() <= free
    )
    smaller = f"set train.batch_size = {fits}, the largest that fits, or " if fits else ""
    if fewer:
        smaller = f"set plan.pipelines = {fewer}, the most that fit, or {smaller}"
    return (
        f"{who} {needed.total() / 1e9:.1f} GB of {what} ({parts}), and {free / 1e9:.1f} GB are "
        f"free: {smaller}{_way_out(config)}"
    )


def _free_memory(config: Config) -> int:
    """Bytes that this machine has for all processes, or its smallest device for one."""
    if config.launch.device != "cuda":
        return int(psutil.virtual_memory().available)
    import torch

    devices = range(torch.cuda.device_count())
    return min(int(torch.cuda.get_device_properties(d).total_memory) for d in devices)


def _missing_accelerators(processes: int) -> str | None:
    import torch

    found = torch.cuda.device_count()
    if found >= processes:
        return None
    who = (
        "1 process needs a CUDA device"
        if processes == 1
        else (f"{processes} ranks need a CUDA device each")
    )
    return f"{who}, and this machine has {found or 'none'}"


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
    weights = sum(layers.parameters) * parameter_bytes(config)
    plans = [config.plan, *([] if config.switch is None else [config.switch.plan])]
    copies = max(plan.pipelines for plan in plans)
    reference = weights if copies > 1 else 0
    state = copies * weights * (1 + optimizer_of(config).states) + reference
    return 2 * state + _RECORD_BYTES


def check_checkpoint(run: RunDirectory) -> Manifest | None:
    """The checkpoint that the run resumes from, if any; UserError if it is not all there."""
    try:
        return read_manifest(run.path)
    except ValueError as error:
        raise UserError(one_line(error)) from None
