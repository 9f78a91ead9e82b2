"""The data sets there are, and what is known of each before any file is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.errors import UserError, did_you_mean

__all__ = ["DATA_SETS", "DataSet", "find"]


@dataclass(frozen=True)
class DataSet:
    """``real`` is False for synthetic images, on which an accuracy means nothing.

    ``classes`` and ``channels`` are those of the data; for synthetic images they are defaults,
    which a config may change.
    """

    name: str
    title: str
    real: bool
    classes: int
    channels: int
    train_samples: int
    validation_samples: int


DATA_SETS: Mapping[str, DataSet] = {
    data_set.name: data_set
    for data_set in (
        DataSet("digits", "scikit-learn digits", True, 10, 1, 1437, 360),
        DataSet("fashion-mnist", "Fashion-MNIST", True, 10, 1, 60_000, 10_000),
        DataSet("cifar100", "CIFAR-100", True, 100, 3, 50_000, 10_000),
        DataSet("random", "random bytes (synthetic)", False, 10, 3, 512, 128),
    )
}


def find(name: str) -> DataSet:
    """The data set of that name; UserError with the nearest name where there is none."""
    if name not in DATA_SETS:
        raise UserError(f"unknown data set {name!r}{did_you_mean(name, DATA_SETS)}")
    return DATA_SETS[name]
