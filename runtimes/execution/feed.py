"""A feed from prepared arrays: which samples each batch has, and their values.

Every rank opens the same directory and computes the same batches from (seed, step) alone;
nothing about them is ever sent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtimes.execution.augmentation import Augmenter
from runtimes.job import Augmentation

__all__ = ["ArrayFeed"]

_UNCHANGED = Augmentation()

Indices = np.ndarray[Any, np.dtype[np.int64]]


class ArrayFeed:
    """The Feed of one directory of a DataSpec (images.npy, labels.npy, meta.json).

    ``shuffle``: the samples of an epoch come in an order that is a function of (seed, epoch);
    without it, as in an evaluation, in the order of the file.  ``samples``, ``classes`` and
    ``image_shape`` (C, H, W) describe the data.  ValueError names a file that is missing,
    damaged, or does not fit the others.
    """

    samples: int
    classes: int
    image_shape: tuple[int, int, int]

    def __init__(
        self,
        directory: str | Path,
        *,
        batch_size: int,
        seed: int = 0,
        epochs: int = 1,
        augmentation: Augmentation = _UNCHANGED,
        shuffle: bool = True,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        for what, value, least in (
            ("batch_size", batch_size, 1),
            ("epochs", epochs, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{what} is {value}, but must be at least {least}")
        folder = Path(directory)
        self._images = _open(folder / "images.npy", np.dtype(np.uint8), 4)
        labels = _open(folder / "labels.npy", np.dtype(np.int64), 1)
        mean, std, self.classes = _read_meta(folder / "meta.json", self._images.shape[1])
        self.samples = len(labels)
        if not 0 < self.samples == len(self._images):
            raise ValueError(
                f"{folder}: {len(self._images)} images and {self.samples} labels do not go "
                "together: prepare the data set anew"
            )
        if labels.min() < 0 or labels.max() >= self.classes:
            raise ValueError(
                f"{folder / 'labels.npy'} has labels {labels.min()} … {labels.max()}, but "
                f"meta.json says {self.classes} classes: prepare the data set anew"
            )
        channels, height, width = self._images.shape[1:]
        self.image_shape = (channels, height, width)
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        self._device, self._dtype = torch.device(device), dtype
        self._labels = torch.from_numpy(np.array(labels)).to(self._device)
        self._mean, self._std = (
            torch.tensor(values, dtype=dtype, device=self._device).view(-1, 1, 1)
            for values in (mean, std)
        )
        self._augmenter = Augmenter(augmentation, seed, epochs, height, width)
        self._last_order: tuple[int, Indices] | None = None

    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of each batch of an epoch, of any epoch; the last may be smaller."""
        full, rest = divmod(self.samples, self._batch_size)
        return (self._batch_size,) * full + ((rest,) if rest else ())

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self._batch_size)

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, batch within the epoch) of update ``step``, all counted from 0."""
        return divmod(step, self.steps_per_epoch)

    def indices(self, step: int) -> Indices:
        """(B,) sample indices of the batch of update ``step``: a stretch of the epoch's order."""
        epoch, batch = self.position(step)
        first = batch * self._batch_size
        return self._order(epoch)[first : first + self._batch_size]

    def images(self, indices: np.ndarray[Any, Any], step: int) -> Tensor:
        """(n, C, H, W) = augmented (x / 255 − mean) / std of these samples, which may be any part
        of the batch of update ``step``: a sample's values do not depend on the others."""
        epoch, _ = self.position(step)
        raw = self._augmenter.move(self._images[indices], indices, epoch)
        images = torch.from_numpy(raw).to(self._device).to(self._dtype)
        images.div_(255).sub_(self._mean).div_(self._std)
        return self._augmenter.cut(images, indices, epoch)

    def labels(self, indices: np.ndarray[Any, Any]) -> Tensor:
        """(n,) int64, on the device."""
        return self._labels[torch.from_numpy(np.asarray(indices, np.int64)).to(self._device)]

    def _order(self, epoch: int) -> Indices:
        if not self._shuffle:
            return np.arange(self.samples, dtype=np.int64)
        # One read and one write of a pair, so that threads of one rank may share the feed.
        last = self._last_order
        if last is None or last[0] != epoch:
            key = np.random.SeedSequence([self._seed, epoch])
            order = np.random.Generator(np.random.PCG64(key)).permutation(self.samples)
            last = self._last_order = (epoch, order.astype(np.int64, copy=False))
        return last[1]


def _open(path: Path, dtype: np.dtype[Any], dimensions: int) -> np.ndarray[Any, Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is missing or damaged ({error}): prepare the data set anew"
        ) from error
    if array.dtype != dtype or array.ndim != dimensions:
        raise ValueError(
            f"{path} holds a {array.ndim}-dimensional array of {array.dtype}, but {dimensions} "
            f"dimensions of {dtype} are needed: prepare the data set anew"
        )
    return np.asarray(array)


def _read_meta(path: Path, channels: int) -> tuple[list[float], list[float], int]:
    try:
        meta = json.loads(path.read_text())
        mean, std, classes = list(meta["mean"]), list(meta["std"]), int(meta["classes"])
        fits = len(mean) == len(std) == channels and min(std) > 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is missing or damaged ({error}): prepare the data set anew"
        ) from error
    if not fits:
        raise ValueError(
            f"{path} must give one mean and one positive deviation for each of {channels} "
            "channels: prepare the data set anew"
        )
    return mean, std, classes
