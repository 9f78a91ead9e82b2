"""What units cost that are computed at once on one device: threads on a core, streams on a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import torch

from runtimes.execution.precision import synchronize
from runtimes.planning.excerpt import Excerpt

__all__ = ["concurrency"]

#: Of one measurement, so that the threads' start does not count.
_LEAST_SECONDS = 0.1


def concurrency(
    excerpts: Sequence[Excerpt], samples: int, device: torch.device, *, repeats: int
) -> dict[int, float]:
    """Seconds for k units at once ÷ k ÷ seconds for one alone, for k = 1 … len(excerpts): 1 where
    units take turns, less where they fill each other's gaps.

    Each of k threads computes units of an excerpt of its own, all on one core, or each in a stream
    of its own.  Medians of ``repeats`` rounds, in which all k take turns.
    """
    inputs = [excerpt.inputs(samples) for excerpt in excerpts]
    core = min(os.sched_getaffinity(0))

    def seconds(k: int, units: int) -> float:
        """Of one unit of each of k, side by side."""
        start = threading.Barrier(k + 1)

        def work(index: int) -> None:
            if device.type == "cpu":
                os.sched_setaffinity(0, {core})  # Of this thread alone.
            torch.set_num_threads(1)
            start.wait()
            with _stream(device):
                for _ in range(units):
                    excerpts[index].compute(inputs[index])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(k)]
        for thread in threads:
            thread.start()
        synchronize(device)
        start.wait()
        begin = perf_counter()
        for thread in threads:
            thread.join()
        synchronize(device)
        return (perf_counter() - begin) / units

    for k in range(1, len(excerpts) + 1):
        seconds(k, 1)
    units = max(1, round(_LEAST_SECONDS / seconds(1, 1)))
    found: dict[int, list[float]] = {k: [] for k in range(1, len(excerpts) + 1)}
    for _ in range(repeats):
        for k, times in found.items():
            times.append(seconds(k, units))
    alone = median(found[1])
    return {k: median(times) / k / alone for k, times in found.items()}


def _stream(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "cpu" else torch.Stream(device)
