"""Every system by name, and the peers they are measured against."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from runtimes.ashpipe import AshPipe
from runtimes.avgpipe import AvgPipe
from runtimes.dapple import Dapple
from runtimes.dp import DataParallel
from runtimes.gpipe import GPipe
from runtimes.options import Option, options_of
from runtimes.pipedream import PipeDream
from runtimes.pipedream_2bw import PipeDream2BW
from runtimes.system import System

__all__ = ["PEERS", "SYSTEMS", "get_system", "schedule_of", "system_options"]

SYSTEMS: dict[str, type[System]] = {
    system.name: system
    for system in (DataParallel, GPipe, Dapple, PipeDream, PipeDream2BW, AvgPipe, AshPipe)
}

#: Implementations of others that run on the same model and data: (summary, our counterpart).
PEERS: dict[str, tuple[str, str]] = {
    "torch-ddp": ("torch.nn.parallel.DistributedDataParallel", "dp"),
    "torch-gpipe": ("torch.distributed.pipelining ScheduleGPipe", "gpipe"),
    "torch-1f1b": ("torch.distributed.pipelining Schedule1F1B", "dapple"),
}


def system_options(name: str) -> dict[str, Option]:
    """By name, the options of one of our systems."""
    return options_of(SYSTEMS[name])


def get_system(name: str, options: Mapping[str, Any] | None = None) -> System:
    """The system of that name with these options; ValueError for an unknown name or option, or a
    value that an option does not take."""
    if name not in SYSTEMS:
        near = difflib.get_close_matches(name, [*SYSTEMS, *PEERS], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join([*SYSTEMS, *PEERS])
        if name in PEERS:
            raise ValueError(f"{name} is a peer: it runs, but has no schedule of ours to show")
        raise ValueError(f"unknown system {name!r}{hint} (known: {known})")
    known_options = system_options(name)
    values = {}
    for key, value in (options or {}).items():
        if key not in known_options:
            known = ", ".join(known_options) or "none"
            raise ValueError(f"{name} has no option {key!r} (its options: {known})")
        try:
            values[key] = known_options[key].checked(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return SYSTEMS[name](**values)


def schedule_of(name: str, options: Mapping[str, Any]) -> System:
    """The system of that name; for a peer our system whose schedule it runs."""
    return get_system(PEERS[name][1]) if name in PEERS else get_system(name, options)
