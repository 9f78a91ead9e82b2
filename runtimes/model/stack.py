"""A model as an ordered stack of named layers, from which stages are cut."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from runtimes.job import BatchNorm, ModelSpec
from runtimes.model import vision
from runtimes.model.batch_norm import running_names
from runtimes.model.keyed import RandomKey
from runtimes.model.layer import Layer, refuse_shared, reset_parameters
from runtimes.model.randomness import key_randomness, refuse_randomness, trial
from runtimes.model.skeleton import meta_copy, refuse_unregistered, tensor_names
from runtimes.model.stage import Stage
from runtimes.model.vit import vision_transformer_layers

__all__ = ["LayerStack", "build_stack"]


class _Trials(NamedTuple):
    """Of every layer: shape of one sample's output, and as of LayerStack.lone_norms."""

    shapes: tuple[tuple[int, ...], ...]
    lone: tuple[str | None, ...]


class LayerStack:
    """Ordered layers, each taking the one tensor the layer before returns.

    It holds no weights: its layers are on the meta device.  ``names`` are the layers' names;
    ``batch_norm`` says how BatchNorm runs, without which layers that have it are refused.
    """

    def __init__(self, layers: Sequence[Layer], batch_norm: BatchNorm | None = None) -> None:
        if not layers:
            raise ValueError("a model needs at least one layer")
        refuse_shared(layers)
        for layer in layers:
            refuse_randomness(layer.module, layer.prefix, batch_norm)
        if batch_norm is not None and not any(running_names(layer.module) for layer in layers):
            raise ValueError(
                f'model.batch_norm is "{batch_norm}", but the model has no BatchNorm: leave it out'
            )
        self.batch_norm = batch_norm
        self.layers = tuple(layers)
        self.names = tuple(layer.name for layer in layers)
        self._trials: dict[tuple[tuple[int, ...], torch.dtype], _Trials] = {}

    @classmethod
    def from_module(
        cls,
        model: nn.Module,
        batch_norm: BatchNorm | None = None,
        *,
        zero_init_residual: bool = False,
    ) -> LayerStack:
        """The layers of a timm VisionTransformer, of torchvision's AlexNet, VGG or ResNet, or the
        children of an nn.Sequential.

        The model itself is neither changed nor kept; of its values only buffers are, but for
        running statistics, which begin anew.  ``zero_init_residual``: as a ResNet's, which does not
        keep it.  Raises ValueError for other classes and for what cannot be cut without changing
        results.
        """
        if type(model) not in (VisionTransformer, nn.Sequential, *vision.CLASSES):
            raise ValueError(
                f"a model of class {type(model).__name__} cannot be cut into layers: use timm's "
                "VisionTransformer itself, torchvision's AlexNet, VGG or ResNet, or write the "
                "model as an nn.Sequential"
            )
        refuse_unregistered(model, "")
        skeleton = meta_copy(model)
        if isinstance(skeleton, VisionTransformer):
            layers = vision_transformer_layers(skeleton)
        elif isinstance(skeleton, vision.CLASSES):
            layers = vision.vision_layers(skeleton, zero_init_residual=zero_init_residual)
        else:
            layers = _sequential_layers(skeleton)
        values = dict(model.named_buffers(remove_duplicate=False))
        return cls([_with_buffers(layer, values) for layer in layers], batch_norm)

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
        return self._tried(tuple(input_shape), dtype).shapes

    def lone_norms(
        self, input_shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> tuple[str | None, ...]:
        """Of every layer a BatchNorm that sees one value a channel of each sample, and so refuses a
        unit of a single one; None where there is none."""
        return self._tried(tuple(input_shape), dtype).lone

    def _tried(self, input_shape: tuple[int, ...], dtype: torch.dtype) -> _Trials:
        # Every worker asks, and there may be many on one stack: a benchmark's, or virtual ones.
        key = input_shape, dtype
        if key not in self._trials:
            self._trials[key] = self._try(*key)
        return self._trials[key]

    def _try(self, input_shape: tuple[int, ...], dtype: torch.dtype) -> _Trials:
        samples = 3  # more than one, and rarely the size of another dimension
        random = RandomKey(0)
        x = torch.empty((samples, *input_shape), dtype=dtype, device="meta")
        shapes: list[tuple[int, ...]] = []
        lone: list[str | None] = []
        for layer in self.layers:
            module = _keyed_copy(layer, random)
            if dtype.is_floating_point:
                module = module.to(dtype)
            tried = trial(layer.name, layer.prefix, module, random, x)
            x = tried.output
            shapes.append(tuple(x.shape[1:]))
            lone.append(tried.lone)
        return _Trials(tuple(shapes), tuple(lone))

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
    """The layer with the values that the original model's constant buffers have, if any."""
    running = running_names(layer.module)
    buffers = {
        name: values[layer.prefix + name].detach().cpu().clone()
        for name, _ in layer.module.named_buffers()
        if name not in running and not values[layer.prefix + name].is_meta
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

    A name that timm and torchvision both have, e.g. "resnet50", is torchvision's.  Raises
    ValueError for an unknown model, arguments that its author refuses, or a model of a class that
    cannot be cut.
    """
    reserved = _RESERVED | (vision.RESERVED if spec.name in vision.NAMES else {})
    for name in sorted(reserved.keys() & spec.args.keys()):
        raise ValueError(f"argument {name!r} of model {spec.name!r}: {reserved[name]}")
    if spec.name in vision.NAMES:
        kind, author, build = vision.NAMES[spec.name], "torchvision", vision.builder(spec)
    else:
        kind, author, build = VisionTransformer, "timm", _timm_builder(spec)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = build()
    except (TypeError, ValueError, AssertionError, RuntimeError, KeyError) as error:
        hint = _misspelt(spec.args, kind)
        raise ValueError(f"{author} cannot build {spec.name!r}: {error}{hint}") from error
    zero = bool(spec.args.get("zero_init_residual", False)) and author == "torchvision"
    return LayerStack.from_module(model, spec.batch_norm, zero_init_residual=zero)


def _timm_builder(spec: ModelSpec) -> Callable[[], nn.Module]:
    """Builds it; ValueError for a name that nobody knows."""
    if spec.name == VisionTransformer.__name__:
        return partial(VisionTransformer, **spec.args)
    if not timm.is_model(spec.name):
        listed = timm.list_models(module="vision_transformer")
        known = [VisionTransformer.__name__, *vision.NAMES, *listed]
        near = difflib.get_close_matches(spec.name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "use VisionTransformer"
        raise ValueError(f"unknown model {spec.name!r}: {hint}")
    return partial(timm.create_model, spec.name, pretrained=False, **spec.args)


def _misspelt(arguments: Any, kind: type[nn.Module]) -> str:
    known = list(inspect.signature(kind).parameters)
    hints = []
    for name in arguments:
        near = difflib.get_close_matches(name, known, n=1)
        if name not in known and near:
            hints.append(f"; did you mean {near[0]!r} for {name!r}?")
    return "".join(hints)
