"""A system's options: the fields of its dataclass, with what values they take.

flag: bool = True                                        true or false
policy: Literal["A", "B"] = "A"                          one of these
advance: Annotated[int, Limits(at_least=0)] = 0          a number within limits
alpha: Annotated[float | None, Limits(above=0)] = None   the same, or left out
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

__all__ = ["Kind", "Limits", "Option", "options_of"]

#: Of the values: one of a few, whole numbers, numbers.
Kind = Literal["choice", "integer", "number"]


@dataclass(frozen=True)
class Limits:
    """Of a number; None: no limit on that side."""

    at_least: float | None = None
    above: float | None = None

    @property
    def text(self) -> str:
        """E.g. "at least 0", "above 0"."""
        said = [f"at least {self.at_least:g}"] if self.at_least is not None else []
        said += [f"above {self.above:g}"] if self.above is not None else []
        return " and ".join(said)

    def admit(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (
            self.above is None or value > self.above
        )


@dataclass(frozen=True)
class Option:
    """``choices``: of a "choice"; ``limits``: of numbers; ``optional``: whether None, which stands
    for a value that depends on the plan, is one as well."""

    name: str
    kind: Kind
    default: Any
    choices: tuple[Any, ...] = ()
    limits: Limits = Limits()
    optional: bool = False

    @property
    def allowed(self) -> str:
        """In words: "one of 'A', 'B'", "a whole number, at least 0"."""
        if self.kind == "choice":
            return f"one of {', '.join(map(repr, self.choices))}"
        what = "a whole number" if self.kind == "integer" else "a number"
        return f"{what}, {self.limits.text}" if self.limits.text else what

    def checked(self, value: Any) -> Any:
        """The value as the system takes it (a whole number where any will do becomes a float);
        ValueError, naming option, value and limits, for one that it does not."""
        if self._admits(value):
            return float(value) if self.kind == "number" and value is not None else value
        raise ValueError(f"{self.name} = {value!r}, but it is {self.allowed}")

    def _admits(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if self.kind == "choice":
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        # A bool is an int to Python.
        numeric = (int,) if self.kind == "integer" else (int, float)
        return type(value) in numeric and math.isfinite(value) and self.limits.admit(value)

    def to_json(self) -> dict[str, Any]:
        """``allowed`` lists the choices; numbers have the limits that there are."""
        document: dict[str, Any] = {"kind": self.kind, "default": self.default}
        if self.kind == "choice":
            return document | {"allowed": list(self.choices)}
        limits = {"at_least": self.limits.at_least, "above": self.limits.above}
        return document | {name: limit for name, limit in limits.items() if limit is not None}


def options_of(system: type) -> dict[str, Option]:
    """The options of a system's dataclass, by name."""
    hints = get_type_hints(system, include_extras=True)
    return {
        item.name: _option(item.name, hints[item.name], item.default) for item in fields(system)
    }


def _option(name: str, hint: Any, default: Any) -> Option:
    limits = Limits()
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)
    if get_origin(hint) is Literal:
        return Option(name, "choice", default, get_args(hint))
    if hint is bool:
        return Option(name, "choice", default, (True, False))
    kinds = set(get_args(hint) or (hint,))
    if kinds - {NoneType} not in ({int}, {float}):
        raise TypeError(f"option {name} is of type {hint}, which is none that options have")
    return Option(
        name,
        "integer" if int in kinds else "number",
        default,
        limits=limits,
        optional=NoneType in kinds,
    )
