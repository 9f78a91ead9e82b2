"""torch's DistributedDataParallel, as it comes, driven like our systems."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from runtimes.execution.criterion import cross_entropy_sum
from runtimes.execution.engine import Accuracy, Feed, Segment, SegmentReport
from runtimes.execution.precision import autocast, synchronize
from runtimes.execution.tally import Tally
from runtimes.job import Job, Task
from runtimes.model.stack import LayerStack
from runtimes.peers.stage_copy import StageCopy, Stopwatch
from runtimes.plan import share

__all__ = ["DdpEngine"]


class DdpEngine:
    """One replica of "torch-ddp" in the default process group, with DDP's default settings.

    Of a batch, replica r takes part r of ``plan.split``.  DDP averages the gradients of R replicas,
    so each multiplies its share of the loss by R.  A replica without a sample (a last batch
    smaller than R) must join DDP's reduction all the same: it computes the batch's first sample
    with a loss multiplied by 0.  BatchNorm would notice that, but no model with it comes this far.

    The option ``bucket_mb`` (10⁶ bytes) is the size of its buckets, as dp's plan has it.

    Times: compute is CPU time of forward and backward; interference the rest of the forward;
    reduce the rest of the backward, at whose end DDP waits for the reductions.
    """

    def __init__(self, job: Job, task: Task, stack: LayerStack, feed: Feed, rank: int) -> None:
        self._job, self._feed, self._rank = job, feed, rank
        self._replicas = task.plan.world_size
        self._copy = StageCopy(job, task, stack, feed, rank)
        self._copy.stage.watch_gradients()
        # DDP counts in units of 2^20 bytes, a plan in 10^6.
        bucket = task.options.get("bucket_mb", 25.0) * 1e6 / 2**20
        self._ddp = DistributedDataParallel(self._copy.stage, bucket_cap_mb=bucket)
        clock = self._copy.stage.busy_ns
        self._forward, self._backward = Stopwatch(clock), Stopwatch(clock)

    def train(self, segment: Segment) -> SegmentReport:
        begin = perf_counter()
        for stopwatch in (self._forward, self._backward, self._copy.stepping):
            stopwatch.reset()
        self._copy.stage.train()
        losses = {}
        for step, size in enumerate(segment.batches, segment.first):
            losses[step] = self._loss_and_gradients(step, size)
            self._copy.update(step)
        synchronize(self._copy.device)
        wall_s = perf_counter() - begin
        shares = {step: float(loss) for step, loss in losses.items()}
        return SegmentReport(wall_s, shares, self._breakdown(), peak_in_flight=1)

    def _loss_and_gradients(self, step: int, size: int) -> Tensor:
        """This replica's share of the loss of update ``step``; its gradients are accumulated."""
        indices = self._feed.indices(step)
        assert len(indices) == size
        low, high = share(size, self._replicas, self._rank)
        mine, factor = indices[low:high], self._replicas
        if low == high:
            mine, factor = indices[:1], 0
        self._copy.stage.random.set(step, mine)
        with self._forward:
            images, labels = self._feed.images(mine, step), self._feed.labels(mine)
            with autocast(self._job.precision, self._copy.device):
                logits = self._ddp(images)
            loss = cross_entropy_sum(logits, labels, self._job.label_smoothing) / size
        with self._backward:
            (loss * factor).backward()
        return loss.detach() if factor else torch.zeros_like(loss)

    def _breakdown(self) -> dict[str, float]:
        if self._copy.device.type != "cpu":
            return {}
        forward, backward = self._forward, self._backward
        return {
            "compute": forward.cpu_s + backward.cpu_s,
            "interference": forward.wall_s - forward.cpu_s,
            "reduce": backward.wall_s - backward.cpu_s,
            "optimizer": self._copy.stepping.wall_s,
        }

    @torch.no_grad()
    def evaluate(self, feed: Feed, samples: int, batch_size: int) -> Accuracy:
        """Top-1 of this replica's part of each batch; ``loss_sum`` is without smoothing."""
        stage, device = self._copy.stage.eval(), self._copy.device
        tally = Tally(device)
        for first in range(0, samples, batch_size):
            size = min(batch_size, samples - first)
            low, high = share(size, self._replicas, self._rank)
            if low == high:
                continue
            indices = np.arange(first + low, first + high)
            with autocast(self._job.precision, device):
                logits = stage(feed.images(indices, 0))
            tally.add(logits, feed.labels(indices))
        return tally.accuracy()

    def state(self) -> Mapping[str, Any]:
        """Of replica 0, which speaks for all; references to the live tensors."""
        return self._copy.state() if self._rank == 0 else {"weights": {}, "optimizer": {}}

    def load(self, state: Mapping[str, Any]) -> None:
        self._copy.load(state)

    def close(self) -> None:
        """It has no process group of its own."""
