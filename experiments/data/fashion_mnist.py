"""Fashion-MNIST from IDX files, as torchvision stores them or as Debian packages them."""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.arrays import Bytes, Part
from experiments.data.store import locked
from experiments.errors import UserError

__all__ = ["DEBIAN_DIRECTORY", "FashionMnist", "read_idx"]

DEBIAN_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")
_PARTS = ("train", "t10k")
_KINDS = {"images": 3, "labels": 1}
_WAYS_OUT = (
    "either install Debian's package (apt-get install dataset-fashion-mnist; or unpack it with "
    "dpkg -x and give that directory), or give the directory that holds torchvision's "
    "FashionMNIST/raw with --data-root (download=true fetches it there)"
)


@dataclass(frozen=True)
class FashionMnist:
    """``files``: path of ("train" | "t10k", "images" | "labels")."""

    files: Mapping[tuple[str, str], Path]

    @classmethod
    def locate(cls, root: Path | None, downloads: Path, download: bool) -> FashionMnist:
        """Look in ``root``, else where Debian's package and earlier downloads are."""
        roots = [DEBIAN_DIRECTORY, downloads] if root is None else [root]
        places = [place for base in roots for place in _places(base)]
        for place in places:
            if any((place / f"train-images-idx3-ubyte{end}").exists() for end in ("", ".gz")):
                return cls(_files(place))
        if not download:
            looked = ", ".join(str(base) for base in roots)
            raise UserError(f"no Fashion-MNIST in {looked}: {_WAYS_OUT}")
        target = downloads if root is None else root
        _download(target)
        return cls(_files(target / "FashionMNIST" / "raw"))

    @property
    def origin(self) -> str:
        return f"IDX files in {self.files['train', 'images'].parent}"

    def identity(self) -> Mapping[str, Any]:
        return {path.name: _sha256(path) for path in self.files.values()}

    def load(self) -> tuple[Part, Part]:
        train, validation = (
            Part(
                read_idx(self.files[part, "images"], 3)[:, None],
                read_idx(self.files[part, "labels"], 1).astype(np.int64),
            )
            for part in _PARTS
        )
        return train, validation


def read_idx(path: Path, dimensions: int) -> Bytes:
    """The uint8 array of an IDX file, gzipped or not; UserError naming it if it is damaged."""
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): fetch it again") from error
    header = 4 * (1 + dimensions)
    # Two zero bytes, 8 for unsigned bytes, the number of dimensions, then each size, big-endian.
    if len(data) < header or data[:4] != bytes((0, 0, 8, dimensions)):
        raise UserError(f"{path} is no IDX file of {dimensions}-dimensional bytes: fetch it again")
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    expected = header + int(np.prod(shape, dtype=np.int64))
    if len(data) != expected:
        raise UserError(
            f"{path} is truncated or damaged: {len(data)} bytes where its header says "
            f"{expected}: fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _places(base: Path) -> tuple[Path, ...]:
    return base / "FashionMNIST" / "raw", base, base / DEBIAN_DIRECTORY.relative_to("/")


def _files(place: Path) -> dict[tuple[str, str], Path]:
    files = {}
    for part in _PARTS:
        for kind, dimensions in _KINDS.items():
            plain = place / f"{part}-{kind}-idx{dimensions}-ubyte"
            found = [path for path in (plain, Path(f"{plain}.gz")) if path.is_file()]
            if not found:
                raise UserError(f"{plain} (or {plain.name}.gz) is missing: {_WAYS_OUT}")
            files[part, kind] = found[0]
    return files


def _download(root: Path) -> None:
    from torchvision.datasets import FashionMNIST

    try:
        # The other process's files count: torchvision looks before it fetches.
        with locked(root / ".download.lock"):
            FashionMNIST(str(root), download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"cannot download Fashion-MNIST to {root} ({_first_line(error)}): {_WAYS_OUT}"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
