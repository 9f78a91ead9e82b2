"""Weight versions: every version is its own set of leaf parameters.

A unit's graph holds the parameters it was made with, so a later step must never write into a set
that a unit in flight uses.  Writing through ``.data``, or swapping it, raises nothing and corrupts
gradients; this module therefore steps either in place on a set that nobody uses, or on a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

__all__ = ["WeightVersions"]


class WeightVersions:
    """The versions of one stage copy, and its optimizer, which always holds the latest.

    Versions are numbered from the oldest there is after the last drain.  ``retain`` is how many
    versions before the latest a later forward may still ask for (0 where forwards always use the
    latest).
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        optimizer: Callable[[list[Parameter]], Optimizer],
        *,
        retain: int = 0,
    ):
        self._names = list(weights)
        first = {name: Parameter(tensor.detach()) for name, tensor in weights.items()}
        self._sets: dict[int, dict[str, Parameter]] = {0: first}
        self._users: dict[int, int] = {0: 0}
        self._free: list[dict[str, Parameter]] = []
        self._retain = retain
        self.latest = 0
        self.optimizer = optimizer(list(first.values()))
        self.most_live = 1

    def __getitem__(self, version: int) -> dict[str, Parameter]:
        return self._sets[version]

    @property
    def current(self) -> dict[str, Parameter]:
        return self._sets[self.latest]

    def idle(self) -> dict[str, Parameter]:
        """The latest version, to be written in place: no unit in flight may use it."""
        assert not self._users[self.latest], f"units of version {self.latest} are in flight"
        return self.current

    def parameters(self) -> Iterator[Parameter]:
        """Of all sets, also of those that only wait to hold a later version."""
        for weights in (*self._sets.values(), *self._free):
            yield from weights.values()

    def acquire(self, version: int) -> dict[str, Parameter]:
        """The parameters of a version, for a unit that now begins to depend on them."""
        self._users[version] += 1
        return self._sets[version]

    def release(self, version: int) -> None:
        """A unit that acquired the version has done its backward."""
        self._users[version] -= 1
        self._retire(self.latest - self._retain)

    def take(self, version: int) -> dict[str, Tensor | None]:
        """The gradients accumulated in a version, by name; it has none any more."""
        # A set without weights has no gradients to wait for, and may be gone.
        source = self._sets[version] if self._names else {}
        gradients = {name: parameter.grad for name, parameter in source.items()}
        for parameter in source.values():
            parameter.grad = None
        self._retire(self.latest - self._retain)
        return gradients

    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Make version ``latest + 1`` = optimizer(latest, gradients)."""
        old = self.current
        # With one version more, one that was retained may be free to hold it.
        self._retire(min(self.latest, self.latest + 1 - self._retain))
        if self._users[self.latest] or self._retain:
            new = self._copy(old)
            self._move_optimizer(old, new)
        else:
            new = self._sets.pop(self.latest)
            del self._users[self.latest]
        for name, parameter in new.items():
            parameter.grad = gradients[name]
        self.optimizer.step()
        for parameter in new.values():
            parameter.grad = None
        self.latest += 1
        self._sets[self.latest] = new
        self._users[self.latest] = 0
        self.most_live = max(self.most_live, len(self._sets))

    def drained(self, carried: int = 0) -> None:
        """A new segment begins: the latest version becomes version ``carried``, those before it
        that are carried over 0, 1, …"""
        assert not any(self._users.values()), f"units still in flight: {self._users}"
        first = self.latest - carried
        self._free.extend(self._sets.pop(version) for version in [*self._sets] if version < first)
        self._sets = {version - first: weights for version, weights in self._sets.items()}
        self._users, self.latest = dict.fromkeys(self._sets, 0), carried

    def load(
        self,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Mapping[str, Any]],
        stash: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take over weights and optimizer state by parameter name (whatever plan wrote them);
        ``stash``: those of the version before, which then is version 0."""
        self.drained()
        with torch.no_grad():
            if stash is not None:
                old = self._spare()
                for name, parameter in old.items():
                    parameter.copy_(stash[name])
                self._sets, self._users, self.latest = {0: old, 1: self.current}, {0: 0, 1: 0}, 1
            for name, parameter in self.current.items():
                parameter.copy_(weights[name])
                state = self.optimizer.state[parameter]
                state.clear()
                for key, value in optimizer.get(name, {}).items():
                    if isinstance(value, Tensor) and value.dim():
                        state[key] = value.to(parameter, copy=True)
                    else:
                        state[key] = value.clone() if isinstance(value, Tensor) else value

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """{parameter name: {state name: value}}, references to the live tensors."""
        return {
            name: dict(self.optimizer.state[parameter])
            for name, parameter in self.current.items()
            if parameter in self.optimizer.state
        }

    def stash(self) -> dict[str, Tensor]:
        """The weights of the version before the latest, which a checkpoint of 2BW needs."""
        return {name: p.detach() for name, p in self._sets[self.latest - 1].items()}

    def _spare(self) -> dict[str, Parameter]:
        """A set that nobody uses, its values being anything."""
        if self._free:
            return self._free.pop()
        return {n: Parameter(torch.empty_like(p)) for n, p in self.current.items()}

    def _copy(self, old: dict[str, Parameter]) -> dict[str, Parameter]:
        new = self._spare()
        if new:  # torch refuses empty lists.
            with torch.no_grad():
                torch._foreach_copy_(list(new.values()), list(old.values()))
        return new

    def _move_optimizer(self, old: dict[str, Parameter], new: dict[str, Parameter]) -> None:
        for name in self._names:
            if old[name] in self.optimizer.state:
                self.optimizer.state[new[name]] = self.optimizer.state.pop(old[name])
        for group in self.optimizer.param_groups:
            group["params"] = list(new.values())

    def _retire(self, oldest_kept: int) -> None:
        for version in [v for v, users in self._users.items() if v < oldest_kept and not users]:
            # Gradients that were not stepped yet live in the set they were computed with.
            if all(parameter.grad is None for parameter in self._sets[version].values()):
                self._free.append(self._sets.pop(version))
                del self._users[version]
