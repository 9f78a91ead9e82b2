"""Layers that wait: a model's stack in which every layer takes the time that a profile says.

All else is real: weights that are trained, graphs, gradients, messages.  Only their tensors are
smaller than the model's, by the factor ``truncation``.

With K elements of a sample in, J out, W of the weight, and c_j = 1/2, 3/2, 1/2, …

    y[s, j] = c_j · (mean_k x[s, k] + mean_i w[i])

so that gradients are those of a function, and depend on weights and samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from runtimes.emulation.device import Device
from runtimes.execution.precision import dtype_of
from runtimes.job import OptimizerSpec
from runtimes.model.layer import Layer
from runtimes.model.stack import LayerStack
from runtimes.model.stage import Stage
from runtimes.planning.profile import LayerProfile, Profile, interpolated, optimizer_key

__all__ = ["EmulatedStack"]


class EmulatedLayer(nn.Module):
    """Takes (n, …) and returns (n, ``outputs``), after the profile's time of n samples.

    ``device`` None: at once.
    """

    def __init__(self, profile: LayerProfile, weights: int, outputs: int, device: Device | None):
        super().__init__()
        self.profile, self.outputs, self.device = profile, outputs, device
        self.weight = nn.Parameter(torch.empty(weights, device="meta")) if weights else None
        self._seconds: dict[tuple[int, bool], float] = {}

    def seconds(self, samples: int, *, forward: bool) -> float:
        key = samples, forward
        if key not in self._seconds:
            times = self.profile.forward_seconds if forward else self.profile.backward_seconds
            what = f"layer {self.profile.name!r}"
            self._seconds[key] = interpolated(times, samples, what)
        return self._seconds[key]

    def forward(self, x: Tensor, *, first: bool = True, last: bool = True) -> Tensor:
        """``first`` and ``last`` of the layers that compute one after the other."""
        y: Tensor = _Wait.apply(x, self.weight, self, first, last)
        return y


class _Wait(Function):
    """The layer's function, and the waits of its forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, layer: EmulatedLayer, first: bool, last: bool
    ) -> Tensor:
        # A trial on the meta device asks for shapes, of any number of samples.
        device = None if x.is_meta else layer.device
        if device is not None and first:
            device.begin()
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.place = layer, (first, last)
        mean = x.flatten(1).mean(1)
        if weight is not None:
            mean = mean + weight.mean()
        y = torch.outer(mean, _pattern(layer.outputs, x))
        if device is not None:
            device.spend(layer.seconds(len(x), forward=True))
            device.wait(last=last)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer, (first, last) = ctx.layer, ctx.place
        device = None if x.is_meta else layer.device
        if device is not None and last:
            device.begin()
        means = gradient @ _pattern(layer.outputs, gradient)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            each = means / max(1, x[0].numel() if len(x) else 1)
            of_x = each.view(-1, *([1] * (x.ndim - 1))).expand_as(x).contiguous()
        if weight is not None:
            of_weight = (means.sum() / weight.numel()).expand_as(weight).contiguous()
        if device is not None:
            device.spend(layer.seconds(len(x), forward=False))
            device.wait(last=first)
        return of_x, of_weight, None, None, None


def _pattern(count: int, like: Tensor) -> Tensor:
    """c: (count,)"""
    return torch.arange(count, dtype=like.dtype, device=like.device).remainder_(2).add_(0.5)


class EmulatedStage(Stage):
    """Layers [first, last), whose optimizer's step takes its time too.

    ``step_seconds``: of all its weights.
    """

    def __init__(self, stage: Stage, device: Device | None, step_seconds: float):
        super().__init__(list(stage.layers), stage.prefixes, stage.first, stage.random)
        self._device, self._step_seconds = device, step_seconds

    def forward(self, x: Tensor) -> Tensor:
        end = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x = layer(x, first=number == 0, last=number == end)
        return x

    def part(self, first: int, last: int) -> Stage:
        """A part is never stepped alone."""
        return EmulatedStage(super().part(first, last), self._device, 0.0)

    def busy_ns(self) -> int:
        return super().busy_ns() if self._device is None else self._device.busy_ns()

    def charge(self, optimizer: Optimizer) -> None:
        device, seconds = self._device, self._step_seconds
        if device is None:
            return

        def begin(*_: Any) -> None:
            device.begin()

        def end(*_: Any) -> None:
            device.spend(seconds)
            device.wait()

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)


class EmulatedStack(LayerStack):
    """The layers of a profile on ``device`` (None: no time passes, nothing waits).

    Of each weight and each layer's output of a sample one in ``truncation`` elements is there, at
    least one; of the last layer's output, all.  A copy of weights into a new version takes no
    time beside the step's: profiles do not know it.
    """

    def __init__(
        self,
        profile: Profile,
        optimizer: OptimizerSpec,
        *,
        truncation: int,
        device: Device | None = None,
    ):
        self.profile, self.device, self._optimizer = profile, device, optimizer
        size = dtype_of(profile.precision).itemsize
        layers = []
        for index, layer in enumerate(profile.layers):
            shrunk = truncation if index < len(profile.layers) - 1 else 1
            module = EmulatedLayer(
                layer,
                _elements(layer.parameter_bytes / size, truncation),
                _elements(layer.output_bytes / size, shrunk),
                device,
            )
            layers.append(Layer(layer.name, f"{layer.name}.", module, _initialise))
        super().__init__(layers)

    def stage(self, first: int, last: int, seed: int = 0) -> Stage:
        plain = super().stage(first, last, seed)
        return EmulatedStage(plain, self.device, self.step_seconds(first, last))

    def unit_seconds(self, first: int, last: int, samples: int, *, recompute: bool) -> float:
        """Of a unit's forward (with ``recompute``, twice) and backward."""
        forward = self.profile.forward(first, last, samples)
        return forward * (1 + recompute) + self.profile.backward(first, last, samples)

    def step_seconds(self, first: int, last: int) -> float:
        """Of a step of all weights of these layers, at their real size."""
        size = sum(layer.parameter_bytes for layer in self.profile.layers[first:last])
        return size * self.profile.optimizer_seconds_per_byte[optimizer_key(self._optimizer)]


def _elements(count: float, truncation: int) -> int:
    return max(1, round(count / truncation)) if count else 0


def _initialise(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
