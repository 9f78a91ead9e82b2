"""The worker: performs one rank's streams of a program, action by action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import torch
from torch import Tensor

from runtimes.execution.copies import Copies, Weights
from runtimes.execution.criterion import cross_entropy_sum
from runtimes.execution.engine import Accuracy, Feed, SegmentReport
from runtimes.execution.flight import Flight
from runtimes.execution.precision import autocast, dtype_of, synchronize
from runtimes.execution.tally import Tally
from runtimes.execution.trace import Trace
from runtimes.execution.transport import Endpoint
from runtimes.job import Job, Task
from runtimes.model.stack import LayerStack
from runtimes.schedule.action import COMPUTE, RECEIVES, Action, Op
from runtimes.schedule.choice import in_turn
from runtimes.schedule.joining import Joining
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
        self.copies = Copies(
            job,
            self.plan,
            rank,
            system,
            endpoint,
            self.module,
            self.parts,
            stack.initial_weights(first, last, job.seed, self.device, self.dtype),
            len(feed.batch_sizes()),
            keep_gradients=keep_gradients,
        )
        self._bound: Weights | None = None
        self._evaluated = self.copies[0].current
        self.is_first = self.stage_index == 0
        self.is_last = self.stage_index == len(self.plan.stages) - 1
        self.trace = Trace(busy_ns=self.module.busy_ns)
        #: By update and pipeline.
        self.losses: dict[tuple[int, int], Tensor] = {}
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
            Op.REDUCE: lambda action: self.copies[action.pipeline].updates.reduce(action),
            Op.NORM: lambda action: self.copies[action.pipeline].updates.norm(action),
            Op.STEP: lambda action: self.copies[action.pipeline].updates.step(action),
            Op.AVERAGE: self._average,
        }

    # -- walking the streams ---------------------------------------------------------------

    def start(
        self, program: Program, first_step: int, feed: Feed | None = None, *, mean: bool = False
    ) -> None:
        """Get ready to run this rank's streams; update 0 of the program is ``first_step``.

        ``mean``: an evaluation runs on the mean of the copies, not on the reference.

        The clock starts first: getting ready is part of the time that the runtime takes.
        """
        # Of an evaluation nobody asks when what was done.
        self.trace.begin(kept=self.timed and program.training)
        self.program, self.first_step = program, first_step
        self.active_feed = feed or self.feed
        if self.module.training != program.training:
            self.module.train(program.training)
        if program.training:
            self.copies.start(program, first_step)
        else:
            self._evaluated = self.copies.evaluated(mean=mean)
        self.losses, self.peak_in_flight = {}, 0
        self.tally.clear()
        self._done: set[Action] = set()
        self._joining = Joining(program, self.rank)
        self._awaited = {edge for edges in program.after.values() for edge in edges}
        self._heads = [_Head(iter(stream)) for stream in program.of_rank(self.rank)]
        for head in self._heads:
            head.advance()
        self._since: int | None = None
        self.endpoint.open(program)

    @property
    def waiting_at(self) -> list[Action]:
        """The next action of each stream that has not ended."""
        return [head.action for head in self._heads if head.action is not None]

    def can_go_on(self) -> bool:
        """Whether any stream can."""
        return any(h.action is not None and self._ready(h.action) for h in self._heads)

    def rested(self, since: int) -> None:
        """No stream could go on since then.  The wait belongs to the action that ends it."""
        self._since = since

    def advance(self) -> bool:
        """Perform the most urgent action that is ready; False if none is."""
        for head in in_turn(self._heads, self.program.batches):
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
        return action.op is not Op.AVERAGE or self._joining.ready(action)

    def _act(self, action: Action) -> None:
        if self.before is not None:
            self.before(action)
        kept = self.trace.kept
        cpu = self.trace.busy_ns() if kept and action.op in COMPUTE else None  # A system call.
        start = perf_counter_ns()
        waited = self._perform[action.op](action) or 0
        if self._since is not None:
            start, waited, self._since = self._since, waited + start - self._since, None
        if kept:
            self.trace.add(action, start, cpu, waited)
        if self._awaited and action in self._awaited:
            self._done.add(action)
        self._joining.made(action)

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
            flight = Flight({}, action.pipeline, step, samples, first)
            self.flights[action.pipeline, action.unit] = flight
        return flight

    def _bind(self, flight: Flight) -> None:
        holder = self.copies[flight.pipeline] if self.program.training else self._evaluated
        wanted, bound = Weights(flight.parameters, holder.constants), self._bound
        if bound is None or not wanted.same(bound):
            self.module.bind({**wanted.parameters, **wanted.constants})
            self._bound = wanted

    def _run(self, flight: Flight, x: Tensor) -> Tensor:
        """Through the stage's layers, cutting the graph at the boundaries of the parts."""
        self.module.random.set(flight.step, flight.samples)
        self._bind(flight)
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
        """Divided by the samples of the pipeline's share of the batch."""
        labels, batches = self.active_feed.labels(flight.samples), self.program.batches
        share = batches.share_of_batch(flight.pipeline, flight.step - self.first_step)
        return cross_entropy_sum(logits, labels, self.job.label_smoothing) / share

    def _forward(self, action: Action) -> None:
        flight = self._flight(action)
        x = self._received(flight, Op.RECV_ACT)
        if x is None:
            x = self.active_feed.images(flight.samples, flight.step)
        if not self.program.training:
            self._forward_only(action, flight, x)
            return
        assert action.version is not None
        flight.parameters = self.copies[action.pipeline].versions.acquire(action.version)
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
            place, share = (flight.step, flight.pipeline), loss.detach()
            so_far = self.losses.get(place)
            self.losses[place] = share if so_far is None else so_far + share

    def _forward_only(self, action: Action, flight: Flight, x: Tensor) -> None:
        flight.parameters = self._evaluated.parameters
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
        copy = self.copies[action.pipeline]
        copy.updates.made(action.unit, action.version)
        if not flight.pieces:
            copy.versions.release(action.version)
            flight.parameters = {}
            if self.is_first:
                del self.flights[action.pipeline, action.unit]

    def _average(self, action: Action) -> None:
        """Nothing to do for the only copy of a system that needs no reference beside it."""
        if self.copies.averaging is not None:
            self.copies.averaging.average(action.pipeline, action.unit)

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

    def accuracy(self) -> Accuracy:
        """Of the evaluation just run, this rank's share."""
        return self.tally.accuracy()

    def report(self, wall_s: float, times: Mapping[str, float] | None = None) -> SegmentReport:
        """Of the training just done; ``times``: the parts of its wall time."""
        losses: dict[int, float] = {}
        by_pipeline: dict[int, dict[int, float]] = {}
        for (step, pipeline), value in self.losses.items():
            by_pipeline.setdefault(step, {})[pipeline] = float(value)
        for step, shares in by_pipeline.items():
            losses[step] = self._weighted(step, shares)
        averaging, several = self.copies.averaging, len(self.copies) > 1
        report = SegmentReport(
            wall_s,
            losses,
            dict(times or {}),
            self.copies.most_live,
            self.peak_in_flight,
            by_pipeline if several else {},
        )
        if averaging is not None and not self.replica:  # Replicas hold the same copies.
            report.squared_distances = averaging.squared_distances()
            report.averaged = None if averaging.elastic.joint else averaging.order
        return report

    def _weighted(self, step: int, shares: Mapping[int, float]) -> float:
        """The mean over pipelines of their losses of an update, by their samples."""
        batches, index = self.program.batches, step - self.first_step
        return sum(
            loss * (batches.share_of_batch(pipeline, index) / batches.sizes[index])
            for pipeline, loss in sorted(shares.items())  # They may have come in any order.
        )
