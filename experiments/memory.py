"""The memory that a config will need, as the memory model has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from experiments.config import Config
from experiments.emulation import PIXEL
from experiments.resolve import image_of, job_of, stack_of
from runtimes.job import DataSpec, Job, Precision, Task

if TYPE_CHECKING:
    from runtimes.execution.accounting import Peak
    from runtimes.model.stack import LayerStack
    from runtimes.planning.footprint import Footprint

__all__ = [
    "PROCESS_BYTES",
    "largest_batch",
    "largest_pipelines",
    "memory_needed",
    "memory_peaks_of",
]

#: What a rank takes before it holds a model: the interpreter, torch and its communication.
PROCESS_BYTES = 400_000_000
#: What a system holds between segments.
_LASTING = frozenset({"weights", "optimizer"})


def memory_needed(config: Config, tasks: Sequence[Task], batch_size: int) -> Counter[str]:
    """Bytes by kind, with batches of this size in the place of the config's (contenders may have
    their own): on CPUs those of all processes of a node, else on the device of the process that
    needs most.

    Ranks are taken to be at their peaks at the same time.
    """
    job = replace(job_of(config, tuple(tasks), DataSpec("", "")), batch_size=batch_size)
    peaks = [memory_peaks_of(config, job, task) for task in tasks]
    together = _contenders if config.switch is None else _successors
    held = [together([peak.at_once for peak in of_rank]) for of_rank in zip(*peaks, strict=True)]
    if job.transport == "in-process":
        held = [_sum(held)]
    if job.device != "cpu":
        return max(held, key=Counter.total)
    held += [Counter(processes=PROCESS_BYTES)] * len(held)
    return Counter({kind: n // config.launch.nodes for kind, n in _sum(held).items()})


def memory_peaks_of(config: Config, job: Job, task: Task) -> list[Peak]:
    """What each rank of one task holds at most; ``job``: of the config, but for its batch size."""
    from runtimes.planning.memory import memory_peaks

    image = PIXEL if config.launch.device == "emulated" else image_of(config)
    footprint = _footprint(stack_of(config), image, job.precision, job.device, job.label_smoothing)
    return memory_peaks(job, task, footprint)


def _contenders(peaks: Sequence[Mapping[str, int]]) -> Counter[str]:
    """All are there at once, but they train in turn."""
    lasting = [Counter({kind: held[kind] for kind in _LASTING}) for held in peaks]
    passing = [Counter({k: n for k, n in held.items() if k not in _LASTING}) for held in peaks]
    return _sum([*lasting, max(passing, key=Counter.total)])


def _successors(peaks: Sequence[Mapping[str, int]]) -> Counter[str]:
    """One is gone when the next begins."""
    return max((Counter(held) for held in peaks), key=Counter.total)


def _sum(counts: Sequence[Counter[str]]) -> Counter[str]:
    return sum(counts, Counter())


def largest_batch(batch_size: int, tasks: Sequence[Task], fits: Callable[[int], bool]) -> int:
    """The largest batch below this size that ``fits``, in whole samples a micro-batch of every
    pipeline; 0 if there is none."""
    units = max(task.plan.micro_batches * task.plan.pipelines for task in tasks)
    low, high = 0, (batch_size - 1) // units
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * units) else (low, middle - 1)
    return low * units


def largest_pipelines(tasks: Sequence[Task], fits: Callable[[Sequence[Task]], bool]) -> int | None:
    """The largest number of parallel pipelines with which ``tasks`` fit, where none has more than
    that; None if they do not fit with 1, or have no more to begin with."""
    most = max(task.plan.pipelines for task in tasks)
    for number in range(most - 1, 0, -1):
        fewer = [
            replace(task, plan=replace(task.plan, pipelines=min(number, task.plan.pipelines)))
            for task in tasks
        ]
        if fits(fewer):
            return number
    return None


@lru_cache(maxsize=8)
def _footprint(
    stack: LayerStack,
    image: tuple[int, int, int],
    precision: Precision,
    device: str,
    label_smoothing: float,
) -> Footprint:
    from runtimes.planning.footprint import Footprint

    return Footprint(
        stack, image, precision=precision, device=device, label_smoothing=label_smoothing
    )
