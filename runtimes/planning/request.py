"""What a profile is to be measured of, as plain JSON data: the command writes it, ranks read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtimes.job import ModelSpec, Precision

__all__ = ["PROFILE_FILE", "REQUEST_FILE", "ProfileRequest", "check_batch_sizes"]

#: In the directory that measuring ranks are given: the question, and the answer.
REQUEST_FILE, PROFILE_FILE = "request.json", "profile.json"


def check_batch_sizes(batch_sizes: tuple[int, ...]) -> None:
    """ValueError unless each is 1 or more, and given once."""
    for size in batch_sizes:
        if size < 1:
            raise ValueError(f"a batch size is {size}, but must be at least 1 sample")
    if not batch_sizes or len(set(batch_sizes)) < len(batch_sizes):
        raise ValueError(
            f"batch sizes {list(batch_sizes)} must be one or more different numbers of samples"
        )


@dataclass(frozen=True)
class ProfileRequest:
    """``image``: (C, H, W).  Every layer is measured ``repeats`` times at every batch size, after
    ``warm_up`` rounds that do not count."""

    model: ModelSpec
    image: tuple[int, int, int]
    batch_sizes: tuple[int, ...]
    precision: Precision = "float32"
    device: str = "cpu"
    repeats: int = 15
    warm_up: int = 2
    pin_cores: bool = False

    def __post_init__(self) -> None:
        check_batch_sizes(self.batch_sizes)
        if self.repeats < 1 or self.warm_up < 0:
            raise ValueError(
                f"repeats is {self.repeats}, but must be at least 1, after 0 or more rounds of "
                f"warm-up, not {self.warm_up}"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ProfileRequest:
        values = dict(document)
        values["model"] = ModelSpec(**values["model"])
        values["image"] = tuple(values["image"])
        values["batch_sizes"] = tuple(values["batch_sizes"])
        return cls(**values)

    @classmethod
    def load(cls, run_dir: Path) -> ProfileRequest:
        return cls.from_json(json.loads((run_dir / REQUEST_FILE).read_text()))
