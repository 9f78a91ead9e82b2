"""Images and labels in memory: what a source yields, and what is computed of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from experiments.errors import UserError

__all__ = ["Bytes", "Labels", "Part", "Source", "check_held_out", "hold_out", "resize", "subset"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Labels = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Part:
    """``images`` (N, C, H, W) uint8, ``labels`` (N,) int64."""

    images: Bytes
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def check(self, classes: int, where: str) -> None:
        """UserError naming ``where`` unless these are images with one valid label each."""
        if self.images.ndim != 4 or len(self.images) != len(self.labels):
            raise UserError(
                f"{where}: images of shape {self.images.shape} and {len(self.labels)} labels "
                "do not go together: the files are not those of one data set"
            )
        if len(self) and not 0 <= self.labels.min() <= self.labels.max() < classes:
            raise UserError(
                f"{where}: labels {self.labels.min()} … {self.labels.max()}, but the data set "
                f"has classes 0 … {classes - 1}: the label file is damaged or another's"
            )


class Source(Protocol):
    """Where the raw data of a data set come from."""

    @property
    def origin(self) -> str:
        """For people: which files or which generator."""

    def identity(self) -> Mapping[str, Any]:
        """JSON data that is equal only if :meth:`load` gives equal arrays."""

    def load(self) -> tuple[Part, Part]:
        """(training part, validation part) at their native size."""


def subset(part: Part, samples: int | None, seed: int, stream: int, what: str) -> Part:
    """The first ``samples`` after a shuffle keyed by (seed, stream); all, unshuffled, for None."""
    if samples is None:
        return part
    if not 1 <= samples <= len(part):
        raise UserError(
            f"{what} is {samples}, but the data set has {len(part)} such samples: "
            f"use 1 … {len(part)}"
        )
    return _chosen(part, _shuffle(part, seed, stream)[:samples])


def hold_out(part: Part, held_out: int, samples: int | None, seed: int) -> tuple[Part, Part]:
    """(what is trained on, what is held out of it) of a training part.

    Both ends of the shuffle of :func:`subset`, stream 0: ``samples`` training images are the same
    with as without a part held out, and what is held out is the same for every ``samples``; None
    is all that is left.
    """
    check_held_out(held_out, len(part), samples)
    left = len(part) - held_out
    order = _shuffle(part, seed, 0)
    return _chosen(part, order[: samples or left]), _chosen(part, order[left:])


def check_held_out(held_out: int, images: int, samples: int | None) -> None:
    """UserError unless ``held_out`` of so many ``images`` leave enough to train on."""
    most = images - (samples or 1)
    if held_out > most:
        trained = f"{samples} are trained on" if samples else "one or more must be trained on"
        raise UserError(
            f"data.sizes.held_out is {held_out}, but of {images} training images {trained}: "
            + (f"hold out 1 … {most}" if most > 0 else "train on fewer (data.sizes.train)")
        )


def _shuffle(part: Part, seed: int, stream: int) -> Labels:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, stream])))
    return generator.permutation(len(part))


def _chosen(part: Part, indices: Labels) -> Part:
    return Part(part.images[indices], part.labels[indices])


def resize(images: Bytes, side: int) -> Bytes:
    """(n, C, H, W) → (n, C, side, side), bilinear (area-weighted when shrinking).

    Pillow computes it in fixed-point integers, so the bytes are the same on every machine.
    """
    if images.shape[2:] == (side, side):
        return images
    from PIL import Image

    resized = np.empty((*images.shape[:2], side, side), np.uint8)
    for sample, planes in enumerate(images):
        for channel, plane in enumerate(planes):
            picture = Image.fromarray(np.ascontiguousarray(plane))
            resized[sample, channel] = np.asarray(
                picture.resize((side, side), Image.Resampling.BILINEAR)
            )
    return resized
