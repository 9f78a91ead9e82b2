"""A stage's updates on one rank: its gradients are reduced, perhaps clipped, and stepped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter_ns

import torch
from torch import Tensor

from runtimes.execution.optimizer import clip, learning_rate, squared_norm
from runtimes.execution.transport import Endpoint
from runtimes.execution.versions import WeightVersions
from runtimes.job import Job
from runtimes.plan import Plan
from runtimes.schedule.action import Action
from runtimes.schedule.program import Program
from runtimes.system import System

__all__ = ["StageUpdates"]


class StageUpdates:
    """Performs REDUCE, NORM and STEP on the versions of one stage copy.

    ``layers`` are the trained parameters' names in each part of the backward.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        rank: int,
        system: System,
        endpoint: Endpoint,
        versions: WeightVersions,
        layers: Sequence[Sequence[str]],
        steps_per_epoch: int,
        *,
        keep_gradients: bool = False,
    ):
        self.job, self.endpoint, self.versions, self.layers = job, endpoint, versions, layers
        self.device = torch.device(job.device)
        self.stage, self.replica = plan.place(rank)
        self.replicas = plan.stages[self.stage].replicas
        self.rate_factor = system.rate_factor(plan, self.stage)
        self.steps_per_epoch, self.keep_gradients = steps_per_epoch, keep_gradients
        self.last_gradients: dict[str, Tensor] = {}
        #: Version on which an update's gradients were made, and those taken before their step.
        self._made_on: dict[int, int] = {}
        self._taken: dict[int, dict[str, Tensor | None]] = {}

    def start(self, program: Program, first_step: int) -> None:
        self.program, self.first_step = program, first_step

    def made(self, unit: int, version: int) -> None:
        """A backward of the unit has added to the gradients of ``version``."""
        self._made_on[self.program.update(self.stage, unit)] = version

    def gradients(self) -> Iterator[Tensor]:
        """Those taken and not stepped yet, and those that were asked to be kept."""
        yield from self.last_gradients.values()
        for taken in self._taken.values():
            yield from (gradient for gradient in taken.values() if gradient is not None)

    def _source(self, update: int) -> int:
        """The version whose parameters hold the update's gradients.  A replica without a sample
        has made none, and lets them be zeros of the latest."""
        return self._made_on.get(update, self.versions.latest)

    def reduce(self, action: Action) -> None:
        """Gradients of a part (or, blocking, of all), zeros where this replica had no sample."""
        chosen = self.layers if action.part is None else [self.layers[action.part]]
        parameters = self.versions[self._source(action.unit)] if any(chosen) else {}
        grads = []
        for part in chosen:
            # As the backward makes them: the last layer's first.
            for name in reversed(part):
                parameter = parameters[name]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grads.append(parameter.grad)
        self.endpoint.reduce(action, grads)

    def _take(self, action: Action) -> int:
        """Take the update's gradients, reduced; returns the nanoseconds spent waiting for that."""
        begin = perf_counter_ns()
        if self.replicas > 1:
            self.endpoint.finish_reduce(action)
        waited = perf_counter_ns() - begin
        gradients = self.versions.take(self._source(action.unit))
        self._made_on.pop(action.unit, None)
        # Units of a round are batches of their own, whose gradients are averaged.
        units = len(self.program.units(action.pipeline, self.stage, action.unit))
        made = [gradient for gradient in gradients.values() if gradient is not None]
        if self.program.batches.rounds and units > 1 and made:
            torch._foreach_div_(made, units)
        self._taken[action.unit] = gradients
        return waited

    def norm(self, action: Action) -> int:
        """Returns the nanoseconds spent waiting for reductions, as :meth:`step` does."""
        waited = self._take(action)
        # Replicas hold the same gradients: the first speaks for all.
        squares = squared_norm(self._taken[action.unit].values(), self.device)
        self.endpoint.norm(action, squares if self.replica == 0 else torch.zeros_like(squares))
        return waited

    def step(self, action: Action) -> int:
        squares, waited = None, 0
        if action.unit in self._taken:
            begin = perf_counter_ns()
            squares = self.endpoint.finish_norm(action)
            waited = perf_counter_ns() - begin
        else:
            waited = self._take(action)
        gradients = self._taken.pop(action.unit)
        optimizer = self.job.optimizer
        if optimizer.clip is not None:
            if squares is None:
                assert optimizer.clip_by == "stage", "a step that clips globally needs its NORM"
                squares = squared_norm(gradients.values(), self.device)
            clip(gradients.values(), squares, optimizer.clip)
        if self.keep_gradients:
            self.last_gradients = {
                name: gradient.clone()
                for name, gradient in gradients.items()
                if gradient is not None
            }
        self._set_rate(action)
        self.versions.step(gradients)
        return waited

    def _set_rate(self, action: Action) -> None:
        """That of the first batch of which the update takes gradients."""
        first = self.program.units(action.pipeline, self.stage, action.unit)[0]
        rate = learning_rate(
            self.job.optimizer,
            self.job.learning_rate,
            self.first_step + self.program.batches.batch(first),
            self.steps_per_epoch,
            self.job.epochs,
        )
        for group in self.versions.optimizer.param_groups:
            group["lr"] = rate * self.rate_factor
