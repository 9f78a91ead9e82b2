"""Every system by name, and the peers they are measured against."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from runtimes.ashpipe import AshPipe
from runtimes.dapple import Dapple
from runtimes.dp import DataParallel
from runtimes.gpipe import GPipe
from runtimes.pipedream import PipeDream
from runtimes.pipedream_2bw import PipeDream2BW
from runtimes.system import System

__all__ = ["PEERS", "SYSTEMS", "get_system", "schedule_of", "system_options"]

SYSTEMS: dict[str, type[System]] = {
    system.name: system
    for system in (DataParallel, GPipe, Dapple, PipeDream, PipeDream2BW, AshPipe)
}

#: Implementations of others that run on the same model and data: (summary, our counterpart).
PEERS: dict[str, tuple[str, str]] = {
    "torch-ddp": ("torch.nn.parallel.DistributedDataParallel", "dp"),
    "torch-gpipe": ("torch.distributed.pipelining ScheduleGPipe", "gpipe"),
    "torch-1f1b": ("torch.distributed.pipelining Schedule1F1B", "dapple"),
}


def system_options(name: str) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """option → (default, allowed values) of one of our systems."""
    hints = get_type_hints(SYSTEMS[name])
    options = {}
    for item in fields(SYSTEMS[name]):
        hint = hints[item.name]
        allowed = get_args(hint) if get_origin(hint) is Literal else (True, False)
        options[item.name] = (item.default, allowed)
    return options


def get_system(name: str, options: Mapping[str, Any] | None = None) -> System:
    """The system of that name with these options; ValueError for an unknown name or option."""
    if name not in SYSTEMS:
        near = difflib.get_close_matches(name, [*SYSTEMS, *PEERS], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join([*SYSTEMS, *PEERS])
        if name in PEERS:
            raise ValueError(f"{name} is a peer: it runs, but has no schedule of ours to show")
        raise ValueError(f"unknown system {name!r}{hint} (known: {known})")
    allowed = system_options(name)
    for key, value in (options or {}).items():
        if key not in allowed:
            known = ", ".join(allowed) or "none"
            raise ValueError(f"{name} has no option {key!r} (its options: {known})")
        if not any(value is choice or value == choice for choice in allowed[key][1]):
            choices = ", ".join(repr(choice) for choice in allowed[key][1])
            raise ValueError(f"{name}: {key} = {value!r}, but it is one of {choices}")
    return SYSTEMS[name](**(options or {}))


def schedule_of(name: str, options: Mapping[str, Any]) -> System:
    """The system of that name; for a peer our system whose schedule it runs."""
    return get_system(PEERS[name][1]) if name in PEERS else get_system(name, options)
