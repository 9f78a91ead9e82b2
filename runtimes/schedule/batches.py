"""How the batches of a segment are cut into units: pipeline → unit → replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from runtimes.plan import split

__all__ = ["Batches"]

_split = lru_cache(maxsize=4096)(split)


@dataclass(frozen=True)
class Batches:
    """Batches of ``sizes`` samples, one an update, each cut into ``pipelines`` × ``micro_batches``.

    Unit u belongs to update u // micro_batches; units that would be empty do not exist.
    """

    sizes: tuple[int, ...]
    micro_batches: int = 1
    pipelines: int = 1

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"batches of {self.sizes} samples: every batch needs at least 1")
        if self.micro_batches < 1 or self.pipelines < 1:
            raise ValueError(
                f"micro-batches ({self.micro_batches}) and pipelines ({self.pipelines}) "
                "must be at least 1"
            )

    @property
    def updates(self) -> int:
        return len(self.sizes)

    def update(self, unit: int) -> int:
        return unit // self.micro_batches

    def samples(self, pipeline: int, unit: int) -> tuple[int, int]:
        """The unit's half-open interval of samples, counted within its batch."""
        update, index = divmod(unit, self.micro_batches)
        low, high = _split(self.sizes[update], self.pipelines)[pipeline]
        first, last = _split(high - low, self.micro_batches)[index]
        return low + first, low + last

    def size(self, pipeline: int, unit: int) -> int:
        """Samples in the unit; 0 for a unit that does not exist."""
        if not 0 <= unit < self.updates * self.micro_batches:
            return 0
        low, high = self.samples(pipeline, unit)
        return high - low

    def units(self, pipeline: int, update: int) -> Sequence[int]:
        """The units of an update, in order."""
        first = update * self.micro_batches
        units = range(first, first + self.micro_batches)
        # With (B + i) // n the empty parts come first; the common case has none.
        if self.size(pipeline, first):
            return units
        return [unit for unit in units if self.size(pipeline, unit)]

    def share(self, pipeline: int, unit: int, replicas: int, replica: int) -> tuple[int, int]:
        """A replica's samples of the unit, counted within the unit; may be empty."""
        return _split(self.size(pipeline, unit), replicas)[replica]
