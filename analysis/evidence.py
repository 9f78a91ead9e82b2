"""Evidence classes: how a number came to be, and which numbers may meet in one formula."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Evidence", "Quantity", "product", "ratio", "same_class", "weakest"]


class Evidence(IntEnum):
    """Ordered by strength: a larger value is weaker evidence.

    measured: real tensors, processes and links; emulated: the real runtime, but compute is a
    calibrated wait; simulated: discrete events over a profile; paper: quoted.
    """

    MEASURED = 0
    EMULATED = 1
    SIMULATED = 2
    PAPER = 3

    @classmethod
    def parse(cls, text: str) -> Evidence:
        """The class of a name as records spell it, e.g. "measured"."""
        try:
            return cls[text.upper()]
        except KeyError:
            names = ", ".join(member.label for member in cls)
            raise ValueError(f"unknown evidence class {text!r}: one of {names}") from None

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Quantity:
    """A number with its evidence class."""

    value: float
    evidence: Evidence


def weakest(classes: Iterable[Evidence]) -> Evidence:
    """The class that a combination of numbers of ``classes`` carries."""
    return max(classes)


def same_class(*classes: Evidence) -> Evidence:
    """The one class of all arguments.

    Raises:
        ValueError: the classes differ; what one class over- or understates, another does not,
            so a ratio across them measures the classes and not the systems.
    """
    if len(set(classes)) != 1:
        names = " and ".join(evidence.label for evidence in sorted(set(classes)))
        raise ValueError(
            f"a ratio cannot mix {names} numbers: compare numbers of one evidence class"
        )
    return classes[0]


def ratio(numerator: Quantity, denominator: Quantity) -> Quantity:
    """``numerator`` ÷ ``denominator``, both of one evidence class (ValueError otherwise)."""
    evidence = same_class(numerator.evidence, denominator.evidence)
    return Quantity(numerator.value / denominator.value, evidence)


def product(*factors: Quantity) -> Quantity:
    """The product, which carries the weakest class among its factors."""
    value = 1.0
    for factor in factors:
        value *= factor.value
    return Quantity(value, weakest(factor.evidence for factor in factors))
