"""Prepared directories: written once, whole or not at all, whoever else is writing them."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.arrays import Bytes, Part, resize
from experiments.errors import UserError
from runtimes.manifest import sync_directory

__all__ = ["SCHEMA", "build_once", "locked", "write_part"]

SCHEMA = "pipebench.data/1"
_CHUNK = 1024


def build_once(directory: Path, build: Callable[[Path], None]) -> None:
    """Make ``directory`` by ``build(partial directory)`` and a rename, unless it is there.

    A lock keeps two processes from doing the work twice; it dies with its holder, and what a
    killed one left behind is cleared by the next.  UserError if nothing can be written there.
    """
    if directory.is_dir():
        return
    partial = directory.with_name(f"{directory.name}.partial")
    try:
        with locked(directory.with_name(f".{directory.name}.lock")):
            if directory.is_dir():
                return
            shutil.rmtree(partial, ignore_errors=True)
            try:
                build(partial)
                partial.rename(directory)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync_directory(directory.parent)
    except OSError as error:
        raise UserError(
            f"cannot write prepared data to {directory} ({error.strerror or error}): "
            "free some space there, or choose another cache directory"
        ) from error


def write_part(directory: Path, part: Part, side: int, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Write images (resized to ``side``), labels and meta.json; return the meta data written.

    ``meta`` that has no "mean" and "std" gets those of these images, each a list of one number
    per channel, of values scaled to 0 … 1.
    """
    directory.mkdir(parents=True)
    counts = np.zeros((part.images.shape[1], 256), np.int64)

    def images() -> Iterator[Bytes]:
        for start in range(0, len(part), _CHUNK):
            chunk = resize(part.images[start : start + _CHUNK], side)
            for channel in range(len(counts)):
                plane = chunk[:, channel].reshape(-1)
                counts[channel] += np.bincount(plane, minlength=256)
            yield chunk

    shape = (*part.images.shape[:2], side, side)
    digests = {
        "images.npy": _write_array(directory / "images.npy", shape, np.dtype(np.uint8), images()),
        "labels.npy": _write_array(
            directory / "labels.npy", part.labels.shape, np.dtype(np.int64), iter([part.labels])
        ),
    }
    mean, std = _moments(counts)
    document = {
        "schema": SCHEMA,
        "mean": mean,
        "std": std,
        **meta,
        "samples": len(part),
        "channels": shape[1],
        "image_size": side,
        "sha256": digests,
    }
    with (directory / "meta.json").open("w") as file:
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)
    return document


def _moments(counts: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel from its histogram (C, 256): exact counts, so
    independent of the order of summation.  A constant channel has deviation 1: it stays as is."""
    values = np.arange(256) / 255
    total = counts.sum(axis=1)
    mean = counts @ values / total
    variance = (counts * (values - mean[:, None]) ** 2).sum(axis=1) / total
    constant = (counts > 0).sum(axis=1) == 1
    return mean.tolist(), np.where(constant, 1.0, np.sqrt(variance)).tolist()


def _write_array(
    path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], chunks: Iterator[Any]
) -> str:
    """Write a .npy file by plain writes and return its SHA-256.

    A memory map would need less code, but a full disk ends its writer with SIGBUS.
    """
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    digest = hashlib.sha256()

    def blocks() -> Iterator[bytes]:
        yield head.getvalue()
        for chunk in chunks:
            yield chunk.tobytes()

    with path.open("wb") as file:
        for block in blocks():
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, made where needed, against other processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
