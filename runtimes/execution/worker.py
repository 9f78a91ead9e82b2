"""The worker: performs one rank's streams of a program, action by action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtimes.execution.criterion import cross_entropy_sum
from runtimes.execution.engine import Accuracy, Feed
from runtimes.execution.flight import Flight
from runtimes.execution.optimizer import build_optimizer
from runtimes.execution.precision import autocast, dtype_of, synchronize
from runtimes.execution.tally import Tally
from runtimes.execution.trace import Trace
from runtimes.execution.transport import Endpoint
from runtimes.execution.updates import StageUpdates
from runtimes.execution.versions import WeightVersions
from runtimes.job import Job, Task
from runtimes.model.stack import LayerStack
from runtimes.schedule.action import COMPUTE, RECEIVES, Action, Op
from runtimes.schedule.program import Program
from runtimes.system import System

__all__ = ["Worker"]


@dataclass
class _Head:
    """A stream being walked."""

    actions: Iterator[Action]
    action: Action | None = None

    def advance(self) -> None:
        self.action = next(self.actions, None)


class Worker:
    """One rank: its stage's weights and the actions on them.

    ``before`` is called with each action before it is performed (status file, tests).  ``timed``:
    whether its time means anything, so that what it did and when is kept.
    """

    def __init__(
        self,
        job: Job,
        task: Task,
        stack: LayerStack,
        feed: Feed,
        rank: int,
        endpoint: Endpoint,
        system: System,
        *,
        before: Callable[[Action], None] | None = None,
        keep_gradients: bool = False,
        timed: bool = True,
    ):
        self.job, self.plan, self.rank = job, task.plan, rank
        self.feed, self.endpoint, self.before = feed, endpoint, before
        self.system, self.timed = system, timed
        self.stage_index, self.replica = task.plan.place(rank)
        self.stage = task.plan.stages[self.stage_index]
        self.device, self.dtype = torch.device(job.device), dtype_of(job.precision)
        first, last = self.stage.first, self.stage.last
        self.module = stack.stage(first, last, job.seed)
        # In the order of the forward: the backward's parts, turned round.
        self.parts = [self.module.part(*part) for part in self.stage.parts[::-1]]
        weights = stack.initial_weights(first, last, job.seed, self.device, self.dtype)
        trained = {
            self.module.names[local]
            for local, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }
        #: Buffers and frozen parameters: one copy, whatever the version; of the buffers forwards
        #: change some.
        self.constants = {name: w for name, w in weights.items() if name not in trained}
        self.running = {name: self.constants[name] for name in self.module.running}
        self.versions = WeightVersions(
            {name: w for name, w in weights.items() if name in trained},
            self._optimizer,
            retain=system.retained(self.plan, self.stage_index),
        )
        self.updates = StageUpdates(
            job,
            self.plan,
            rank,
            system,
            endpoint,
            self.versions,
            [[n for n in part.names.values() if n in trained] for part in self.parts[::-1]],
            len(feed.batch_sizes()),
            keep_gradients=keep_gradients,
        )
        self._bound: dict[str, torch.nn.Parameter] | None = None
        self.is_first = self.stage_index == 0
        self.is_last = self.stage_index == len(self.plan.stages) - 1
        self.trace = Trace(busy_ns=self.module.busy_ns)
        self.losses: dict[int, Tensor] = {}
        self.tally = Tally(self.device)
        self.peak_in_flight = 0
        #: By pipeline and unit.
        self.flights: dict[tuple[int, int], Flight] = {}
        sample = feed.images(feed.indices(0)[:1], 0).shape[1:]
        self.shapes = stack.output_shapes(sample, self.dtype)
        self._perform = {
            Op.F: self._forward,
            Op.R: self._recompute,
            Op.B: self._backward,
            Op.SEND_ACT: self._send_activation,
            Op.SEND_GRAD: self._send_gradient,
            Op.RECV_ACT: self._receive,
            Op.RECV_GRAD: self._receive,
            Op.REDUCE: self.updates.reduce,
            Op.NORM: self.updates.norm,
            Op.STEP: self.updates.step,
        }

    def _optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = build_optimizer(parameters, self.job.optimizer)
        self.module.charge(optimizer, self.system.live_versions(self.plan, self.stage_index))
        return optimizer

    # -- walking the streams ---------------------------------------------------------------

    def start(self, program: Program, first_step: int, feed: Feed | None = None) -> None:
        """Get ready to run this rank's streams; update 0 of the program is ``first_step``.

        The clock starts first: getting ready is part of the time that the runtime takes.
        """
        # Of an evaluation nobody asks when what was done.
        self.trace.begin(kept=self.timed and program.training)
        self.program, self.first_step = program, first_step
        self.updates.start(program, first_step)
        self.active_feed = feed or self.feed
        if self.module.training != program.training:
            self.module.train(program.training)
        if program.training:
            self.versions.drained(program.carried)
        self.losses, self.peak_in_flight = {}, 0
        self.tally.clear()
        self._done: set[Action] = set()
        self._awaited = {edge for edges in program.after.values() for edge in edges}
        self._heads = [_Head(iter(stream)) for stream in program.of_rank(self.rank)]
        for head in self._heads:
            head.advance()
        self.endpoint.open(program)

    @property
    def waiting_at(self) -> list[Action]:
        """The next action of each stream that has not ended."""
        return [head.action for head in self._heads if head.action is not None]

    def advance(self) -> bool:
        """Perform the first action that is ready, by order of streams; False if none is."""
        for head in self._heads:
            action = head.action
            if action is not None and self._ready(action):
                self._act(action)
                head.advance()
                return True
        return False

    def finish(self) -> None:
        """All streams have ended."""
        self.endpoint.close()
        synchronize(self.device)
        self.trace.finish()
        assert not self.flights, f"units left in flight: {sorted(self.flights)}"

    def _ready(self, action: Action) -> bool:
        if self._awaited and not self._done.issuperset(self.program.after.get(action, ())):
            return False
        if action.op in RECEIVES or action.op in (Op.NORM, Op.STEP):
            return self.endpoint.ready(action)
        return True

    def _act(self, action: Action) -> None:
        if self.before is not None:
            self.before(action)
        kept = self.trace.kept
        cpu = self.trace.busy_ns() if kept and action.op in COMPUTE else None  # A system call.
        start = perf_counter_ns()
        waited = self._perform[action.op](action)
        if kept:
            self.trace.add(action, start, cpu, waited or 0)
        if self._awaited and action in self._awaited:
            self._done.add(action)

    # -- computing -------------------------------------------------------------------------

    def _flight(self, action: Action) -> Flight:
        flight = self.flights.get((action.pipeline, action.unit))
        if flight is None:
            batch_index = self.program.batches.batch(action.unit)
            low, _ = self.program.batches.samples(action.pipeline, action.unit)
            first, last = self.program.share(
                action.pipeline, self.stage_index, self.replica, action.unit
            )
            step = self.first_step + batch_index
            if self.program.training:
                batch = self.active_feed.indices(step)
                assert len(batch) == self.program.batches.sizes[batch_index]
                samples = batch[low + first : low + last]
            else:
                begin = batch_index * self.program.batches.sizes[0] + low
                samples = np.arange(begin + first, begin + last)
            flight = self.flights[action.pipeline, action.unit] = Flight({}, step, samples, first)
        return flight

    def _bind(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        if parameters is not self._bound:
            self.module.bind(parameters | self.constants)
            self._bound = parameters

    def _run(self, flight: Flight, x: Tensor) -> Tensor:
        """Through the stage's layers, cutting the graph at the boundaries of the parts."""
        self.module.random.set(flight.step, flight.samples)
        self._bind(flight.parameters)
        grad = torch.is_grad_enabled()
        flight.pieces = []
        for number, part in enumerate(self.parts):
            if grad and (number or not self.is_first):
                x = x.detach().requires_grad_()
            with autocast(self.job.precision, self.device):
                out: Tensor = part(x)
            if grad:
                flight.pieces.append((x, out))
            x = out
        return x if self.is_last else x.to(self.dtype)

    def _loss(self, flight: Flight, logits: Tensor) -> Tensor:
        labels = self.active_feed.labels(flight.samples)
        batch = self.program.batches.sizes[flight.step - self.first_step]
        return cross_entropy_sum(logits, labels, self.job.label_smoothing) / batch

    def _forward(self, action: Action) -> None:
        flight = self._flight(action)
        x = self._received(flight, Op.RECV_ACT)
        if x is None:
            x = self.active_feed.images(flight.samples, flight.step)
        if not self.program.training:
            self._forward_only(action, flight, x)
            return
        assert action.version is not None
        flight.parameters = self.versions.acquire(action.version)
        self.peak_in_flight = max(
            self.peak_in_flight, sum(bool(f.parameters) for f in self.flights.values())
        )
        if self.stage.recompute:
            flight.input = x
        with torch.set_grad_enabled(not self.stage.recompute):
            flight.output = self._run(flight, x)
            if self.is_last:
                self._finish_forward(flight, count=True)

    def _finish_forward(self, flight: Flight, *, count: bool) -> None:
        """The last stage's output is its share of the loss."""
        assert flight.output is not None
        loss = self._loss(flight, flight.output)
        flight.output = None
        if flight.pieces:
            flight.pieces[-1] = (flight.pieces[-1][0], loss)
        if count:
            so_far = self.losses.get(flight.step)
            share = loss.detach()
            self.losses[flight.step] = share if so_far is None else so_far + share

    def _forward_only(self, action: Action, flight: Flight, x: Tensor) -> None:
        flight.parameters = self.versions.current
        with torch.no_grad():
            flight.output = self._run(flight, x)
        if self.is_last:
            self.tally.add(flight.output, self.active_feed.labels(flight.samples))
            # Without a backward a unit is over here, or with its last send.
            del self.flights[action.pipeline, action.unit]

    def _recompute(self, action: Action) -> None:
        """Again on the same version with the same keyed randomness: nothing to restore."""
        flight = self.flights[action.pipeline, action.unit]
        assert flight.input is not None
        x, flight.input = flight.input, None
        with self.module.repeated():
            output = self._run(flight, x)
        if self.is_last:  # Others have sent theirs.
            flight.output = output
            self._finish_forward(flight, count=False)

    def _backward(self, action: Action) -> None:
        flight = self.flights[action.pipeline, action.unit]
        if action.part in (None, 0) and not self.is_last:
            flight.gradient = self._received(flight, Op.RECV_GRAD)
        count = len(flight.pieces) if action.part is None else 1
        for _ in range(count):
            x, out = flight.pieces.pop()
            # The first layers may have no weights (a Flatten): then there is nothing to compute.
            if out.requires_grad:
                torch.autograd.backward(out, flight.gradient)
            flight.gradient = x.grad
        assert action.version is not None
        self.updates.made(action.unit, action.version)
        if not flight.pieces:
            self.versions.release(action.version)
            flight.parameters = {}
            if self.is_first:
                del self.flights[action.pipeline, action.unit]

    # -- messages --------------------------------------------------------------------------

    def _receive(self, action: Action) -> None:
        flight = self._flight(action)
        assert action.interval is not None
        boundary = self.stage.first - 1 if action.op == Op.RECV_ACT else self.stage.last - 1
        count = action.interval[1] - action.interval[0]
        tensor = self.endpoint.receive(action, (count, *self.shapes[boundary]))
        flight.received[action.op][action.interval[0]] = tensor

    def _received(self, flight: Flight, op: Op) -> Tensor | None:
        """What was received for a unit, in the order of its samples: a piece may come early."""
        pieces = flight.received.pop(op, {})
        if not pieces:
            return None
        ordered = [pieces[first] for first in sorted(pieces)]
        return ordered[0] if len(ordered) == 1 else torch.cat(ordered)

    def _mine(self, flight: Flight, action: Action, tensor: Tensor) -> tuple[Tensor, bool]:
        """The part of this replica's tensor that a message carries, and whether all has gone."""
        assert action.interval is not None
        first, last = action.interval
        flight.sent[action.op] += last - first
        piece = tensor[first - flight.first : last - flight.first]
        return piece, flight.sent[action.op] == len(tensor)

    def _send_activation(self, action: Action) -> None:
        flight = self.flights[action.pipeline, action.unit]
        assert flight.output is not None
        piece, last = self._mine(flight, action, flight.output.detach())
        self.endpoint.send(action, piece)
        if last:
            flight.output = None
            if not self.program.training:
                del self.flights[action.pipeline, action.unit]

    def _send_gradient(self, action: Action) -> None:
        flight = self.flights[action.pipeline, action.unit]
        assert flight.gradient is not None
        piece, last = self._mine(flight, action, flight.gradient)
        self.endpoint.send(action, piece)
        if last:
            del self.flights[action.pipeline, action.unit]

    # -- results ---------------------------------------------------------------------------

    @property
    def carried(self) -> int:
        """Versions before the latest that the next segment begins with; the same on all ranks."""
        return min(self.system.carries, self.versions.latest)

    @property
    def last_gradients(self) -> dict[str, Tensor]:
        return self.updates.last_gradients

    def accuracy(self) -> Accuracy:
        """Of the evaluation just run, this rank's share."""
        return self.tally.accuracy()

    def loss_shares(self) -> dict[int, float]:
        return {step: float(loss) for step, loss in self.losses.items()}

    def state(self) -> dict[str, Any]:
        """Weights and optimizer state of this stage: replica 0 speaks for all."""
        if self.replica:
            return {"weights": {}, "optimizer": {}, "stash": {}}
        weights = {name: p.detach() for name, p in self.versions.current.items()}
        return {
            "weights": weights | self.constants,
            "optimizer": self.versions.optimizer_state(),
            "stash": self.versions.stash() if self.carried else {},
        }

    def load(self, state: Mapping[str, Any], *, carried: bool) -> None:
        """Take what this stage needs of a merged state, whatever plan wrote it.  ``carried``: the
        whole state has a stash, of which a stage without weights holds nothing."""
        stash = state["stash"] if carried and self.system.carries else None
        self.versions.load(state["weights"], state["optimizer"], stash)
        for name, constant in self.constants.items():
            constant.copy_(state["weights"][name])
