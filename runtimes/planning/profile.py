"""What a model's layers cost on a device: measured, or computed from FLOPs and bytes.  Plain data.

Seconds are per layer and unit of n samples, at several n; bytes are of one sample, or of weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runtimes.job import ModelSpec, Precision

__all__ = ["COPY", "SCHEMA", "LayerProfile", "Links", "Profile", "Spread", "interpolated"]

SCHEMA = "pipebench.profile/1"
#: Beside the optimizers' methods: what a step takes more that makes a further weight version.
COPY = "copy"


class Spread(NamedTuple):
    """A median with its quartiles; all three the same where nothing was repeated."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class LayerProfile:
    """``forward_seconds`` and ``backward_seconds`` by samples of the unit.  The last layer's
    include the loss, the first layer's backward makes no gradient of its input."""

    name: str
    forward_seconds: Mapping[int, Spread]
    backward_seconds: Mapping[int, Spread]
    #: Of one sample: what it returns, and what its forward keeps for its backward.
    output_bytes: int
    kept_bytes: int
    #: Trained weights, and the number of their tensors.
    parameter_bytes: int
    parameter_tensors: int

    def check(self) -> None:
        """ValueError for times and bytes that cannot be."""
        for what, times in (
            ("forward", self.forward_seconds),
            ("backward", self.backward_seconds),
        ):
            if not times:
                raise ValueError(f"layer {self.name!r} has no {what} times")
            for samples, spread in times.items():
                if samples < 1:
                    raise ValueError(f"layer {self.name!r} has a {what} of {samples} samples")
                for seconds in spread:
                    _check(f"layer {self.name!r} has a {what} that", seconds, "s")
        for size in (self.output_bytes, self.kept_bytes, self.parameter_bytes):
            _check(f"layer {self.name!r} has something that", size, "bytes")


@dataclass(frozen=True)
class Links:
    """What was measured between ranks: a message's latency, the bandwidth of a long one, and
    seconds of an all-reduce by number of ranks and bytes."""

    ranks: int
    latency_seconds: float
    bandwidth_bytes_per_s: float
    all_reduce_seconds: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    #: Seconds that a device computes longer for every byte it sends or receives meanwhile.
    stolen_seconds_per_byte: float = 0.0


@dataclass(frozen=True)
class Profile:
    """Of a model, for images of this shape, in this precision, on this device."""

    model: ModelSpec
    image: tuple[int, int, int]
    precision: Precision
    device: str
    source: Literal["measured", "analytic"]
    #: How it came to be: versions, repeats; or efficiencies assumed and where they are from.
    provenance: Mapping[str, Any]
    layers: tuple[LayerProfile, ...]
    #: Of one sample of the model's input.
    input_bytes: int
    #: An optimizer's step, by ``OptimizerSpec.method``, per byte of weights; and
    #: :data:`COPY`.
    optimizer_seconds_per_byte: Mapping[str, float]
    #: Mean seconds of one of k units computed at once on one device ÷ those of one alone, by k.
    concurrency: Mapping[int, float] = field(default_factory=dict)
    #: What the runtime itself takes for an action, by op, in seconds.
    action_seconds: Mapping[str, float] = field(default_factory=dict)
    links: Links | None = None
    #: What a pass of ``runtimes.planning.reference`` took between the measurements, the median.
    reference_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a profile needs at least one layer")
        for layer in self.layers:
            layer.check()
        _check("the input", self.input_bytes, "bytes")
        for what, seconds in (
            *((f"a step of {name}", s) for name, s in self.optimizer_seconds_per_byte.items()),
            *((f"{op} of the runtime", s) for op, s in self.action_seconds.items()),
            ("the reference", self.reference_seconds or 0.0),
        ):
            _check(what, seconds, "s")

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Bytes of one sample's input of every layer, and of the model's output."""
        return (self.input_bytes, *(layer.output_bytes for layer in self.layers))

    @property
    def largest_unit(self) -> int:
        """The most samples for which every layer has times."""
        times = (t for x in self.layers for t in (x.forward_seconds, x.backward_seconds))
        return min(max(sizes) for sizes in times)

    def forward(self, first: int, last: int, samples: int) -> float:
        """Seconds of a forward of so many samples through layers [first, last)."""
        return sum(
            interpolated(layer.forward_seconds, samples, f"layer {layer.name!r}")
            for layer in self.layers[first:last]
        )

    def backward(self, first: int, last: int, samples: int) -> float:
        """As :meth:`forward`."""
        return sum(
            interpolated(layer.backward_seconds, samples, f"layer {layer.name!r}")
            for layer in self.layers[first:last]
        )

    def step_seconds(self, first: int, last: int, method: str, versions: int = 1) -> float:
        """Of an optimizer's step of layers [first, last), which makes a further version of the
        weights where several are held; ``method`` as of ``OptimizerSpec.method``."""
        known = self.optimizer_seconds_per_byte
        if method not in known:
            raise ValueError(
                f"the profile has no step of {method!r}, only of {', '.join(known) or 'none'}: "
                "profile it"
            )
        each = known[method] + (known.get(COPY, 0.0) if versions > 1 else 0.0)
        return each * sum(layer.parameter_bytes for layer in self.layers[first:last])

    def average_seconds(self, first: int, last: int, copies: int) -> float:
        """Of drawing so many copies of layers [first, last) and their reference to each other.

        It is bound by memory as a step of plain SGD is, which reads two tensors of the weights'
        size and writes one: so is what a copy adds to the reference, and what it takes of it; that
        the reference is scaled once, before, reads one and writes one.
        """
        if "sgd" not in self.optimizer_seconds_per_byte:
            raise ValueError(
                "the profile has no step of 'sgd', from which the time of averaging follows: "
                "profile it"
            )
        steps = 2 * copies + 2 / 3
        weights = sum(layer.parameter_bytes for layer in self.layers[first:last])
        return steps * self.optimizer_seconds_per_byte["sgd"] * weights

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Profile:
        """ValueError for a document that is not of this schema."""
        values = dict(document)
        schema = values.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(f"not a profile of schema {SCHEMA}: {schema!r}")
        try:
            values["model"] = ModelSpec(**values["model"])
            values["image"] = tuple(values["image"])
            values["layers"] = tuple(_layer(layer) for layer in values["layers"])
            values["concurrency"] = _by_number(values.get("concurrency", {}))
            if values.get("links") is not None:
                links = dict(values["links"])
                curves = _by_number(links.get("all_reduce_seconds", {}))
                links["all_reduce_seconds"] = {n: _by_number(c) for n, c in curves.items()}
                values["links"] = Links(**links)
            return cls(**values)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"a profile of {SCHEMA} that lacks something: {error}") from error

    @classmethod
    def load(cls, path: Path) -> Profile:
        """ValueError, naming the file, if it is not there, truncated or no profile."""
        try:
            document = json.loads(path.read_text())
        except OSError as error:
            raise ValueError(
                f"cannot read the profile {path}: {error.strerror}; `pipebench profile` writes one"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"{path} is no whole JSON document ({error}): measure it anew with "
                "`pipebench profile`"
            ) from error
        if not isinstance(document, dict):
            raise ValueError(f"{path} is no profile: `pipebench profile` writes one")
        try:
            return cls.from_json(document)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _check(what: str, amount: float, unit: str) -> None:
    if not 0 <= amount < math.inf:
        raise ValueError(
            f"{what} takes {amount} {unit}, but times and bytes are 0 or more: measure the profile "
            "anew"
        )


def _layer(document: Mapping[str, Any]) -> LayerProfile:
    values = dict(document)
    for key in ("forward_seconds", "backward_seconds"):
        values[key] = {n: Spread(*spread) for n, spread in _by_number(values[key]).items()}
    return LayerProfile(**values)


def _by_number(document: Mapping[Any, Any]) -> dict[int, Any]:
    """JSON has only texts for keys."""
    return {int(key): value for key, value in document.items()}


def interpolated(times: Mapping[int, Spread], samples: int, what: str) -> float:
    """Linear between the two measured sizes around ``samples``, nothing beyond them: ValueError.

    A unit's time is near a line of its size only piece by piece: below some size a device is not
    filled.
    """
    if samples in times:
        return times[samples].median
    sizes = sorted(times)
    if not sizes[0] < samples < sizes[-1]:
        raise ValueError(
            f"{what} is profiled for {_listed(sizes)} samples, not for {samples}: profile it with "
            f"--batch-sizes that reach from the smallest to the largest unit"
        )
    low, high = next(pair for pair in pairwise(sizes) if pair[0] < samples < pair[1])
    share = (samples - low) / (high - low)
    return times[low].median * (1 - share) + times[high].median * share


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
