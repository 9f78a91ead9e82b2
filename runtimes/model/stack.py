"""A model as an ordered stack of named layers, from which stages are cut."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from runtimes.job import ModelSpec
from runtimes.model.keyed import RandomKey
from runtimes.model.layer import Layer, refuse_shared, reset_parameters
from runtimes.model.randomness import key_randomness, refuse_randomness, trial_output
from runtimes.model.skeleton import meta_copy, refuse_unregistered, tensor_names
from runtimes.model.stage import Stage
from runtimes.model.vit import vision_transformer_layers

__all__ = ["LayerStack", "build_stack"]


class LayerStack:
    """Ordered layers, each taking the one tensor the layer before returns.

    It holds no weights: its layers are on the meta device.  ``names`` are the layers' names.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        if not layers:
            raise ValueError("a model needs at least one layer")
        refuse_shared(layers)
        for layer in layers:
            refuse_randomness(layer.module, layer.prefix)
        self.layers = tuple(layers)
        self.names = tuple(layer.name for layer in layers)
        self._shapes: dict[tuple[tuple[int, ...], torch.dtype], tuple[tuple[int, ...], ...]] = {}

    @classmethod
    def from_module(cls, model: nn.Module) -> LayerStack:
        """The layers of a timm VisionTransformer, or the children of an nn.Sequential.

        The model itself is neither changed nor kept; of its values only buffers are.  Raises
        ValueError for other classes and for what cannot be cut without changing results.
        """
        if type(model) not in (VisionTransformer, nn.Sequential):
            raise ValueError(
                f"a model of class {type(model).__name__} cannot be cut into layers: use timm's "
                "VisionTransformer itself, or write the model as an nn.Sequential"
            )
        refuse_unregistered(model, "")
        skeleton = meta_copy(model)
        if isinstance(skeleton, VisionTransformer):
            layers = vision_transformer_layers(skeleton)
        else:
            layers = _sequential_layers(skeleton)
        values = dict(model.named_buffers(remove_duplicate=False))
        return cls([_with_buffers(layer, values) for layer in layers])

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def parameter_counts(self) -> tuple[int, ...]:
        """Elements of the parameters of every layer."""
        return tuple(
            sum(parameter.numel() for parameter in layer.module.parameters())
            for layer in self.layers
        )

    def tensor_names(self, first: int, last: int) -> frozenset[str]:
        """Names of the parameters and buffers of layers [first, last) in the whole model."""
        self._check(first, last)
        return frozenset(
            layer.prefix + name
            for layer in self.layers[first:last]
            for name in tensor_names(layer.module)
        )

    def output_shapes(
        self, input_shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> tuple[tuple[int, ...], ...]:
        """Shape of one sample's output of every layer, for a sample of ``input_shape``.

        Runs every layer once in training mode on the meta device, which also finds what the
        layers' classes do not tell: raises ValueError for a layer that draws random numbers by
        itself, changes its buffers, or does not keep the sample as first dimension.
        """
        key = tuple(input_shape), dtype
        # Every worker asks, and there may be many on one stack: a benchmark's, or virtual ones.
        if key not in self._shapes:
            self._shapes[key] = self._trial(*key)
        return self._shapes[key]

    def _trial(
        self, input_shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[tuple[int, ...], ...]:
        samples = 3  # more than one, and rarely the size of another dimension
        random = RandomKey(0)
        x = torch.empty((samples, *input_shape), dtype=dtype, device="meta")
        shapes = []
        for layer in self.layers:
            module = _keyed_copy(layer, random)
            if dtype.is_floating_point:
                module = module.to(dtype)
            x = trial_output(layer.name, module, random, x)
            shapes.append(tuple(x.shape[1:]))
        return tuple(shapes)

    def stage(self, first: int, last: int, seed: int = 0) -> Stage:
        """Layers [first, last) as a module on the meta device, its own copy, randomness keyed
        by ``seed``."""
        self._check(first, last)
        random = RandomKey(seed)
        layers = self.layers[first:last]
        modules = [_keyed_copy(layer, random) for layer in layers]
        return Stage(modules, [layer.prefix for layer in layers], first, random)

    def initial_weights(
        self,
        first: int,
        last: int,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Tensor]:
        """Initial values of layers [first, last), by names of the whole model's state dict.

        Each layer draws from (seed, its index in the model), in float32 on the CPU: the values
        depend neither on the cut nor on the device, and those of another floating-point
        ``dtype`` are the float32 ones converted.  At most one layer is held twice.
        """
        self._check(first, last)
        weights = {}
        for index in range(first, last):
            for name, value in self.layers[index].initial_weights(seed, index).items():
                wanted = dtype if value.is_floating_point() else value.dtype
                weights[name] = value.to(device=device, dtype=wanted)
        return weights

    def _check(self, first: int, last: int) -> None:
        if not 0 <= first < last <= len(self):
            raise ValueError(
                f"layers [{first}, {last}) asked for, but the model has layers 0 … {len(self) - 1}"
            )


def _keyed_copy(layer: Layer, random: RandomKey) -> nn.Module:
    module = key_randomness(copy.deepcopy(layer.module), layer.prefix, random).train()
    for part in module.modules():
        # Written in place, the input of a stage would be lost to its sender or to recomputation.
        if getattr(part, "inplace", False):
            part.inplace = False  # type: ignore[assignment]
    return module


def _sequential_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Each child one layer; a child that occurs twice is two layers (and refused as shared)."""
    children: Iterator[tuple[str, nn.Module]] = (
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if name and "." not in name
    )
    return tuple(Layer(name, f"{name}.", module, reset_parameters) for name, module in children)


def _with_buffers(layer: Layer, values: dict[str, Tensor]) -> Layer:
    """The layer with the values that the original model's buffers have, if any."""
    buffers = {
        name: values[layer.prefix + name].detach().cpu().clone()
        for name, _ in layer.module.named_buffers()
        if not values[layer.prefix + name].is_meta
    }
    return Layer(layer.name, layer.prefix, layer.module, layer.initialise, buffers)


# What ModelSpec.args may not set, and why.
_RESERVED = {
    "pretrained": "weights come from the run's seed or a checkpoint",
    "pretrained_cfg": "weights come from the run's seed or a checkpoint",
    "checkpoint_path": "weights come from the run's seed or a checkpoint",
    "device": "the run decides it",
    "dtype": "the run's precision decides it",
}


def build_stack(spec: ModelSpec) -> LayerStack:
    """The stack of ``spec``, built on the meta device: no weight is ever allocated.

    Raises ValueError for an unknown model, arguments that timm refuses, or a model of another
    class than VisionTransformer.
    """
    for name in sorted(_RESERVED.keys() & spec.args.keys()):
        raise ValueError(f"argument {name!r} of model {spec.name!r}: {_RESERVED[name]}")
    if spec.name != VisionTransformer.__name__ and not timm.is_model(spec.name):
        known = [VisionTransformer.__name__, *timm.list_models(module="vision_transformer")]
        near = difflib.get_close_matches(spec.name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "use VisionTransformer"
        raise ValueError(f"unknown model {spec.name!r}: {hint}")
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            if spec.name == VisionTransformer.__name__:
                model: nn.Module = VisionTransformer(**spec.args)
            else:
                model = timm.create_model(spec.name, pretrained=False, **spec.args)
    except (TypeError, ValueError, AssertionError, RuntimeError, KeyError) as error:
        hint = _misspelt(spec.args)
        raise ValueError(f"timm cannot build {spec.name!r}: {error}{hint}") from error
    return LayerStack.from_module(model)


def _misspelt(arguments: Any) -> str:
    known = list(inspect.signature(VisionTransformer).parameters)
    hints = []
    for name in arguments:
        near = difflib.get_close_matches(name, known, n=1)
        if name not in known and near:
            hints.append(f"; did you mean {near[0]!r} for {name!r}?")
    return "".join(hints)
