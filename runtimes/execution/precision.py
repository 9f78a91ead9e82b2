"""What a run's ``precision`` means to torch: dtype of storage, autocast, multiplication mode."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from runtimes.job import Precision

__all__ = ["autocast", "dtype_of", "set_multiplication", "synchronize"]


def dtype_of(precision: Precision) -> torch.dtype:
    """Of weights, gradients, reductions and messages; autocast changes only what layers compute."""
    return torch.float64 if precision == "float64" else torch.float32


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Around one forward: bfloat16 where autocast deems it safe, if the precision is bf16."""
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def set_multiplication(precision: Precision) -> None:
    """Whether float32 products may be rounded to TF32: for the whole process, all backends.

    Set for float32 too: torch's default lets convolutions use TF32, but not matrix products.
    """
    torch.backends.fp32_precision = "tf32" if precision == "tf32" else "ieee"  # type: ignore[attr-defined]


def synchronize(device: torch.device) -> None:
    """Wait for what was handed to an accelerator, so that a clock read next includes it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
