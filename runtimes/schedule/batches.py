"""How the batches of a segment are cut into units (pipeline → unit → replica) and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from runtimes.plan import split

__all__ = ["Batches"]

_split = lru_cache(maxsize=4096)(split)


@lru_cache(maxsize=4096)
def _units(size: int, pipelines: int, pipeline: int, micro_batches: int) -> Sequence[int]:
    """Samples of each unit of a batch."""
    low, high = split(size, pipelines)[pipeline]
    return [last - first for first, last in split(high - low, micro_batches)]


@dataclass(frozen=True)
class Batches:
    """Batches of ``sizes`` samples, each cut into ``pipelines`` × ``micro_batches`` units; those
    that would be empty do not exist.

    A stage's R replicas share every unit, and make one update a batch.  With ``rounds`` (1F1B-RR
    of PipeDream) unit u, a whole batch, goes to replica u mod R instead, and an update takes a
    round of R units, the last of a segment fewer: so updates then differ from stage to stage.
    """

    sizes: tuple[int, ...]
    micro_batches: int = 1
    pipelines: int = 1
    rounds: bool = False

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"batches of {self.sizes} samples: every batch needs at least 1")
        if self.micro_batches < 1 or self.pipelines < 1:
            raise ValueError(
                f"micro-batches ({self.micro_batches}) and pipelines ({self.pipelines}) "
                "must be at least 1"
            )
        if self.rounds and (self.micro_batches > 1 or self.pipelines > 1):
            raise ValueError(
                f"units that go round the replicas are whole batches of one pipeline, not cut into "
                f"{self.micro_batches} micro-batches and {self.pipelines} pipelines: use 1 and 1"
            )

    def batch(self, unit: int) -> int:
        """Index of the batch that the unit is a part of."""
        return unit // self.micro_batches

    def updates(self, replicas: int) -> int:
        """Updates that a stage of so many replicas makes."""
        return -(-len(self.sizes) // replicas) if self.rounds else len(self.sizes)

    def update(self, unit: int, replicas: int) -> int:
        """The update, of a stage of so many replicas, that takes the unit's gradient."""
        return unit // replicas if self.rounds else self.batch(unit)

    def samples(self, pipeline: int, unit: int) -> tuple[int, int]:
        """The unit's half-open interval of samples, counted within its batch."""
        batch, index = divmod(unit, self.micro_batches)
        low, high = _split(self.sizes[batch], self.pipelines)[pipeline]
        first, last = _split(high - low, self.micro_batches)[index]
        return low + first, low + last

    def share_of_batch(self, pipeline: int, batch: int) -> int:
        """Samples of the batch that a pipeline trains; may be none."""
        low, high = _split(self.sizes[batch], self.pipelines)[pipeline]
        return high - low

    def size(self, pipeline: int, unit: int) -> int:
        """Samples in the unit; 0 for a unit that does not exist."""
        batch, index = divmod(unit, self.micro_batches)
        if not 0 <= batch < len(self.sizes):
            return 0
        return _units(self.sizes[batch], self.pipelines, pipeline, self.micro_batches)[index]

    def unit_size(self, pipeline: int) -> int | None:
        """Samples in every unit, if replicas share all units alike; else None."""
        sizes = {
            size
            for batch in set(self.sizes)
            for size in _units(batch, self.pipelines, pipeline, self.micro_batches)
        }
        return sizes.pop() if len(sizes) == 1 and not self.rounds else None

    def units(self, pipeline: int, update: int, replicas: int) -> Sequence[int]:
        """The units of an update of a stage of so many replicas, in order."""
        if self.rounds:
            first = update * replicas
            return range(first, min(first + replicas, len(self.sizes)))
        return self.units_of_batch(pipeline, update)

    def units_of_batch(self, pipeline: int, batch: int) -> Sequence[int]:
        first = batch * self.micro_batches
        units = range(first, first + self.micro_batches)
        # With (B + i) // n the empty parts come first; the common case has none.
        if self.size(pipeline, first):
            return units
        return [unit for unit in units if self.size(pipeline, unit)]

    def share(self, pipeline: int, unit: int, replicas: int, replica: int) -> tuple[int, int]:
        """A replica's samples of the unit, counted within the unit; may be empty."""
        if self.rounds:
            return (0, self.size(pipeline, unit)) if unit % replicas == replica else (0, 0)
        return _split(self.size(pipeline, unit), replicas)[replica]

    def is_shared(self, pipeline: int, unit: int, replicas: int, replica: int) -> bool:
        """Whether the replica's share has any sample."""
        low, high = self.share(pipeline, unit, replicas, replica)
        return low < high
