"""Measures what a model's layers cost on this device, and what else a simulator has to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, quantiles
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from runtimes.execution.optimizer import build_optimizer
from runtimes.execution.precision import dtype_of, synchronize
from runtimes.job import OptimizerSpec
from runtimes.model.stack import LayerStack
from runtimes.planning.concurrency import concurrency
from runtimes.planning.excerpt import COPIES, Excerpt, LayerSeconds, chosen
from runtimes.planning.footprint import Footprint
from runtimes.planning.link_times import LinkTimes
from runtimes.planning.overhead import action_seconds, transport_seconds
from runtimes.planning.profile import COPY, LayerProfile, Links, Profile, Spread
from runtimes.planning.reference import reference_seconds
from runtimes.planning.request import ProfileRequest
from runtimes.schedule.action import Action

__all__ = [
    "OPTIMIZERS",
    "Kind",
    "Rounds",
    "Times",
    "kinds_of",
    "measure_profile",
    "profiles_of",
    "run_rounds",
    "spread_of",
    "times_of",
]

#: One for each method that a spec can name.
OPTIMIZERS = (OptimizerSpec(), OptimizerSpec(momentum=0.9), OptimizerSpec("adamw"))
_MOST_AT_ONCE = 3

#: What a layer's times go by: the first layer that does the same, and whether its input needs a
#: gradient, which nothing before the first trained weights does.
Kind = tuple[int, bool]
#: By samples, of a kind's forward and backward.
Times = tuple[Mapping[int, Spread], Mapping[int, Spread]]

Say = Callable[[str | Action], None]


def spread_of(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def kinds_of(footprint: Footprint) -> tuple[Kind, ...]:
    """Of every layer."""
    return tuple(
        (first, any(footprint.tensors[:index])) for index, first in enumerate(footprint.alike)
    )


class Rounds:
    """Rounds in each of which everything is measured once, so that a drift of the machine's speed
    hits all alike: a unit of every batch size through the excerpt, and an optimizer step of each
    kind on its weights."""

    def __init__(self, excerpt: Excerpt, batch_sizes: Sequence[int], device: torch.device):
        self._excerpt, self._device = excerpt, device
        self._inputs = {size: excerpt.inputs(size) for size in batch_sizes}
        #: On the excerpt's weights, and on next to none.
        self._steps: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
        if weights := excerpt.parameters:
            tiny = [nn.Parameter(weights[0].detach().flatten()[:1].clone())]
            tiny[0].grad = torch.zeros_like(tiny[0])
            for spec in OPTIMIZERS:
                self._steps[spec.method] = (_stepping(weights, spec), _stepping(tiny, spec))
            self._steps[COPY] = (_copying(weights), _copying(tiny))
        #: By batch size a unit a round; by optimizer seconds per byte of weights.
        self.units: dict[int, list[LayerSeconds]] = {size: [] for size in batch_sizes}
        self.steps: dict[str, list[float]] = {name: [] for name in self._steps}
        #: What each pass of the reference took.
        self.reference: list[float] = []

    def run(self, *, counted: bool) -> None:
        """One round; of one that is not counted nothing is kept."""
        reference = reference_seconds(self._device)
        units = {size: self._excerpt.unit(inputs) for size, inputs in self._inputs.items()}
        size = sum(weight.nbytes for weight in self._excerpt.parameters)
        with torch.no_grad():
            steps = {
                # What does not grow with the weights is part of an action's overhead.
                name: max(0.0, self._seconds(step) - self._seconds(least)) / size
                for name, (step, least) in self._steps.items()
            }
        if counted:
            self.reference += reference
            for samples, unit in units.items():
                self.units[samples].append(unit)
            for name, seconds in steps.items():
                self.steps[name].append(seconds)

    def _seconds(self, step: Callable[[], object]) -> float:
        synchronize(self._device)
        begin = perf_counter()
        step()
        synchronize(self._device)
        return perf_counter() - begin

    def gather(self) -> None:
        """Add what all other ranks have measured."""
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, (self.units, self.steps, self.reference))
        self.units = {
            size: [unit for units, _, _ in shares for unit in units[size]] for size in self.units
        }
        self.steps = {
            name: [s for _, steps, _ in shares for s in steps[name]] for name in self.steps
        }
        self.reference = [seconds for _, _, reference in shares for seconds in reference]


def run_rounds(excerpt: Excerpt, request: ProfileRequest, say: Say) -> Rounds:
    """As many as asked for, those of the warm-up apart; on all ranks of the launch at the same
    time, and then with what all of them measured."""
    rounds = Rounds(excerpt, request.batch_sizes, torch.device(request.device))
    together = dist.is_initialized() and dist.get_world_size() > 1
    for number in range(request.warm_up + request.repeats):
        counted = number - request.warm_up + 1
        say(f"round {counted} of {request.repeats}" if counted > 0 else "warming up")
        if together:
            dist.barrier()
        rounds.run(counted=counted > 0)
    if together:
        rounds.gather()
    return rounds


def _stepping(weights: list[nn.Parameter], spec: OptimizerSpec) -> Callable[[], object]:
    """At a rate of 0 everything is computed, and weights stay what they are."""
    return build_optimizer(weights, replace(spec, lr=0.0)).step


def _copying(weights: list[nn.Parameter]) -> Callable[[], object]:
    source = [weight.detach() for weight in weights]
    spare = [torch.empty_like(weight) for weight in source]
    return lambda: torch._foreach_copy_(spare, source)


def times_of(
    kinds: Sequence[Kind], indices: Sequence[int], units: Mapping[int, Sequence[LayerSeconds]]
) -> dict[Kind, Times]:
    """Of every kind, from ``units`` through layers ``indices`` of the model, by samples: a round's
    value is the mean over the layers of the kind."""
    found: dict[Kind, Times] = {}
    for kind in dict.fromkeys(kinds):
        places = [place for place, index in enumerate(indices) if kinds[index] == kind]
        forward, backward = {}, {}
        for size, measured in units.items():
            forward[size] = spread_of([fmean(u.forward[p] for p in places) for u in measured])
            backward[size] = spread_of([fmean(u.backward[p] for p in places) for u in measured])
        found[kind] = forward, backward
    return found


def profiles_of(
    stack: LayerStack, footprint: Footprint, times: Mapping[Kind, Times]
) -> tuple[LayerProfile, ...]:
    """Of every layer of the model, with the times of its kind."""
    return tuple(
        LayerProfile(
            name=stack.names[index],
            forward_seconds=times[kind][0],
            backward_seconds=times[kind][1],
            output_bytes=footprint.boundaries[index + 1],
            kept_bytes=footprint.kept_bytes(index),
            parameter_bytes=footprint.weights[index],
            parameter_tensors=footprint.tensors[index],
        )
        for index, kind in enumerate(kinds_of(footprint))
    )


def measure_profile(request: ProfileRequest, stack: LayerStack, say: Say) -> Profile:
    """By this rank, or by all ranks of the launch at the same time, as they work in a run; every
    one of them has to call it, and gets the same answer but for overheads of its own."""
    device = torch.device(request.device)
    footprint = Footprint(stack, request.image, precision=request.precision, device=request.device)
    shapes = [request.image, *stack.output_shapes(request.image, dtype_of(request.precision))]
    kinds = kinds_of(footprint)

    def excerpt(copies: int) -> Excerpt:
        return Excerpt(
            stack,
            shapes,
            chosen(kinds, copies),
            precision=request.precision,
            device=device,
        )

    def note(text: str) -> None:
        say(text)

    together = dist.is_initialized() and dist.get_world_size() > 1
    say("building layers")
    whole = excerpt(COPIES)
    rounds = run_rounds(whole, request, say)
    indices = whole.indices
    layers = profiles_of(stack, footprint, times_of(kinds, indices, rounds.units))
    del whole
    steps = {name: median(seconds) for name, seconds in rounds.steps.items()}
    reference = median(rounds.reference)
    del rounds
    say("units at once on one device")
    samples = sorted(request.batch_sizes)[len(request.batch_sizes) // 2]
    short = [excerpt(1) for _ in range(_MOST_AT_ONCE)]
    at_once = concurrency(short, samples, device, repeats=request.repeats)
    say("overhead of actions")
    args = request.device, request.precision
    actions = action_seconds(*args, repeats=request.repeats, before=say)
    links: Links | None = None
    found: dict[str, Any] = {}
    if together:
        actions |= transport_seconds(*args, repeats=request.repeats, before=say)
        inputs = short[0].inputs(samples)
        times = LinkTimes(device, repeats=request.repeats, say=note)
        links, found["links"] = times.measure(lambda: short[0].compute(inputs))
    return Profile(
        model=request.model,
        image=request.image,
        precision=request.precision,
        device=request.device,
        source="measured",
        provenance={
            "repeats": request.repeats,
            "warm_up_rounds": request.warm_up,
            "ranks": dist.get_world_size() if together else 1,
            "threads_a_rank": torch.get_num_threads(),
            "pinned_cores": request.pin_cores,
            "measured_layers": [stack.names[index] for index in indices],
            "concurrency_samples": samples,
            **found,
        },
        layers=layers,
        input_bytes=footprint.boundaries[0],
        optimizer_seconds_per_byte=steps,
        concurrency=at_once,
        action_seconds=actions,
        links=links,
        reference_seconds=reference,
    )
