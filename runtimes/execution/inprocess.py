"""All ranks of a plan in one process: deterministic, any number of virtual ranks on one device.

The tool for semantics, for accuracy at many workers, and for tests.  Its wall time is never a
time result.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from runtimes.execution.engine import Accuracy, Feed, Segment, SegmentReport, added, merged
from runtimes.execution.worker import Worker
from runtimes.job import Job, Task
from runtimes.model.batch_norm import average_copies
from runtimes.model.stack import LayerStack
from runtimes.plan import Plan
from runtimes.schedule import Program
from runtimes.schedule.action import RECEIVES, Action, Op
from runtimes.schedule.program import Channel, channel
from runtimes.system import System, evaluation_program
from runtimes.systems import get_system

__all__ = ["InProcess", "Mailbox", "run_program"]

#: (pipeline, stage, update, part) of a reduction.
_Collective = tuple[int, int, int, int | None]


class Mailbox:
    """The transport of one process: a queue for each channel, a table of open reductions."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.queues: dict[Channel, deque[tuple[Action, Tensor]]] = defaultdict(deque)
        self.open: dict[_Collective, dict[int, Sequence[Tensor]]] = defaultdict(dict)
        self.pending: dict[tuple[int, int, int, int], set[_Collective]] = defaultdict(set)
        #: (pipeline, update) → rank → its share of the norm's square.
        self.squares: dict[tuple[int, int], dict[int, Tensor]] = defaultdict(dict)

    def endpoint(self, rank: int) -> _End:
        return _End(self, rank)

    def complete(self, key: _Collective) -> None:
        """Sum in the order of replicas, so that the result is bitwise the same for all."""
        shares = self.open.pop(key)
        for parallel in zip(*(shares[replica] for replica in sorted(shares)), strict=True):
            total = parallel[0].clone()
            for other in parallel[1:]:
                total += other
            for tensor in parallel:
                tensor.copy_(total)


class _End:
    """One rank's end of the mailbox."""

    def __init__(self, box: Mailbox, rank: int):
        self.box, self.rank = box, rank

    def open(self, program: Program) -> None:
        """The mailbox takes any message at any time."""

    def ready(self, action: Action) -> bool:
        if action.op in RECEIVES:
            return bool(self.box.queues[channel(action, self.box.plan)])
        place = (action.pipeline, action.stage, action.unit, action.replica)
        if any(key in self.box.open for key in self.box.pending.get(place, ())):
            return False
        squares = self.box.squares.get((action.pipeline, action.unit))
        return action.op != Op.STEP or squares is None or len(squares) == self.box.plan.world_size

    def send(self, action: Action, tensor: Tensor) -> None:
        if tensor.nbytes < tensor.untyped_storage().nbytes():
            # The receiver of a part must not keep the whole alive.
            tensor = tensor.clone()
        self.box.queues[channel(action, self.box.plan)].append((action, tensor))

    def receive(self, action: Action, shape: Sequence[int]) -> Tensor:
        sent, tensor = self.box.queues[channel(action, self.box.plan)].popleft()
        if (sent.unit, sent.interval) != (action.unit, action.interval):
            raise RuntimeError(f"{action} met {sent}: messages crossed")
        if tuple(tensor.shape) != tuple(shape):
            raise RuntimeError(f"{action} expects shape {tuple(shape)}, got {tuple(tensor.shape)}")
        return tensor

    def reduce(self, action: Action, tensors: Sequence[Tensor]) -> None:
        key = (action.pipeline, action.stage, action.unit, action.part)
        shares = self.box.open[key]
        shares[action.replica] = tensors
        place = (action.pipeline, action.stage, action.unit, action.replica)
        self.box.pending[place].add(key)
        if len(shares) == self.box.plan.stages[action.stage].replicas:
            with torch.no_grad():
                self.box.complete(key)

    def finish_reduce(self, action: Action) -> None:
        place = (action.pipeline, action.stage, action.unit, action.replica)
        self.box.pending.pop(place, None)

    def norm(self, action: Action, squares: Tensor) -> None:
        rank = self.box.plan.rank(action.stage, action.replica)
        self.box.squares[action.pipeline, action.unit][rank] = squares

    def finish_norm(self, action: Action) -> Tensor:
        shares = self.box.squares[action.pipeline, action.unit]
        return torch.stack([shares[rank] for rank in sorted(shares)]).sum()

    def messages(self) -> Iterator[Tensor]:
        """A message lies with its sender until it is taken."""
        for key, queue in self.box.queues.items():
            if key.sender == self.rank:
                yield from (tensor for _, tensor in queue)

    def reductions(self) -> Iterator[Tensor]:
        """They are made in the gradients themselves."""
        return iter(())

    def close(self) -> None:
        """Nothing is under way in one process: what was sent lies in the mailbox."""


def run_program(workers: Sequence[Worker]) -> None:
    """Walk all streams to their ends, rank after rank; RuntimeError if all wait."""
    moved = True
    while moved:
        moved = False
        for worker in workers:
            while worker.advance():
                moved = True
    waiting = {worker.rank: worker.waiting_at for worker in workers if worker.waiting_at}
    if waiting:
        places = "; ".join(
            f"rank {rank} at {', '.join(map(str, actions))}" for rank, actions in waiting.items()
        )
        raise RuntimeError(f"deadlock, all wait: {places}")
    for worker in workers:
        worker.finish()


class InProcess:
    """A system on all its ranks at once; methods as of :class:`Engine`, for all ranks together."""

    def __init__(
        self,
        job: Job,
        task: Task,
        stack: LayerStack,
        feed: Feed,
        *,
        system: System | None = None,
        before: Callable[[Action], None] | None = None,
        keep_gradients: bool = False,
        timed: bool = False,
    ):
        self.plan = task.plan
        self.system = system or get_system(task.system, task.options)
        self.system.check(task.plan)
        self.norm = job.optimizer.global_norm
        self.box = Mailbox(task.plan)
        self.workers = [
            Worker(
                job,
                task,
                stack,
                feed,
                rank,
                self.box.endpoint(rank),
                self.system,
                before=before,
                keep_gradients=keep_gradients,
                timed=timed,
            )
            for rank in range(task.plan.world_size)
        ]

    def run(
        self, program: Program, first_step: int, feed: Feed | None = None, *, mean: bool = False
    ) -> float:
        """Run any program on these workers; seconds of wall time.  ``mean`` as of Worker."""
        begin = perf_counter()
        self.box.squares.clear()
        for worker in self.workers:
            worker.start(program, first_step, feed, mean=mean)
        run_program(self.workers)
        left = [key for key, queue in self.box.queues.items() if queue]
        assert not left, f"messages that nobody received: {left}"
        return perf_counter() - begin

    def train(self, segment: Segment) -> list[SegmentReport]:
        program = self.system.program(
            self.plan,
            segment.batches,
            carried=self.workers[0].copies.carried,
            norm=self.norm,
            phase=segment.first % self.system.period,
        )
        wall = self.run(program, segment.first)
        self._average_running()
        return [worker.report(wall) for worker in self.workers]

    def _average_running(self) -> None:
        for stage in self.plan.stages:
            for pipeline in range(self.plan.pipelines):
                average_copies(
                    [self.workers[rank].copies[pipeline].running for rank in stage.ranks]
                )

    def evaluate(self, feed: Feed, samples: int, batch_size: int) -> Accuracy:
        program = evaluation_program(self.plan, samples, batch_size)
        # First, so that what is bound when it is over is not a set of its own.
        mean = self._evaluate(program, feed, mean=True) if self._tied else None
        return replace(self._evaluate(program, feed), mean=mean)

    @property
    def _tied(self) -> bool:
        return self.workers[0].copies.averaging is not None

    def _evaluate(self, program: Program, feed: Feed, *, mean: bool = False) -> Accuracy:
        self.run(program, 0, feed, mean=mean)
        return added([worker.accuracy() for worker in self.workers])

    @property
    def last_gradients(self) -> dict[str, Tensor]:
        """Of pipeline 0's last update, reduced, by parameter name (with ``keep_gradients``)."""
        found: dict[str, Tensor] = {}
        for worker in self.workers:
            found |= worker.copies[0].updates.last_gradients
        return found

    def state(self) -> dict[str, Any]:
        return merged([worker.copies.state() for worker in self.workers])

    def load(self, state: Mapping[str, Any]) -> None:
        for worker in self.workers:
            worker.copies.load(state, carried=bool(state.get("stash")))
