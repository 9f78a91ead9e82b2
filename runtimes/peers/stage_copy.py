"""What both kinds of peers hold: one copy of a stage, its optimizer, and a clock on its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter_ns, thread_time_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from runtimes.execution.engine import Feed
from runtimes.execution.optimizer import build_optimizer, learning_rate
from runtimes.execution.precision import dtype_of, set_multiplication
from runtimes.job import Job, Task
from runtimes.model.stack import LayerStack
from runtimes.peers.limits import check_peer

__all__ = ["StageCopy", "Stopwatch"]


class Stopwatch:
    """Adds up what passes inside ``with``, in seconds: wall time, and what this thread computes by
    the clock ``busy_ns``."""

    def __init__(self, busy_ns: Callable[[], int] = thread_time_ns) -> None:
        self._busy_ns = busy_ns
        self.reset()

    def reset(self) -> None:
        self._wall = self._cpu = 0

    def __enter__(self) -> None:
        self._wall -= perf_counter_ns()
        self._cpu -= self._busy_ns()

    def __exit__(self, *_: object) -> None:
        self._cpu += self._busy_ns()
        self._wall += perf_counter_ns()

    @property
    def cpu_s(self) -> float:
        return min(self._cpu, self._wall) / 1e9

    @property
    def wall_s(self) -> float:
        return self._wall / 1e9


class StageCopy:
    """The stage of a rank with its weights, trained in place: one version.

    ``shapes`` are those of one sample going in and coming out.  Raises ValueError for what the
    peer ``task.system`` cannot run.
    """

    def __init__(self, job: Job, task: Task, stack: LayerStack, feed: Feed, rank: int) -> None:
        check_peer(task, task.batch_size or job.batch_size, stack.batch_norm)
        plan = task.plan
        if plan.layers != len(stack):
            raise ValueError(
                f"the plan ends at layer {plan.layers}, but the model has {len(stack)} layers"
            )
        if plan.world_size != dist.get_world_size():
            raise ValueError(
                f"{task.system} takes all {dist.get_world_size()} ranks of the process group, but "
                f"its plan has {plan.world_size}"
            )
        set_multiplication(job.precision)
        self.job = job
        self.device = torch.device(job.device)
        self.dtype = dtype_of(job.precision)
        number, _ = plan.place(rank)
        first, last = plan.stages[number].first, plan.stages[number].last
        sample = tuple(feed.images(feed.indices(0)[:1], 0).shape[1:])
        # This also refuses layers that are random by themselves or change buffers.
        shapes = (sample, *stack.output_shapes(sample, self.dtype))
        self.shapes = shapes[first], shapes[last]
        self.stage = stack.stage(first, last, job.seed)
        self.stage.materialise(
            stack.initial_weights(first, last, job.seed, self.device, self.dtype)
        )
        own = dict(self.stage.named_parameters())
        names = self.stage.names
        self.parameters = {names[key]: own[key] for key in names if key in own}
        buffers = dict(self.stage.named_buffers())
        self._buffers = {names[key]: buffers[key] for key in names if key in buffers}
        self.optimizer = build_optimizer(self.parameters.values(), job.optimizer)
        self.stage.charge(self.optimizer, versions=1)
        self.stepping = Stopwatch()
        self._steps_per_epoch = len(feed.batch_sizes())

    def update(self, step: int) -> None:
        """Update ``step`` from the gradients accumulated, which are then dropped."""
        with self.stepping:
            job = self.job
            rate = learning_rate(
                job.optimizer, job.learning_rate, step, self._steps_per_epoch, job.epochs
            )
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Weights and optimizer state by parameter name: references to the live tensors."""
        tensors: dict[str, Tensor] = {**self.parameters, **self._buffers}
        return {
            "weights": {name: tensor.detach() for name, tensor in tensors.items()},
            "optimizer": {
                name: dict(self.optimizer.state[parameter])
                for name, parameter in self.parameters.items()
                if parameter in self.optimizer.state
            },
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over copies of what this stage needs of a merged :meth:`state`."""
        weights: Mapping[str, Tensor] = state["weights"]
        tensors: dict[str, Tensor] = {**self.parameters, **self._buffers}
        missing = [name for name in tensors if name not in weights]
        if missing:
            raise ValueError(f"the state loaded lacks weights of this stage: {', '.join(missing)}")
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(weights[name])
        for name, parameter in self.parameters.items():
            self.optimizer.state.pop(parameter, None)
            if name in state["optimizer"]:
                self.optimizer.state[parameter] = _copied(state["optimizer"][name], parameter)


def _copied(values: Mapping[str, Any], parameter: Parameter) -> dict[str, Any]:
    """AdamW's count of steps is a tensor too, but stays where and what it is."""
    return {
        key: (value.clone() if value.dim() == 0 else value.to(parameter, copy=True))
        if isinstance(value, Tensor)
        else value
        for key, value in values.items()
    }
