"""torch.distributed.pipelining's ScheduleGPipe and Schedule1F1B, driven like our systems."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from runtimes.execution.criterion import cross_entropy_sum
from runtimes.execution.engine import Accuracy, Feed, Segment, SegmentReport
from runtimes.execution.precision import autocast, synchronize
from runtimes.execution.tally import Tally
from runtimes.job import Job, Precision, Task
from runtimes.model.stack import LayerStack
from runtimes.model.stage import Stage
from runtimes.peers.limits import equal_micro_batches
from runtimes.peers.stage_copy import StageCopy, Stopwatch

__all__ = ["PipeliningEngine"]

Indices = np.ndarray[Any, np.dtype[np.int64]]


class _KeyedStage(nn.Module):
    """A stage that computes the micro-batches of a batch in order, each with its own random key.

    torch tells a module neither update nor samples, but each of its schedules runs the forwards
    of a batch in the order of the micro-batches, and each forward once.
    """

    def __init__(self, stage: Stage, precision: Precision, message: torch.dtype | None) -> None:
        super().__init__()
        self.stage = stage
        self._precision: Precision = precision
        self._message = message  # dtype of the output; None for the last stage
        self._step = 0
        self._ahead: deque[Indices] = deque()

    def begin(self, step: int, micro_batches: Sequence[Indices]) -> None:
        """Sample indices of the micro-batches of a batch, in order."""
        if self._ahead:
            raise RuntimeError(
                f"torch left {len(self._ahead)} micro-batches of update {self._step} undone: "
                "random layers cannot be keyed"
            )
        self._step = step
        self._ahead.extend(micro_batches)

    def forward(self, x: Tensor) -> Tensor:
        if not self._ahead or len(self._ahead[0]) != len(x):
            raise RuntimeError(
                f"torch ran a forward of {len(x)} samples that update {self._step} does not have: "
                "random layers cannot be keyed"
            )
        self.stage.random.set(self._step, self._ahead.popleft())
        with autocast(self._precision, x.device):
            output: Tensor = self.stage(x)
        # As in our own messages; and gloo sends contiguous tensors only.
        return output if self._message is None else output.to(self._message).contiguous()


class _TimedStage(PipelineStage):
    """torch's stage with a clock on its computation, which contains no communication."""

    stopwatch: Stopwatch

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.stopwatch:
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.stopwatch:
            super().backward_one_chunk(*args, **kwargs)


class PipeliningEngine:
    """One stage of "torch-gpipe" or "torch-1f1b", stage s on rank s of the default process group.

    The loss of a micro-batch is divided by the samples of the whole batch, and torch's own
    division by the number of micro-batches is switched off.

    torch cuts a batch into equal micro-batches only.  M must divide the batch size; a batch it
    does not divide (the last of an epoch) is cut into the largest m < M that does, and run by
    ScheduleGPipe if m is below the number of stages, where Schedule1F1B refuses: the results are
    the same.  A schedule is built and kept for each size of batch.  Shapes are given to torch
    beforehand, so that it runs no forward to infer them; a schedule's first batch alone is
    preceded by one exchange of a number with the neighbours.

    Times: compute and interference are CPU time, and the rest of the wall time, inside forward,
    loss and backward; what no part holds is torch's communication, idle time and overhead.
    """

    def __init__(self, job: Job, task: Task, stack: LayerStack, feed: Feed, rank: int) -> None:
        plan = task.plan
        self._job, self._plan, self._feed, self._rank = job, plan, feed, rank
        self._one_forward_one_backward = task.system == "torch-1f1b"
        self._is_first, self._is_last = rank == 0, rank == len(plan.stages) - 1
        self._copy = StageCopy(job, task, stack, feed, rank)
        message = None if self._is_last else self._copy.dtype
        self._module = _KeyedStage(self._copy.stage, job.precision, message)
        self._schedules: dict[tuple[int, bool], PipelineScheduleSingle] = {}
        self._computing = Stopwatch(self._copy.stage.busy_ns)

    def _schedule(self, size: int, training: bool) -> PipelineScheduleSingle:
        """torch's schedule for batches of ``size``; forward only (by GPipe) if not training."""
        schedule = self._schedules.get((size, training))
        if schedule is None:
            units = equal_micro_batches(size, self._plan.micro_batches)
            stages = len(self._plan.stages)
            input_args, output_args = (
                torch.empty((size // units, *shape), dtype=self._copy.dtype, device="meta")
                for shape in self._copy.shapes
            )
            stage = _TimedStage(
                self._module,
                self._rank,
                stages,
                self._copy.device,
                input_args.requires_grad_(not self._is_first),
                output_args.requires_grad_(),
            )
            stage.stopwatch = self._computing
            refused = units < stages or not training
            kind = Schedule1F1B if self._one_forward_one_backward and not refused else ScheduleGPipe
            loss = partial(self._loss, batch=size) if training else None
            schedule = kind(stage, units, loss_fn=loss, scale_grads=False)
            self._schedules[size, training] = schedule
        return schedule

    def _loss(self, logits: Tensor, labels: Tensor, batch: int) -> Tensor:
        with self._computing:
            return cross_entropy_sum(logits, labels, self._job.label_smoothing) / batch

    def _begin(self, step: int, indices: Indices, units: int) -> None:
        self._module.begin(step, list(indices.reshape(units, -1)))

    def train(self, segment: Segment) -> SegmentReport:
        begin = perf_counter()
        self._computing.reset()
        self._copy.stepping.reset()
        self._module.train()
        losses: dict[int, Tensor] = {}
        for step, size in enumerate(segment.batches, segment.first):
            loss = self._loss_and_gradients(step, size)
            if loss is not None:
                losses[step] = loss
            self._copy.update(step)
        synchronize(self._copy.device)
        wall_s = perf_counter() - begin
        shares = {step: float(loss) for step, loss in losses.items()}
        return SegmentReport(wall_s, shares, self._breakdown(), 1, self._peak(segment.batches))

    def _loss_and_gradients(self, step: int, size: int) -> Tensor | None:
        """Run a batch; the loss of update ``step`` where it is computed, on the last stage."""
        indices = self._feed.indices(step)
        assert len(indices) == size
        schedule = self._schedule(size, training=True)
        self._begin(step, indices, equal_micro_batches(size, self._plan.micro_batches))
        images = (self._feed.images(indices, step),) if self._is_first else ()
        if not self._is_last:
            schedule.step(*images, return_outputs=False)
            return None
        losses: list[Tensor] = []
        labels = self._feed.labels(indices)
        schedule.step(*images, target=labels, losses=losses, return_outputs=False)
        return torch.stack(losses).detach().sum()

    def _breakdown(self) -> dict[str, float]:
        if self._copy.device.type != "cpu":
            return {}
        return {
            "compute": self._computing.cpu_s,
            "interference": self._computing.wall_s - self._computing.cpu_s,
            "optimizer": self._copy.stepping.wall_s,
        }

    def _peak(self, batches: Sequence[int]) -> int:
        """Micro-batches in flight at this stage: all of a batch, or min(S − s, M) in 1F1B."""
        stages = len(self._plan.stages)
        peaks = [0]
        for size in set(batches):
            units = equal_micro_batches(size, self._plan.micro_batches)
            steady = self._one_forward_one_backward and units >= stages
            peaks.append(min(stages - self._rank, units) if steady else units)
        return max(peaks)

    @torch.no_grad()
    def evaluate(self, feed: Feed, samples: int, batch_size: int) -> Accuracy:
        """Top-1, pipelined, counted on the last stage; ``loss_sum`` is without smoothing."""
        self._module.eval()
        tally = Tally(self._copy.device)
        for first in range(0, samples, batch_size):
            indices = np.arange(first, min(first + batch_size, samples))
            schedule = self._schedule(len(indices), training=False)
            self._begin(0, indices, equal_micro_batches(len(indices), self._plan.micro_batches))
            logits = schedule.step(*((feed.images(indices, 0),) if self._is_first else ()))
            if self._is_last:
                tally.add(logits, feed.labels(indices))
        return tally.accuracy()

    def state(self) -> Mapping[str, Any]:
        """Of this stage: references to the live tensors."""
        return self._copy.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._copy.load(state)

    def close(self) -> None:
        """It has no process group of its own."""
