"""Bytes that a model's layers take: weights, messages, and what a forward keeps for its backward.

Nothing is computed or allocated: layers run on fake tensors, which have shapes and storages of the
device they are meant for, and choose its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from runtimes.execution.criterion import cross_entropy_sum
from runtimes.execution.precision import autocast, dtype_of
from runtimes.job import Precision
from runtimes.model.batch_norm import running_names
from runtimes.model.stack import LayerStack
from runtimes.planning.likeness import first_alike

__all__ = ["Footprint", "LayerKeeps"]


@dataclass(frozen=True)
class LayerKeeps:
    """Of one layer's forward: storages that it alone keeps, and what it does with those that it
    shares with its neighbours.  All in bytes."""

    inner: int
    input: bool
    output: bool
    output_bytes: int
    #: The output is a view of the input.
    view: bool


class Footprint:
    """Of a model with its loss, trained in this precision on this device; ``image``: shape of one
    sample."""

    def __init__(
        self,
        stack: LayerStack,
        image: Sequence[int],
        *,
        precision: Precision = "float32",
        device: str = "cpu",
        label_smoothing: float = 0.0,
    ):
        self._stack, self._precision, self._smoothing = stack, precision, label_smoothing
        self._device, self._dtype = torch.device(device), dtype_of(precision)
        self._shapes = (tuple(image), *stack.output_shapes(tuple(image), self._dtype))
        #: Bytes of one sample's input of every layer, and of the model's output.
        self.boundaries = tuple(math.prod(shape) * self._dtype.itemsize for shape in self._shapes)
        #: Of every layer: trained weights and the number of their tensors; other weights, buffers;
        #: of the latter those that forwards change.
        self.weights, self.tensors, self.constants, self.running = [], [], [], []
        for layer in stack.layers:
            parameters = list(layer.module.parameters())
            trained = [p for p in parameters if p.requires_grad]
            fixed = [p for p in parameters if not p.requires_grad]
            self.weights.append(sum(map(self._size, trained)))
            self.tensors.append(len(trained))
            self.constants.append(sum(map(self._size, (*fixed, *layer.module.buffers()))))
            changing = map(layer.module.get_buffer, running_names(layer.module))
            self.running.append(sum(map(self._size, changing)))
        self._lone = stack.lone_norms(tuple(image), self._dtype)
        #: Of every layer the first that does the same.
        self.alike = first_alike(stack, self._shapes)
        self._kept: dict[tuple[int, int, bool], LayerKeeps] = {}
        self.activations = cache(self._activations)

    def _size(self, tensor: Tensor) -> int:
        """Bytes that a weight will take."""
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.numel() * dtype.itemsize

    def _activations(
        self, first: int, last: int, samples: int, *, cuts: tuple[int, ...] = ()
    ) -> int:
        """A(n): bytes that the forward of ``samples`` through layers [first, last) keeps.

        Storages that autograd saves, beside the weights, and what the worker holds until the
        backward: the input and output of the stage and of each part (``cuts``).  A model's last
        layer is followed by the loss, which takes the output's place.
        """
        total, held = 0, {first, *cuts}
        # The first boundary at which a storage occurs stands for it.
        storage, sizes = {first: first}, {first: samples * self.boundaries[first]}
        for index in range(first, last):
            # The images of a model's first layers need no gradient.
            reached = first > 0 or index >= min(cuts, default=last) or any(self.tensors[:index])
            keeps = self.layer(index, samples, reached=reached)
            total += keeps.inner
            storage[index + 1] = storage[index] if keeps.view else index + 1
            sizes.setdefault(storage[index + 1], keeps.output_bytes)
            held |= {index} if keeps.input else set()
            held |= {index + 1} if keeps.output else set()
        if last < len(self._stack):
            held.add(last)
        return total + sum(sizes[place] for place in {storage[boundary] for boundary in held})

    def kept_bytes(self, index: int) -> int:
        """Bytes that one more sample makes layer ``index`` keep for its backward: of its input and
        output too, if it saves them, even where a neighbour saves them as well."""
        reached = any(self.tensors[:index])
        # A single sample is refused by some layers.
        two, three = (self.layer(index, samples, reached=reached) for samples in (2, 3))
        inner = three.inner - two.inner
        output = three.output_bytes - two.output_bytes
        return inner + self.boundaries[index] * two.input + output * two.output

    def layer(self, index: int, samples: int, *, reached: bool) -> LayerKeeps:
        """What the forward of ``samples`` through layer ``index`` keeps; ``reached``: if its input
        needs a gradient."""
        if samples == 1 and self._lone[index] is not None:
            samples = 2  # BatchNorm refuses one, which no run has; two take more.
        key = self.alike[index], samples, reached
        if key not in self._kept:
            self._kept[key] = self._run(index, samples, reached=reached)
        return self._kept[key]

    def _run(self, index: int, samples: int, *, reached: bool) -> LayerKeeps:
        stage = self._stack.stage(index, index + 1)
        stage.random.set(0, np.arange(samples))
        own = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            # A storage's address is None here; its handle is unique while the tensor is kept.
            return kept.setdefault(tensor.untyped_storage()._cdata, tensor.detach())

        with FakeTensorMode():
            weights = {
                stage.names[name]: torch.empty(
                    tensor.shape,
                    dtype=self._dtype if tensor.is_floating_point() else tensor.dtype,
                    device=self._device,
                    requires_grad=tensor.requires_grad,
                )
                for name, tensor in own.items()
            }
            stage.bind(weights)
            x = torch.empty(
                (samples, *self._shapes[index]),
                dtype=self._dtype,
                device=self._device,
                requires_grad=reached,
            )
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                with autocast(self._precision, self._device):
                    out: Tensor = stage(x)
                loss = out
                if index == len(self._stack) - 1:
                    labels = torch.empty(samples, dtype=torch.int64, device=self._device)
                    loss = cross_entropy_sum(out, labels, self._smoothing) / samples
                    kept[loss.untyped_storage()._cdata] = loss
        others = {weight.untyped_storage()._cdata for weight in weights.values()}
        given, made = x.untyped_storage(), out.untyped_storage()
        others |= {given._cdata} | ({made._cdata} if loss is out else set())
        return LayerKeeps(
            inner=sum(
                tensor.untyped_storage().nbytes()
                for handle, tensor in kept.items()
                if handle not in others
            ),
            input=given._cdata in kept,
            output=loss is out and made._cdata in kept,
            output_bytes=made.nbytes(),
            view=made._cdata == given._cdata,
        )
