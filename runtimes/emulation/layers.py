"""Layers that wait: a model's stack in which every layer takes the time that a profile says.

All else is real: weights that are trained, graphs, gradients, messages.  Only their tensors are
smaller than the model's, by the factor ``truncation``.

With K elements of a sample in, J out, W of the weight,

    y[s, j] = mean_k x[s, k] + mean_i w[i]

of the last layer times 1/2, 3/2, 1/2, … by j, since logits that are all alike teach nothing.  Few
and cheap operations: what they take is part of the wait, but it is taken from other ranks' cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from runtimes.planning.profile import LayerProfile, Profile, interpolated

__all__ = ["EmulatedStack"]


class EmulatedLayer(nn.Module):
    """Takes (n, …) and returns (n, ``outputs``), after the profile's time of n samples.

    ``device`` None: at once.  ``logits``: it is the model's last.
    """

    def __init__(
        self,
        profile: LayerProfile,
        weights: int,
        outputs: int,
        device: Device | None,
        *,
        logits: bool = False,
    ):
        super().__init__()
        self.profile, self.outputs, self.device, self.logits = profile, outputs, device, logits
        self.weight = nn.Parameter(torch.empty(weights, device="meta")) if weights else None
        self._seconds: dict[tuple[int, bool], float] = {}

    def seconds(self, samples: int, *, forward: bool) -> float:
        key = samples, forward
        if key not in self._seconds:
            times = self.profile.forward_seconds if forward else self.profile.backward_seconds
            what = f"layer {self.profile.name!r}"
            self._seconds[key] = interpolated(times, samples, what)
        return self._seconds[key]

    def forward(
        self, x: Tensor, *, first: bool = True, last: bool = True, alone: bool = False
    ) -> Tensor:
        """``first`` and ``last`` of the layers that compute one after the other and wait together,
        or, ``alone``, in the backward each for itself."""
        y: Tensor = _Wait.apply(x, self.weight, self, (first, last, alone))
        return y


class _Wait(Function):
    """The layer's function, and the waits of its forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        layer: EmulatedLayer,
        place: tuple[bool, bool, bool],
    ) -> Tensor:
        # A trial on the meta device asks for shapes, of any number of samples.
        device = None if x.is_meta else layer.device
        first, last, _ = place
        if device is not None and first:
            device.begin()
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.place = layer, place
        mean = (x if x.ndim == 2 else x.flatten(1)).mean(1, keepdim=True)
        if weight is not None:
            mean += weight.mean()
        y = mean.expand(-1, layer.outputs)
        y = y * _factors(y) if layer.logits else y.contiguous()
        if device is not None:
            device.spend(layer.seconds(len(x), forward=True))
            if last:
                device.wait()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer, (first, last, alone) = ctx.layer, ctx.place
        device = None if x.is_meta else layer.device
        if device is not None and last:
            device.begin()
        if layer.logits:
            gradient = gradient * _factors(gradient)
        of_mean = gradient.sum(1)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            each = of_mean * (len(x) / max(1, x.numel()))
            of_x = each.view(-1, *([1] * (x.ndim - 1))).expand_as(x).contiguous()
        if weight is not None:
            of_weight = (of_mean.sum() / weight.numel()).expand_as(weight).contiguous()
        if device is not None:
            device.spend(layer.seconds(len(x), forward=False))
            if first or alone:
                device.wait(last=first)
        return of_x, of_weight, None, None


def _factors(like: Tensor) -> Tensor:
    """(J,)"""
    factors = torch.arange(like.shape[1], dtype=like.dtype, device=like.device)
    return factors.remainder_(2).add_(0.5)


class EmulatedStage(Stage):
    """Layers [first, last), whose optimizer's step and averaging take their time too.

    Of all its weights: ``step_seconds``, by the number of versions held, and ``average_seconds``,
    by the number of copies that are tied to their reference.
    """

    def __init__(
        self,
        stage: Stage,
        device: Device | None,
        step_seconds: Callable[[int], float],
        average_seconds: Callable[[int], float],
    ):
        super().__init__(list(stage.layers), stage.prefixes, stage.first, stage.random)
        self._device, self._alone = device, False
        self._step_seconds, self._average_seconds = step_seconds, average_seconds

    def forward(self, x: Tensor) -> Tensor:
        end = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x = layer(x, first=number == 0, last=number == end, alone=self._alone)
        return x

    def watch_gradients(self) -> None:
        self._alone = True

    def part(self, first: int, last: int) -> Stage:
        """A part is never stepped alone, nor averaged."""
        plain = super().part(first, last)
        return EmulatedStage(plain, self._device, self._step_seconds, self._average_seconds)

    def busy_ns(self) -> int:
        return super().busy_ns() if self._device is None else self._device.busy_ns()

    def charge(self, optimizer: Optimizer, versions: int) -> None:
        device = self._device
        if device is None:
            return
        seconds = self._step_seconds(versions)

        def begin(*_: Any) -> None:
            device.begin()

        def end(*_: Any) -> None:
            device.spend(seconds)
            device.wait()

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)

    @contextmanager
    def tying(self, copies: int) -> Iterator[None]:
        if self._device is not None:
            self._device.begin()
        yield
        if self._device is not None:
            self._device.spend(self._average_seconds(copies))
            self._device.wait()


class EmulatedStack(LayerStack):
    """The layers of a profile on ``device`` (None: no time passes, nothing waits).

    Of each weight and each layer's output of a sample one in ``truncation`` elements is there, at
    least one; of the last layer's output, all.
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
                logits=index == len(profile.layers) - 1,
            )
            layers.append(Layer(layer.name, f"{layer.name}.", module, _initialise))
        super().__init__(layers)

    def stage(self, first: int, last: int, seed: int = 0) -> Stage:
        plain = super().stage(first, last, seed)
        layers = first, last
        return EmulatedStage(
            plain,
            self.device,
            partial(self.step_seconds, *layers),
            partial(self.profile.average_seconds, *layers),
        )

    def step_seconds(self, first: int, last: int, versions: int) -> float:
        """Of a step of all weights of these layers, at their real size."""
        return self.profile.step_seconds(first, last, self._optimizer.method, versions)


def _elements(count: float, truncation: int) -> int:
    return max(1, round(count / truncation)) if count else 0


def _initialise(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
