"""A model cut down to a few of each kind of layer, computed as a stage is, every layer clocked.

A layer alone would find its weights and activations in the cache, which a stage of many layers
exceeds.  So up to ``COPIES`` of like layers stand in a row, each with weights of its own, between
the model's other layers: units go forward through all of them and then backward, in one graph.
Only that much of the model is ever in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from runtimes.execution.criterion import cross_entropy_sum
from runtimes.execution.precision import autocast, dtype_of, synchronize
from runtimes.job import Precision
from runtimes.model.stack import LayerStack

__all__ = ["COPIES", "Excerpt", "LayerSeconds", "Moments", "chosen"]

#: Of like layers, so many are computed in a row.
COPIES = 4


#: Of the host's clock, or in a device's stream.
Moment: TypeAlias = "float | torch.Event"


class Moments(NamedTuple):
    """Of one unit, by row of layers: when each layer's forward began and the last one's ended, and
    when the gradient of each layer's input was there, and at last that of the output."""

    forward: list[list[Moment]]
    backward: list[list[Moment]]


class LayerSeconds(NamedTuple):
    """Of one unit, by layer of the excerpt."""

    forward: list[float]
    backward: list[float]


def chosen(kinds: Sequence[Hashable], copies: int = COPIES) -> tuple[int, ...]:
    """Indices of the first ``copies`` layers of every kind, in the order of the model."""
    seen: Counter[Hashable] = Counter()
    found = []
    for index, kind in enumerate(kinds):
        seen[kind] += 1
        if seen[kind] <= copies:
            found.append(index)
    return tuple(found)


class _Clock:
    """Moments of the host, or of a device's stream, which runs behind the host."""

    def __init__(self, device: torch.device):
        self._device = device

    def now(self) -> Moment:
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    @staticmethod
    def seconds(begin: Moment, end: Moment) -> float:
        """Once the device is synchronised.  Never below 0: a layer that returns its input has
        its gradient and its input's at the same moment, noted in any order."""
        if isinstance(begin, torch.Event):
            assert isinstance(end, torch.Event)
            return max(0.0, begin.elapsed_time(end) / 1e3)
        assert not isinstance(end, torch.Event)
        return max(0.0, end - begin)


class Excerpt:
    """Layers ``indices`` of a model, with its loss if they include the last.

    ``shapes``: of one sample's input of every layer of the model, and of its output.  Where a layer
    does not take what the one before it in the excerpt returns, it has an input of its own, and the
    graph is cut.  Gradients are added to those that are there.
    """

    def __init__(
        self,
        stack: LayerStack,
        shapes: Sequence[Sequence[int]],
        indices: Sequence[int],
        *,
        precision: Precision = "float32",
        device: torch.device | str = "cpu",
        seed: int = 0,
    ):
        self.indices = tuple(indices)
        short = LayerStack([stack.layers[index] for index in indices], stack.batch_norm)
        self._precision, self._device = precision, torch.device(device)
        self._dtype = dtype_of(precision)
        self.module = short.stage(0, len(short), seed)
        self.module.materialise(
            short.initial_weights(0, len(short), seed, self._device, self._dtype)
        )
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._takes = [tuple(shapes[index]) for index in indices]
        self._with_loss = indices[-1] == len(stack) - 1
        returns = [tuple(shapes[index + 1]) for index in indices]
        starts = [
            place for place in range(1, len(indices)) if self._takes[place] != returns[place - 1]
        ]
        #: Rows of layers with one graph.
        self._rows = list(pairwise([0, *starts, len(indices)]))
        #: Whether a row's input needs a gradient in the model: there are weights before it.
        self._reached = [
            any(
                parameter.requires_grad
                for layer in stack.layers[: indices[first]]
                for parameter in layer.module.parameters()
            )
            for first, _ in self._rows
        ]
        self._clock = _Clock(self._device)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def inputs(self, samples: int) -> list[Tensor]:
        """(samples, …) for every row of layers."""
        made = []
        for (first, _), reached in zip(self._rows, self._reached, strict=True):
            shape = (samples, *self._takes[first])
            x = torch.randn(shape, dtype=self._dtype, device=self._device)
            made.append(x.requires_grad_(reached))
        return made

    def compute(self, inputs: Sequence[Tensor]) -> Moments:
        """A unit's forward and backward; ``inputs`` as of :meth:`inputs`."""
        self.module.random.set(0, np.arange(len(inputs[0])))
        rows = [self._forward(row, x) for row, x in zip(self._rows, inputs, strict=True)]
        backward = [self._backward(tensors) for tensors, _ in rows[::-1]]
        for x in inputs:
            x.grad = None
        return Moments([marks for _, marks in rows], backward[::-1])

    def unit(self, inputs: Sequence[Tensor]) -> LayerSeconds:
        """As :meth:`compute`, clocked, beginning and ending with nothing under way."""
        synchronize(self._device)
        moments = self.compute(inputs)
        synchronize(self._device)
        seconds = self._clock.seconds
        return LayerSeconds(
            [seconds(*pair) for marks in moments.forward for pair in pairwise(marks)],
            # Gradients arrive at the last layer first.
            [seconds(begin, end) for marks in moments.backward for end, begin in pairwise(marks)],
        )

    def _forward(self, row: tuple[int, int], x: Tensor) -> tuple[list[Tensor], list[Moment]]:
        """Input and outputs of a row's layers, and when each began and the last ended."""
        now = self._clock.now
        labels = torch.zeros(len(x), dtype=torch.int64, device=self._device)
        tensors, marks = [x], [now()]
        with autocast(self._precision, self._device):
            for layer in list(self.module.layers)[slice(*row)]:
                x = layer(x)
                tensors.append(x)
                marks.append(now())
        if self._with_loss and row[1] == len(self.indices):
            tensors[-1] = cross_entropy_sum(x, labels) / len(x)
            marks[-1] = now()
        return tensors, marks

    def _backward(self, tensors: Sequence[Tensor]) -> list[Moment]:
        """When the gradient of each tensor was there: that of the output at the beginning."""
        *earlier, out = tensors
        gradient = None if out.ndim == 0 else torch.ones_like(out)
        arrived: dict[int, Moment] = {}
        for place, tensor in enumerate(earlier):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, arrived, place))
        begin = self._clock.now()
        if out.requires_grad:  # Else no layer has weights.
            torch.autograd.backward(out, gradient)
        end = self._clock.now()
        return [*(arrived.get(place, end) for place in range(len(earlier))), begin]

    def _note(self, arrived: dict[int, Moment], place: int, _: Tensor) -> None:
        arrived[place] = self._clock.now()
