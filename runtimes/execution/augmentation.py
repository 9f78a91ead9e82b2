"""Cut-out, random crop and flip, keyed by (seed, epoch, sample): no generator, no state.

Symbols: n samples of C × H × W pixels; u a 32-bit word, uniform over the keys.

A sample's words do not depend on which other samples are asked for, or in which order, so the
first stage, its replicas and a single-process oracle see the same images.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtimes.job import Augmentation
from runtimes.model.mixing import Words, mix

__all__ = ["Augmenter", "words"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MASK = 0xFFFFFFFF


def words(seed: int, epoch: int, samples: np.ndarray[Any, Any], draw: str) -> Words:
    """(n,) words: mix(mix(mix(mix(seed) ^ epoch) ^ sample) ^ D), all modulo 2^32.

    D is the first four bytes of SHA-256 of "augmentation." + draw, little endian, which keeps the
    draws apart from each other and from the keys of the random layers.
    """
    domain = hashlib.sha256(f"augmentation.{draw}".encode()).digest()[:4]
    key = np.array([seed & _MASK], np.uint32)
    for part in (np.uint32(epoch & _MASK), (samples & _MASK).astype(np.uint32)):
        key = mix(key) ^ part
    return mix(mix(key) ^ np.frombuffer(domain, "<u4").astype(np.uint32))


def _below(word: Words, bound: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Uniform integers 0 … bound − 1: floor(u · bound / 2^32)."""
    return ((word.astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)


@dataclass(frozen=True)
class Augmenter:
    """The augmentation of a run of ``epochs`` epochs on images of ``height`` × ``width``."""

    augmentation: Augmentation
    seed: int
    epochs: int
    height: int
    width: int

    def __post_init__(self) -> None:
        side = min(self.height, self.width)
        for what, pixels in (
            ("cutout", self.augmentation.cutout),
            ("crop_padding", self.augmentation.crop_padding),
        ):
            if not 0 <= pixels <= side:
                raise ValueError(
                    f"{what} is {pixels} pixels, but the images are {self.height} × "
                    f"{self.width}: use 0 (off) … {side}"
                )

    def move(self, images: Bytes, samples: np.ndarray[Any, Any], epoch: int) -> Bytes:
        """Crop and flip (n, C, H, W) raw images of these samples, n indices.

        A crop is a window of the image's own size at an offset drawn uniformly from an image with
        ``crop_padding`` black pixels added on each side; the flip follows with probability 1/2.
        """
        padding, flip = self.augmentation.crop_padding, self.augmentation.flip
        if not padding and not flip:
            return images
        rows = np.arange(self.height) + padding
        columns = np.broadcast_to(np.arange(self.width) + padding, (len(samples), self.width))
        if flip:
            mirrored = words(self.seed, epoch, samples, "flip") < np.uint32(1 << 31)
            columns = np.where(mirrored[:, None], columns[:, ::-1], columns)
        shifts = [
            _below(words(self.seed, epoch, samples, f"crop.{axis}"), 2 * padding + 1) - padding
            for axis in ("row", "column")
        ]
        around = ((0, 0), (0, 0), (padding, padding), (padding, padding))
        padded = np.pad(images, around)
        return np.asarray(
            padded[
                np.arange(len(samples))[:, None, None, None],
                np.arange(images.shape[1])[:, None, None],
                (rows + shifts[0][:, None])[:, None, :, None],
                (columns + shifts[1][:, None])[:, None, None, :],
            ]
        )

    def cut(self, images: Tensor, samples: np.ndarray[Any, Any], epoch: int) -> Tensor:
        """Zero a square of (n, C, H, W) normalised images in place, and return them.

        A sample is cut with probability epoch / epochs (the schedule of AshPipe's published
        code), epochs counted from 0.  The square's centre is uniform over the pixels, and what
        falls outside the image is lost (DeVries & Taylor, 2017).
        """
        side = self.augmentation.cutout
        if not side:
            return images
        chosen = words(self.seed, epoch, samples, "cutout").astype(np.uint64)
        cut = chosen < np.uint64(min(epoch, self.epochs) * (1 << 32) // self.epochs)
        if not cut.any():
            return images
        inside = []
        for axis, length in (("row", self.height), ("column", self.width)):
            centre = _below(words(self.seed, epoch, samples, f"cutout.{axis}"), length)
            offset = np.arange(length) - (centre - side // 2)[:, None]
            inside.append((offset >= 0) & (offset < side))
        mask = cut[:, None, None] & inside[0][:, :, None] & inside[1][:, None, :]
        return images.masked_fill_(torch.from_numpy(mask[:, None]).to(images.device), 0)
