"""scikit-learn's handwritten digits: 1797 images of 8 × 8 pixels, which come with the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.data.arrays import Part

__all__ = ["Digits"]


@dataclass(frozen=True)
class Digits:
    """A stratified split into 1437 and 360 images, a function of ``seed`` alone."""

    seed: int
    validation_samples: int = 360
    origin: str = field(default="sklearn.datasets.load_digits", init=False)

    def identity(self) -> Mapping[str, Any]:
        # The images never changed since 2011; importing scikit-learn to hash them takes a second.
        return {"origin": self.origin, "split": [self.seed, self.validation_samples]}

    def load(self) -> tuple[Part, Part]:
        whole = self._all()
        chosen = np.zeros(len(whole), bool)
        chosen[stratified(whole.labels, self.validation_samples, self.seed)] = True
        return (
            Part(whole.images[~chosen], whole.labels[~chosen]),
            Part(whole.images[chosen], whole.labels[chosen]),
        )

    def _all(self) -> Part:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        # The values are counts 0 … 16 of set pixels in a 4 × 4 block; 16 becomes 255.
        images = np.rint(np.asarray(bunch.images) * (255 / 16)).astype(np.uint8)[:, None]
        return Part(images, np.asarray(bunch.target, np.int64))


def stratified(labels: np.ndarray[Any, Any], samples: int, seed: int) -> np.ndarray[Any, Any]:
    """``samples`` indices in which each class has its share of ``labels``, within one sample."""
    generator = np.random.Generator(np.random.PCG64(seed))
    order = generator.permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    # Evenly spaced picks from the samples sorted by class give each class its share.
    picks = (np.arange(samples) * len(labels) + len(labels) // 2) // samples
    return np.asarray(by_class[picks])
