"""Random bytes as images, for throughput where the pixels do not matter.  Never real data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from experiments.data.arrays import Part

__all__ = ["RandomImages"]


@dataclass(frozen=True)
class RandomImages:
    """Both parts at the size asked for; training and validation part have their own streams."""

    train_samples: int
    validation_samples: int
    channels: int
    classes: int
    side: int
    seed: int

    @property
    def origin(self) -> str:
        return f"random bytes, Philox keyed by seed {self.seed}: synthetic, no real data"

    def identity(self) -> Mapping[str, Any]:
        return asdict(self)

    def load(self) -> tuple[Part, Part]:
        return self._part(self.train_samples, 0), self._part(self.validation_samples, 1)

    def _part(self, samples: int, stream: int) -> Part:
        pixels, labels = (
            np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, stream, k])))
            for k in (0, 1)
        )
        raw = pixels.bytes(samples * self.channels * self.side * self.side)
        images = np.frombuffer(raw, np.uint8).reshape(-1, self.channels, self.side, self.side)
        return Part(images, labels.integers(0, self.classes, samples, np.int64))
