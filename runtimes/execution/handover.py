"""Weights and optimizer state from the ranks of one plan to those of another, at a drain."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["redistribute"]


@dataclass(frozen=True)
class _Entry:
    """A value of a state: ``path`` leads to it, and its second name is that of the parameter.

    A tensor has a ``shape`` and travels by itself; a number, or a tensor without dimensions (the
    optimizer's count of steps stays on the CPU wherever weights lie), comes along as ``value``.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    value: Any = None


def redistribute(
    state: Mapping[str, Any], needs: Sequence[Container[str]], rank: int, device: torch.device
) -> dict[str, Any]:
    """What ``rank`` needs of the whole state, of which ``state`` is what it owns (Engine.state).

    ``needs[r]`` are the names of parameters and buffers that rank r needs.  Every rank calls it.
    Tensors go one by one, each from its owner to all by a broadcast of the default group: beside
    its old and its new share, a rank never holds more than one tensor.  A value that a rank owned
    before is not copied.
    """
    mine = dict(_values(state))
    shares: list[list[_Entry]] = [[] for _ in needs]
    dist.all_gather_object(shares, [_entry(path, value) for path, value in mine.items()])
    result: dict[str, Any] = {kind: {} for kind in state}
    for owner, entries in enumerate(shares):
        for entry in entries:
            wanted = [other for other, names in enumerate(needs) if entry.path[1] in names]
            value = mine[entry.path] if rank == owner else entry.value
            if entry.dtype is not None and any(other != owner for other in wanted):
                if rank != owner:
                    value = torch.empty(entry.shape, dtype=entry.dtype, device=device)
                # In place for the others; the owner may send a copy that lies in one piece.
                dist.broadcast(value.contiguous(), src=owner)
            if rank in wanted:
                _insert(result, entry.path, value)
    return result


def _values(state: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """(path, value) of every value, in order."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _values(value, (*above, key))
        else:
            yield (*above, key), value


def _entry(path: tuple[str, ...], value: Any) -> _Entry:
    if not isinstance(value, Tensor):
        return _Entry(path, value=value)
    if not value.dim():
        return _Entry(path, value=value.detach().cpu())
    return _Entry(path, tuple(value.shape), value.dtype)


def _insert(state: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *above, last = path
    for key in above:
        state = state.setdefault(key, {})
    state[last] = value
