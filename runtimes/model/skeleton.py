"""Modules without memory: copies on the meta device, and putting real tensors into them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["fill", "meta_copy", "refuse_unregistered", "tensor_names"]


def refuse_unregistered(module: nn.Module, prefix: str) -> None:
    """Refuse tensors that would be lost or left on another device: they follow no state dict."""
    for name, child in module.named_modules():
        for attribute, value in vars(child).items():
            if isinstance(value, Tensor):
                place = f"{prefix}{name}.{attribute}".lstrip(".")
                raise ValueError(
                    f"{place} is a plain tensor attribute: make it a parameter, or a "
                    "buffer with register_buffer()"
                )
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"{prefix}{name} has no shape yet: run the model once before it is cut into layers"
            )


def meta_copy(module: nn.Module) -> nn.Module:
    """A deep copy whose parameters and buffers are on the meta device; what was shared stays so.

    The values are never copied: the memo of the deep copy already holds the twins.
    """
    memo: dict[int, Tensor] = {}
    for parameter in module.parameters():
        twin = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(twin, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def tensor_names(module: nn.Module) -> tuple[str, ...]:
    """Names of parameters, then of buffers; a tensor under several names by its first."""
    parameters = [name for name, _ in module.named_parameters()]
    return (*parameters, *[name for name, _ in module.named_buffers()])


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace every parameter and buffer of ``module`` by the tensor of its name, not copied.

    Names as of :func:`tensor_names`; requires_grad stays, and so does sharing inside the module.
    Raises ValueError when a tensor is missing or of another shape.
    """
    replaced: dict[int, Tensor] = {}
    old: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in old.items():
        if name not in tensors:
            raise ValueError(f"no value for {name}, of shape {tuple(tensor.shape)}")
        value = tensors[name]
        if value.shape != tensor.shape:
            raise ValueError(
                f"the value for {name} has shape {tuple(value.shape)}, not {tuple(tensor.shape)}"
            )
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        replaced[id(tensor)] = value
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(owner, name, replaced[id(parameter)])
        for name, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(owner, name, replaced[id(buffer)])
