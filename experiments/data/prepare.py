"""From the name of a data set to the directories that the ranks read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.arrays import Part, Source, hold_out, subset
from experiments.data.catalog import DataSet, find
from experiments.data.cifar100 import Cifar100
from experiments.data.digits import Digits
from experiments.data.fashion_mnist import FashionMnist
from experiments.data.random_images import RandomImages
from experiments.data.store import SCHEMA, build_once, write_part
from experiments.errors import UserError
from runtimes.job import DataSpec

__all__ = ["prepare"]

_KINDS = ("train", "validation")


def prepare(
    name: str,
    *,
    image_size: int,
    cache: Path,
    root: Path | None = None,
    train_samples: int | None = None,
    validation_samples: int | None = None,
    held_out: int | None = None,
    seed: int = 0,
    download: bool = False,
    channels: int | None = None,
    classes: int | None = None,
) -> DataSpec:
    """Turn a data set into directories below ``cache``, or find them there.

    ``seed`` decides the split (digits), the subset and the synthetic pixels; it belongs to the
    data, not to the run, so that runs of several seeds share one validation part.
    ``held_out`` training images, none of which is trained on, become the validation part.
    ``root`` holds the files of Fashion-MNIST or CIFAR-100; they are read even if the prepared
    data exist, since their digests are part of the key.  ``channels`` and ``classes`` can be
    chosen for synthetic images only.  UserError: an unknown name, a size out of range, files
    that are missing or damaged, a cache that cannot be written.
    """
    data_set = find(name)
    _check_sizes(image_size=image_size, held_out=held_out)
    if seed < 0:
        raise UserError(f"the data's seed is {seed}, but must be 0 or more")
    _check_shape(data_set, channels=channels, classes=classes)
    classes = classes or data_set.classes
    source: Source
    if data_set.real:
        source = _real(name, root, cache / "downloads", seed, download)
    else:
        _check_sizes(train_samples=train_samples, validation_samples=validation_samples)
        source = RandomImages(
            train_samples or data_set.train_samples,
            validation_samples or data_set.validation_samples,
            channels or data_set.channels,
            classes,
            image_size,
            seed,
        )
        train_samples = validation_samples = None  # made in that number, nothing to choose from

    parameters = {
        "image_size": image_size,
        "train_samples": train_samples,
        "validation_samples": validation_samples,
        "held_out": held_out,
        "seed": seed,
        "source": source.identity(),
    }
    key = hashlib.sha256(json.dumps([SCHEMA, name, parameters], sort_keys=True).encode())
    directory = cache / f"{name}-{key.hexdigest()[:16]}"
    meta = {
        "name": name,
        "title": data_set.title,
        "synthetic": not data_set.real,
        "source": source.origin,
        "classes": classes,
        "parameters": parameters,
    }
    build_once(directory, lambda partial: _write(partial, source, meta))
    _check_prepared(directory)
    return DataSpec(str(directory / "train"), str(directory / "validation"))


def _real(name: str, root: Path | None, downloads: Path, seed: int, download: bool) -> Source:
    if name == "digits":
        return Digits(seed)
    if name == "fashion-mnist":
        return FashionMnist.locate(root, downloads, download)
    assert name == "cifar100"
    return Cifar100.locate(root, downloads, download)


def _write(directory: Path, source: Source, meta: Mapping[str, Any]) -> None:
    parts = source.load()
    for kind, part in zip(_KINDS, parts, strict=True):
        part.check(meta["classes"], f"{meta['title']}, {kind} part ({source.origin})")
    moments: dict[str, Any] = {}
    for kind, chosen in zip(_KINDS, _chosen(parts, meta["parameters"]), strict=True):
        # Both parts are normalised with what is known from the training part alone.
        written = write_part(
            directory / kind,
            chosen,
            meta["parameters"]["image_size"],
            {**meta, "part": kind, **moments},
        )
        moments = {"mean": written["mean"], "std": written["std"]}


def _chosen(parts: tuple[Part, Part], parameters: Mapping[str, Any]) -> tuple[Part, Part]:
    samples = [f"{kind}_samples" for kind in _KINDS]
    seed, held_out = parameters["seed"], parameters["held_out"]
    if held_out is not None:
        return hold_out(parts[0], held_out, parameters[samples[0]], seed)
    train, validation = (
        subset(part, parameters[name], seed, stream, name)
        for stream, (part, name) in enumerate(zip(parts, samples, strict=True))
    )
    return train, validation


def _check_prepared(directory: Path) -> None:
    """A rename made these files whole; this catches what happened to them since."""
    for part in _KINDS:
        for file in (directory / part / name for name in ("images.npy", "labels.npy")):
            try:
                np.load(file, mmap_mode="r")
            except (OSError, ValueError, EOFError) as error:
                raise UserError(
                    f"{file} is missing or damaged ({error}): delete {directory}, "
                    "and it is prepared anew"
                ) from error


def _check_sizes(**sizes: int | None) -> None:
    for what, size in sizes.items():
        if size is not None and size < 1:
            raise UserError(f"{what} is {size}, but must be at least 1")


def _check_shape(data_set: DataSet, **chosen: int | None) -> None:
    _check_sizes(**chosen)
    for what, value in chosen.items():
        given = getattr(data_set, what)
        if data_set.real and value not in (None, given):
            raise UserError(
                f"{what} is {value}, but {data_set.title} has {given}: leave it out, "
                "or use the data set 'random'"
            )
