"""Which random modules a model may have, and putting keyed ones in their place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from timm.layers.drop import DropBlock2d, DropPath
from timm.layers.patch_dropout import PatchDropout, PatchDropoutWithIndices
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import ops

from runtimes.job import BatchNorm
from runtimes.model.batch_norm import batch_norms, refuse_batch_norm, running_names
from runtimes.model.keyed import KeyedDropout, KeyedDropPath, RandomKey

__all__ = ["Trial", "key_randomness", "refuse_randomness", "trial"]

_WAY_OUT = "use nn.Dropout or timm's DropPath, or switch it off"


class NoDropout(nn.Identity):
    """Dropout with probability 0; timm's fused attention asks for ``p``."""

    p = 0.0


def _is_unkeyable(module: nn.Module) -> bool:
    """Whether the module draws random numbers other than nn.Dropout's and DropPath's."""
    if isinstance(module, _DropoutNd):
        return module.p > 0 and type(module) is not nn.Dropout
    if isinstance(module, DropPath):
        return module.drop_prob > 0 and type(module) is not DropPath
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return module.dropout > 0
    if isinstance(module, (PatchDropout, PatchDropoutWithIndices)):
        return module.prob > 0
    if isinstance(module, DropBlock2d):
        return bool(module.drop_prob)
    if isinstance(module, (ops.StochasticDepth, ops.DropBlock2d)):
        return bool(module.p > 0)
    return isinstance(module, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d))


def refuse_randomness(module: nn.Module, prefix: str, batch_norm: BatchNorm | None = None) -> None:
    """Refuse, by name, what would make results depend on how batches and models are cut, but for
    BatchNorm where ``batch_norm`` allows it."""
    paths: dict[int, str] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        path = f"{prefix}{name}".rstrip(".")
        kind = type(part).__name__
        if _is_unkeyable(part):
            raise ValueError(
                f"{path} is a {kind}, whose randomness cannot be keyed by sample: {_WAY_OUT}"
            )
        refuse_batch_norm(part, path, batch_norm)
        if getattr(part, "track_running_stats", False) and not any(batch_norms(part)):
            raise ValueError(
                f"{path} is a {kind} with running statistics, which depend on how a batch is cut "
                "into units: switch off track_running_stats"
            )
        if _probability(part) > 0 and paths.setdefault(id(part), path) != path:
            raise ValueError(
                f"{paths[id(part)]} is {path}: the {kind} would draw one mask for both uses; "
                "give each use its own"
            )


def _probability(module: nn.Module) -> float:
    """The probability to drop of an nn.Dropout or a DropPath, else 0."""
    if isinstance(module, nn.Dropout):
        return module.p
    return float(module.drop_prob or 0) if isinstance(module, DropPath) else 0.0


def _keyed(module: nn.Module, name: str, random: RandomKey) -> nn.Module:
    """The keyed counterpart of one module, or the module itself."""
    if not isinstance(module, (nn.Dropout, DropPath)):
        return module
    probability = _probability(module)
    if probability == 0:
        return NoDropout()
    if isinstance(module, nn.Dropout):
        return KeyedDropout(probability, name, random)
    return KeyedDropPath(probability, name, random, scale_by_keep=module.scale_by_keep)


def key_randomness(module: nn.Module, prefix: str, random: RandomKey) -> nn.Module:
    """Replace every nn.Dropout and DropPath in ``module`` by its keyed counterpart, in place.

    Returns the module, or the counterpart where the module itself is one.
    """
    for name, part in list(module.named_modules()):
        for child_name, child in list(part.named_children()):
            path = f"{prefix}{name}.{child_name}" if name else f"{prefix}{child_name}"
            setattr(part, child_name, _keyed(child, path, random))
        # A fused kernel draws its masks itself; only the plain attention calls the module.
        if isinstance(getattr(part, "attn_drop", None), KeyedDropout):
            part.fused_attn = False
    return _keyed(module, prefix.rstrip("."), random)


class _RefuseDraws(TorchDispatchMode):
    """Refuses operators that draw from a generator: what no list of classes can know."""

    def __init__(self, layer: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = layer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ValueError(
                f"layer {self.layer!r} draws random numbers by itself ({func}), which cannot be "
                f"keyed by sample: {_WAY_OUT}"
            )
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Trial:
    """What a layer made of some samples; ``lone``: a BatchNorm of it that saw one value a channel
    of each sample, and so cannot normalise a single one."""

    output: Tensor
    lone: str | None


def trial(name: str, prefix: str, module: nn.Module, random: RandomKey, x: Tensor) -> Trial:
    """What layer ``module`` makes of ``x``, both on the meta device, in training mode.

    Refuses a layer that does not fit its input, that returns anything but one tensor with the
    sample as first dimension, that changes its buffers (but running statistics), or that draws
    unkeyed random numbers.
    """
    random.set(0, np.arange(len(x)))
    calls: dict[str, int] = {}
    lone: list[str] = []

    def count(part: nn.Module, *_: object) -> None:
        calls[str(part.name)] = calls.get(str(part.name), 0) + 1

    for part in module.modules():
        if isinstance(part, (KeyedDropout, KeyedDropPath)):
            part.register_forward_hook(count)
    norms: dict[str, int] = {}
    for key, part in batch_norms(module):
        path = f"{prefix}{key}".rstrip(".")

        def look(_: nn.Module, inputs: tuple[Tensor], __: object, path: str = path) -> None:
            norms[path] = norms.get(path, 0) + 1
            if inputs[0][0].numel() == inputs[0].shape[1]:
                lone.append(path)

        part.register_forward_hook(look)
    running = running_names(module)
    versions = {k: b._version for k, b in module.named_buffers() if k not in running}
    try:
        with _RefuseDraws(name):
            y = module.train()(x)
    except (RuntimeError, AssertionError, TypeError, IndexError) as error:
        raise ValueError(
            f"layer {name!r} cannot take samples of shape {tuple(x.shape[1:])} and {x.dtype}: "
            f"{str(error).strip()}"
        ) from error
    if not isinstance(y, Tensor) or y.ndim == 0 or len(y) != len(x):
        found = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise ValueError(
            f"layer {name!r} made {found} of {len(x)} samples: a layer returns one tensor whose "
            "first dimension is the sample"
        )
    for key, buffer in module.named_buffers():
        if key in versions and buffer._version != versions[key]:
            raise ValueError(
                f"layer {name!r} changes its buffer {key!r} in the forward, which depends on how "
                "a batch is cut into units"
            )
    for key, number in calls.items():
        if number > 1:
            raise ValueError(
                f"{key} is called {number} times in one forward and would draw one mask for all: "
                "give each use its own"
            )
    for key, number in norms.items():
        if number > 1:
            raise ValueError(
                f"{key} is called {number} times in one forward and would count a unit as often: "
                "give each use its own"
            )
    return Trial(y, lone[0] if lone else None)
