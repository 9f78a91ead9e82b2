"""What the actions of a program cost: from a profile, or the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from runtimes.plan import Plan
from runtimes.planning.profile import Profile
from runtimes.schedule.action import Op

__all__ = ["Costs", "ProfileCosts", "Reduced", "UniformCosts", "checked"]


class Reduced(NamedTuple):
    """What a reduction sums: bytes, of so many tensors."""

    size: float
    tensors: int


class Costs(Protocol):
    """Seconds and bytes, whatever the cluster.  The same question always has the same answer."""

    def compute_seconds(
        self, op: Op, stage: int, replica: int, part: int | None, samples: int
    ) -> float:
        """Of an F, B or R of so many samples; ``part`` of a B, None for all of it."""

    def step_seconds(self, stage: int, replica: int) -> float:
        """Of an optimizer's step."""

    def average_seconds(self, stage: int, replica: int, copies: int) -> float:
        """Of tying so many copies to their reference at once."""

    def message_bytes(self, boundary: int) -> float:
        """Of one sample, between stage ``boundary`` and the next one, either way."""

    def reduced(self, stage: int, part: int | None) -> Reduced:
        """By a REDUCE of that part, None for the whole stage."""

    def overhead_seconds(self, op: Op) -> float:
        """What the runtime itself takes for such an action, on the device that performs it."""


class ProfileCosts:
    """The layers of a profile, cut as the plan says.

    A B of a part is the backward of that part's layers, an R costs a forward, a message has the
    boundary's bytes.  ``optimizer``: its name in the profile; None for steps, and averaging, that
    cost nothing.
    """

    def __init__(self, profile: Profile, plan: Plan, optimizer: str | None = None):
        if plan.layers != len(profile.layers):
            raise ValueError(
                f"the plan cuts {plan.layers} layers, but the profile is of "
                f"{len(profile.layers)}: profile the model of the plan"
            )
        known = profile.optimizer_seconds_per_byte
        if optimizer is not None and optimizer not in known:
            raise ValueError(
                f"the profile has no step of {optimizer!r}, only of {', '.join(known) or 'none'}: "
                "profile it"
            )
        self._profile, self._plan = profile, plan
        self._step_seconds_per_byte = 0.0 if optimizer is None else known[optimizer]
        self._averages = optimizer is not None
        self._known: dict[tuple[Op, int, int | None, int], float] = {}

    def compute_seconds(
        self, op: Op, stage: int, replica: int, part: int | None, samples: int
    ) -> float:
        key = op, stage, part, samples
        if key not in self._known:
            layers = self._layers(stage, part)
            time = self._profile.backward if op == Op.B else self._profile.forward
            self._known[key] = time(*layers, samples)
        return self._known[key]

    def _layers(self, stage: int, part: int | None) -> tuple[int, int]:
        planned = self._plan.stages[stage]
        return (planned.first, planned.last) if part is None else planned.parts[part]

    def step_seconds(self, stage: int, replica: int) -> float:
        return self._step_seconds_per_byte * self.reduced(stage, None).size

    def average_seconds(self, stage: int, replica: int, copies: int) -> float:
        layers = self._layers(stage, None)
        return self._profile.average_seconds(*layers, copies) if self._averages else 0.0

    def message_bytes(self, boundary: int) -> float:
        return self._profile.boundaries[self._plan.stages[boundary].last]

    def reduced(self, stage: int, part: int | None) -> Reduced:
        first, last = self._layers(stage, part)
        layers = self._profile.layers[first:last]
        return Reduced(
            sum(layer.parameter_bytes for layer in layers),
            sum(layer.parameter_tensors for layer in layers),
        )

    def overhead_seconds(self, op: Op) -> float:
        return self._profile.action_seconds.get(op.value, 0.0)


@dataclass(frozen=True)
class UniformCosts:
    """Constants, the same for all units whatever their samples: for closed forms and drawings.

    Times are one number for all stages, or one for each.  A B that is cut takes an equal share of
    its time for every part, and its stage's ``parameter_bytes`` are shared alike.
    ``recompute_seconds``: None for those of a forward.
    """

    plan: Plan
    forward_seconds: float | Sequence[float] = 1.0
    backward_seconds: float | Sequence[float] = 2.0
    recompute_seconds: float | Sequence[float] | None = None
    optimizer_seconds: float | Sequence[float] = 0.0
    #: Of one sample, at each boundary.
    sample_bytes: float | Sequence[float] = 0.0
    parameter_bytes: float | Sequence[float] = 0.0
    #: Of a whole stage, which a reduction in parts takes in as many calls as there are parts.
    tensors: int = 1
    action_seconds: Mapping[Op, float] = field(default_factory=dict)
    #: Of averaging, a copy.
    copy_seconds: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        for name in (
            "forward_seconds",
            "backward_seconds",
            "recompute_seconds",
            "optimizer_seconds",
            "copy_seconds",
            "sample_bytes",
            "parameter_bytes",
        ):
            given = getattr(self, name)
            values = given if isinstance(given, Sequence) else [given]
            wanted = len(self.plan.stages) - (name == "sample_bytes")
            if isinstance(given, Sequence) and len(values) != wanted:
                raise ValueError(f"{name} needs {wanted} numbers, not {len(values)}")
            wrong = [v for v in values if v is not None and not 0 <= v < math.inf]
            if wrong:
                raise ValueError(f"{name} is {wrong[0]}, but must be 0 or more")

    def compute_seconds(
        self, op: Op, stage: int, replica: int, part: int | None, samples: int
    ) -> float:
        if op == Op.B:
            shares = 1 if part is None else len(self.plan.stages[stage].parts)
            return _at(self.backward_seconds, stage) / shares
        again = self.forward_seconds if self.recompute_seconds is None else self.recompute_seconds
        return _at(self.forward_seconds if op == Op.F else again, stage)

    def step_seconds(self, stage: int, replica: int) -> float:
        return _at(self.optimizer_seconds, stage)

    def average_seconds(self, stage: int, replica: int, copies: int) -> float:
        return copies * _at(self.copy_seconds, stage)

    def message_bytes(self, boundary: int) -> float:
        return _at(self.sample_bytes, boundary)

    def reduced(self, stage: int, part: int | None) -> Reduced:
        shares = 1 if part is None else len(self.plan.stages[stage].parts)
        return Reduced(_at(self.parameter_bytes, stage) / shares, self.tensors)

    def overhead_seconds(self, op: Op) -> float:
        return self.action_seconds.get(op, 0.0)


def _at(given: float | Sequence[float], index: int) -> float:
    return given[index] if isinstance(given, Sequence) else given


def checked(what: str, amount: float, unit: str = "seconds") -> float:
    """The amount, or ValueError if it cannot be."""
    if not 0 <= amount < math.inf:
        raise ValueError(f"{what} costs {amount} {unit}: costs are finite and 0 or more")
    return amount
