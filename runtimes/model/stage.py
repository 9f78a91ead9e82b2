"""A stage: consecutive layers of a model, cut out as a module of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import thread_time_ns
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from runtimes.model.batch_norm import repeated, running_names
from runtimes.model.keyed import RandomKey
from runtimes.model.skeleton import fill, tensor_names

__all__ = ["Stage"]


def _slots(
    module: nn.Module, names: Mapping[str, str]
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Where each parameter and buffer hangs: (module's entries, key, name in the whole model).

    A tensor that hangs in several places has as many slots, and one name.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    name_of = {id(tensor): names[local] for local, tensor in tensors}
    for owner in module.modules():
        for entries in (owner._parameters, owner._buffers):
            for key, tensor in entries.items():
                if tensor is not None:
                    yield entries, key, name_of[id(tensor)]


class Stage(nn.Module):
    """Layers [first, last), made by ``LayerStack.stage`` on the meta device, randomness keyed.

    Give it weights with :meth:`bind` (a set of leaf parameters, swapped as often as one likes), or
    fill it once with copies by :meth:`materialise`.  ``names`` leads from the stage's own names of
    all parameters and buffers to those of the whole model's state dict (a tensor under several
    names has its first); ``running`` are, of the latter, the buffers that a forward in training
    mode updates.
    ``random`` is the key of the batch that is computed next: set it before each forward in
    training mode.  A stage and its parts share modules and key, and belong to one thread.
    """

    def __init__(
        self, layers: Sequence[nn.Module], prefixes: Sequence[str], first: int, random: RandomKey
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.prefixes = tuple(prefixes)
        self.first = first
        self.last = first + len(layers)
        self.random = random
        self.names: dict[str, str] = {
            f"layers.{number}.{name}": prefix + name
            for number, (layer, prefix) in enumerate(zip(layers, prefixes, strict=True))
            for name in tensor_names(layer)
        }
        self.running = tuple(self.names[name] for name in running_names(self))
        self._slots = list(_slots(self, self.names))

    def forward(self, x: Tensor) -> Tensor:
        """(n, …) input of layer ``first`` → (n, …) output of layer ``last - 1``."""
        for layer in self.layers:
            x = layer(x)
        return x

    def repeated(self) -> AbstractContextManager[None]:
        """Inside, forwards of units that have been computed before leave ``running`` alone."""
        return repeated(self)

    def part(self, first: int, last: int) -> Stage:
        """Layers [first, last), counted in the whole model, sharing modules and key with this."""
        if not self.first <= first < last <= self.last:
            raise ValueError(
                f"layers [{first}, {last}) are no part of a stage of [{self.first}, {self.last})"
            )
        low, high = first - self.first, last - self.first
        layers = list(self.layers)[low:high]
        return Stage(layers, self.prefixes[low:high], first, self.random)

    def busy_ns(self) -> int:
        """A clock of what this thread computes, in nanoseconds."""
        return thread_time_ns()

    def charge(self, optimizer: Optimizer, versions: int) -> None:
        """Called with each optimizer of the stage's weights, of which so many versions are held: it
        costs what it takes here."""

    def tying(self, copies: int) -> AbstractContextManager[None]:
        """Around the tying of so many copies of the stage's weights to their reference, which here
        costs what it takes."""
        return nullcontext()

    def watch_gradients(self) -> None:
        """Each layer's gradients are wanted when they are made, not at the end of the backward."""

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these very tensors, by names of the whole model, from the next forward on.

        Only re-points the modules' entries, so a graph made before keeps the tensors it was made
        with.  The same as ``torch.func.functional_call``, whose walk over the modules took 1.2 ms
        a call (CPU time, a stage of five layers), against 0.004 ms.
        """
        for entries, key, name in self._slots:
            entries[key] = weights[name]

    def materialise(self, weights: Mapping[str, Tensor]) -> None:
        """Put copies of ``weights``, by names of the whole model, in the place of all parameters
        and buffers.  Raises ValueError when one is missing or of another shape."""
        missing = [name for name in self.names.values() if name not in weights]
        if missing:
            raise ValueError(
                f"layers [{self.first}, {self.last}) need weights that are not given: "
                f"{', '.join(missing)}"
            )
        fill(self, {key: weights[name].detach().clone() for key, name in self.names.items()})
