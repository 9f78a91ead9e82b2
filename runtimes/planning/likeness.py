"""Which layers of a model do the same: what one of them costs, the others cost too."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import nn

from runtimes.model.stack import LayerStack

__all__ = ["first_alike"]

#: What torch itself keeps in a module.
_OF_TORCH = frozenset(vars(nn.Module()))


def first_alike(stack: LayerStack, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Of every layer the first that does the same with other weights; ``shapes``: of one sample's
    input of every layer.  The last layer is like no other, since the loss follows on it."""
    first: dict[Hashable, int] = {}
    found = []
    for index, layer in enumerate(stack.layers):
        last = index == len(stack) - 1
        key = _build(layer.module), tuple(shapes[index]), last
        found.append(first.setdefault(key, index))
    return tuple(found)


def _build(module: nn.Module) -> Hashable:
    """Equal only for modules that do the same with other weights, as a model's blocks do: what does
    not compare by value is different."""
    return tuple(
        (
            name,
            type(part),
            *((key, _value(v)) for key, v in vars(part).items() if key not in _OF_TORCH),
            *((key, p.shape, p.requires_grad) for key, p in part.named_parameters()),
            *((key, b.shape, b.dtype) for key, b in part.named_buffers()),
            *map(id, (*part._forward_hooks.values(), *part._forward_pre_hooks.values())),
        )
        for name, part in module.named_modules()
    )


def _value(value: object) -> Hashable:
    if isinstance(value, tuple):
        return tuple(map(_value, value))
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)
