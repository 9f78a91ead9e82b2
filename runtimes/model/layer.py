"""One layer: the smallest piece of a model that a stage can hold."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from runtimes.model.batch_norm import reset_running, running_names
from runtimes.model.skeleton import fill, meta_copy, tensor_names

__all__ = ["Layer", "innermost_first", "refuse_shared", "reset_parameters"]

# Modules initialise themselves from torch's global generator, which is borrowed for that time.
_GENERATOR = threading.Lock()


@dataclass(frozen=True)
class Layer:
    """``module`` is on the meta device, with the randomness it was built with.

    ``prefix`` makes the names inside the module those of the whole model's state dict;
    ``initialise`` gives an allocated copy of the module its usual initial values, in place, from
    torch's global generator; ``buffers`` are the values of the module's buffers but BatchNorm's,
    which are taken for constants, by their names in the module.
    """

    name: str
    prefix: str
    module: nn.Module
    initialise: Callable[[nn.Module], None]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def names(self) -> dict[str, str]:
        """Names of parameters and buffers, in the module → in the whole model."""
        return {name: self.prefix + name for name in tensor_names(self.module)}

    def initial_weights(self, seed: int, index: int) -> dict[str, Tensor]:
        """Initial values in float32 by names of the whole model, from (seed, layer's index)."""
        module = meta_copy(self.module).to(torch.float32)
        running = running_names(module)
        for name, _ in module.named_buffers():
            if name not in self.buffers and name not in running:
                raise ValueError(
                    f"nobody knows the value of buffer {self.prefix}{name}: build the model on "
                    "a real device, not on meta"
                )
        # NaN marks what the initialisation leaves out.
        blank = {
            name: torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
            for name, parameter in module.named_parameters()
        }
        blank |= {name: torch.empty_like(module.get_buffer(name), device="cpu") for name in running}
        fill(module, {**blank, **{name: value.clone() for name, value in self.buffers.items()}})
        reset_running(module)
        digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
        with _GENERATOR, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            self.initialise(module)
        self._refuse_left_out(module)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {self.prefix + name: tensor.detach() for name, tensor in tensors.items()}

    def _refuse_left_out(self, module: nn.Module) -> None:
        for place, owner in module.named_modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter.isnan().any():
                    path = f"{self.prefix}{place}".rstrip(".")
                    raise ValueError(
                        f"nobody knows how to initialise parameter {name!r} of {path}: give "
                        f"{type(owner).__name__} a method reset_parameters() that does"
                    )


def innermost_first(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of ``module`` and everything in it, children before their parents.

    The order of constructors, so that a parent's initialisation has the last word.
    """
    for child_name, child in module.named_children():
        yield from innermost_first(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def reset_parameters(module: nn.Module) -> None:
    """Give ``module`` the values torch's constructors give."""
    for _, part in innermost_first(module):
        # nn.MultiheadAttention and nn.Transformer spell it with an underscore.
        for method in ("reset_parameters", "_reset_parameters"):
            reset = getattr(part, method, None)
            if callable(reset):
                reset()
                break


def refuse_shared(layers: Sequence[Layer]) -> None:
    """Refuse modules, parameters and buffers that two layers share: they may be cut apart."""
    seen: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(layers):
        module = layer.module
        kinds: tuple[tuple[str, Iterator[tuple[str, object]]], ...] = (
            ("module", module.named_modules(remove_duplicate=False)),
            ("parameter", module.named_parameters(remove_duplicate=False)),
            ("buffer", module.named_buffers(remove_duplicate=False)),
        )
        for kind, members in kinds:
            for name, member in members:
                here = f"{layer.prefix}{name}".rstrip(".")
                owner, there = seen.setdefault(id(member), (index, here))
                if owner != index:
                    raise ValueError(
                        f"layers {layers[owner].name!r} and {layer.name!r} share a {kind}: "
                        f"{there} is {here}; give each layer its own, or put both uses into "
                        "one layer"
                    )
