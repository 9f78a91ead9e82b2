"""CIFAR-100 as torchvision reads it: the python version of the archive, unpacked."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.arrays import Part
from experiments.data.store import locked
from experiments.errors import UserError

__all__ = ["Cifar100"]

_WAY_OUT = (
    "give the directory that holds cifar-100-python with --data-root, "
    "or set download=true to fetch it there"
)


@dataclass(frozen=True)
class Cifar100:
    """``root`` holds the directory cifar-100-python, checked against torchvision's MD5 sums."""

    root: Path

    @classmethod
    def locate(cls, root: Path | None, downloads: Path, download: bool) -> Cifar100:
        source = cls(downloads if root is None else root)
        defect = source._defect()
        if defect is None:
            return source
        if not download:
            raise UserError(f"{defect}: {_WAY_OUT}")
        source._download()
        return source

    @property
    def origin(self) -> str:
        return f"torchvision.datasets.CIFAR100 in {self.root}"

    def identity(self) -> Mapping[str, Any]:
        return {path.name: md5 for path, md5 in self._files()}

    def load(self) -> tuple[Part, Part]:
        return self._part(train=True), self._part(train=False)

    def _part(self, *, train: bool) -> Part:
        from torchvision.datasets import CIFAR100

        try:
            data_set = CIFAR100(str(self.root), train=train, download=False)
            images = np.ascontiguousarray(np.asarray(data_set.data).transpose(0, 3, 1, 2))
            labels = np.asarray(data_set.targets, np.int64)
        except (RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
            file = self.root / CIFAR100.base_folder / ("train" if train else "test")
            raise UserError(f"{file} cannot be read ({error}): {_WAY_OUT}") from error
        return Part(images, labels)

    def _files(self) -> list[tuple[Path, str]]:
        from torchvision.datasets import CIFAR100

        listed = [*CIFAR100.train_list, *CIFAR100.test_list]
        listed.append([CIFAR100.meta["filename"], CIFAR100.meta["md5"]])
        return [(self.root / CIFAR100.base_folder / name, md5) for name, md5 in listed]

    def _defect(self) -> str | None:
        """The first file that is missing or damaged, in words."""
        from torchvision.datasets.utils import check_integrity

        for path, md5 in self._files():
            if not path.is_file():
                return f"no CIFAR-100 in {self.root}: {path} is missing"
            if not check_integrity(str(path), md5):
                return f"{path} is truncated or damaged (its MD5 sum is not {md5})"
        return None

    def _download(self) -> None:
        from torchvision.datasets import CIFAR100

        try:
            # The other process's files count: torchvision looks before it fetches.
            with locked(self.root / ".download.lock"):
                CIFAR100(str(self.root), download=True)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"cannot download CIFAR-100 to {self.root} ({error}): {_WAY_OUT}"
            ) from error
