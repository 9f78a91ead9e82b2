"""Profiles of devices that one does not have: from FLOPs, bytes, and what a device can do at most.

For a layer's forward, and its backward, of n samples in eager mode

    t = max(W / (e_W · P), Q / (e_Q · β))

with  W  FLOPs of its matrix products, convolutions and attention   P  peak FLOP/s of the precision
      Q  bytes that its operators read and write                     β  bandwidth of the memory
      e  the share of each that is reached

as of Williams, Waterman and Patterson 2009.  Nothing is computed: layers run on fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from runtimes.execution.criterion import cross_entropy_sum
from runtimes.execution.optimizer import build_optimizer
from runtimes.execution.precision import autocast, dtype_of
from runtimes.job import ModelSpec, OptimizerSpec, Precision
from runtimes.model.stack import LayerStack
from runtimes.planning.device_specs import DeviceSpec
from runtimes.planning.footprint import Footprint
from runtimes.planning.profile import COPY, Profile, Spread
from runtimes.planning.profiler import OPTIMIZERS, Kind, kinds_of, profiles_of
from runtimes.planning.request import check_batch_sizes

__all__ = ["COMPUTE_EFFICIENCY", "MEMORY_EFFICIENCY", "Work", "analytic_profile", "layer_work"]

#: What large matrix products and streaming operators reach of a device's peaks, as a rule of thumb.
COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY = 0.5, 0.8


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """By shapes."""
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """By shapes; fused attention computes its scores again."""
    return int(sdpa_backward_flop_count(gradient, query, key, value))


_ATEN = torch.ops.aten
#: Fused attention as a CPU has it, which torch's counter does not know.
_FUSED = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class Work:
    """Of one layer's forward or backward: a multiplication and its addition are two FLOPs."""

    flops: int
    bytes: int

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)


class _Traffic(TorchDispatchMode):
    """Adds up the bytes that operators read and write; views touch none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        storages = {tensor.untyped_storage()._cdata for tensor in read}
        # What makes nothing new asks for a shape or a device, or is a view.
        new = any(tensor.untyped_storage()._cdata not in storages for tensor in written)
        if new or func._schema.is_mutable:
            self.bytes += sum(map(_touched, (*read, *written)))
        return out


def _touched(tensor: Tensor) -> int:
    """An expanded tensor's elements are fewer than it seems."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


class _Counters:
    """Of what is done inside."""

    def __init__(self) -> None:
        self._flops = FlopCounterMode(display=False, custom_mapping=_FUSED)
        self._traffic = _Traffic()

    def __enter__(self) -> _Counters:
        self._flops.__enter__()
        self._traffic.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._traffic.__exit__(*error)  # type: ignore[no-untyped-call]
        self._flops.__exit__(*error)

    @property
    def work(self) -> Work:
        return Work(self._flops.get_total_flops(), self._traffic.bytes)


def layer_work(
    stack: LayerStack,
    index: int,
    shape: Sequence[int],
    samples: int,
    *,
    precision: Precision = "float32",
    reached: bool = True,
) -> tuple[Work, Work]:
    """Of layer ``index``'s forward and backward of ``samples`` of this ``shape``, the loss included
    for the last; ``reached``: with a gradient of the input."""
    stage = stack.stage(index, index + 1)
    stage.random.set(0, np.arange(samples))
    own = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    dtype, device = dtype_of(precision), torch.device("cpu")

    def fake(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        made = torch.empty(tensor.shape, dtype=kind, device=device)
        if tensor.requires_grad:
            made.requires_grad_().grad = torch.zeros_like(made)
        return made

    with FakeTensorMode():
        stage.bind({stage.names[name]: fake(tensor) for name, tensor in own.items()})
        x = torch.empty((samples, *shape), dtype=dtype, device=device, requires_grad=reached)
        labels = torch.empty(samples, dtype=torch.int64, device=device)
        with _Counters() as forward:
            with autocast(precision, device):
                out: Tensor = stage(x)
            if index == len(stack) - 1:
                out = cross_entropy_sum(out, labels) / samples
        gradient = None if out.ndim == 0 else torch.empty_like(out)
        with _Counters() as backward:
            if out.requires_grad:
                torch.autograd.backward(out, gradient)
    return forward.work, backward.work


def _step_bytes(spec: OptimizerSpec) -> float:
    """That a step moves, for a byte of weights."""
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones_like(weight)
    optimizer = build_optimizer([weight], spec)
    optimizer.step()  # The first also makes its state.
    with _Traffic() as traffic, torch.no_grad():
        optimizer.step()
    return float(traffic.bytes / weight.nbytes)


def analytic_profile(
    model: ModelSpec,
    stack: LayerStack,
    image: tuple[int, int, int],
    batch_sizes: Sequence[int],
    spec: DeviceSpec,
    *,
    precision: Precision = "float32",
    compute_efficiency: float = COMPUTE_EFFICIENCY,
    memory_efficiency: float = MEMORY_EFFICIENCY,
) -> Profile:
    """Of the model on one device of this kind; nothing of links, and nothing of what the runtime
    takes.  ValueError for a precision that the device does not have, or an efficiency outside
    (0, 1]."""
    check_batch_sizes(tuple(batch_sizes))
    for what, share in (("compute", compute_efficiency), ("memory", memory_efficiency)):
        if not 0 < share <= 1:
            raise ValueError(f"the {what} efficiency is {share}, but must lie in (0, 1]")
    flops_per_s = spec.peak_flops_per_s(precision) * compute_efficiency
    bytes_per_s = spec.memory_bandwidth_bytes_per_s * memory_efficiency
    footprint = Footprint(stack, image, precision=precision)
    shapes = (image, *stack.output_shapes(image, dtype_of(precision)))
    kinds = kinds_of(footprint)
    work: dict[Kind, dict[int, tuple[Work, Work]]] = {}
    for kind in dict.fromkeys(kinds):
        index, reached = kinds.index(kind), kind[1]
        work[kind] = {
            n: layer_work(stack, index, shapes[index], n, precision=precision, reached=reached)
            for n in batch_sizes
        }

    def seconds(kind: Kind, way: int) -> dict[int, Spread]:
        times = {n: w[way].seconds(flops_per_s, bytes_per_s) for n, w in work[kind].items()}
        return {n: Spread(t, t, t) for n, t in times.items()}

    steps = {each.method: _step_bytes(each) / bytes_per_s for each in OPTIMIZERS}
    largest = max(batch_sizes)
    return Profile(
        model=model,
        image=image,
        precision=precision,
        device=spec.name,
        source="analytic",
        provenance={
            "device_source": spec.source,
            "peak_flops_per_s": spec.peak_flops_per_s(precision),
            "memory_bandwidth_bytes_per_s": spec.memory_bandwidth_bytes_per_s,
            "compute_efficiency": compute_efficiency,
            "memory_efficiency": memory_efficiency,
            "flops_a_sample": {
                way: sum(work[kind][largest][number].flops for kind in kinds) / largest
                for number, way in enumerate(("forward", "backward"))
            },
        },
        layers=profiles_of(
            stack, footprint, {kind: (seconds(kind, 0), seconds(kind, 1)) for kind in work}
        ),
        input_bytes=footprint.boundaries[0],
        optimizer_seconds_per_byte=steps | {COPY: 2 / bytes_per_s},
    )
