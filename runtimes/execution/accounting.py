"""Bytes that the ranks of this process hold, counted from the storages of their real tensors.

weights      every version, sets that wait to hold a later one, frozen parameters, buffers; of
             every copy, and the reference
gradients    accumulated, taken and not yet stepped, and the buckets that are being reduced
optimizer    state
activations  what autograd saved for the backwards of units in flight, their inputs and outputs,
             and the inputs kept for recomputation
messages     receives posted, tensors received and not yet used, tensors to be sent or under way

A storage counts once a rank, in the first kind that it belongs to: a weight that autograd saved is
a weight.  Counted is what is there between actions; inside of one there is besides what its kernels
take for a moment.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from runtimes.execution.worker import Worker
from runtimes.schedule.action import Action

__all__ = ["KINDS", "MemoryObserver", "Peak", "held"]

KINDS = ("weights", "gradients", "optimizer", "activations", "messages")


class _Saved:
    """What autograd keeps in the place of a tensor, exactly as long as it would keep that."""

    def __init__(self, tensor: Tensor):
        # Detached: an output of the operation that saves it would else keep itself alive.
        self.tensor = tensor.detach()


@dataclass
class Peak:
    """The most that a rank held: ``kinds``, the most bytes of each kind, which need not be at one
    moment; ``at_once``, the bytes of each at the moment of the largest sum, which is after action
    ``at``."""

    kinds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    at_once: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    at: Action | None = None

    @property
    def total(self) -> int:
        return sum(self.at_once.values())

    def see(self, found: Mapping[str, int], action: Action) -> None:
        """After ``action`` the rank holds ``found``."""
        self.kinds = {kind: max(most, found[kind]) for kind, most in self.kinds.items()}
        if sum(found.values()) > self.total:
            self.at_once, self.at = dict(found), action


def held(worker: Worker, saved: Iterator[Tensor] | Sequence[Tensor] = ()) -> dict[str, int]:
    """Bytes of each kind that the worker's rank holds; ``saved``: tensors that autograd saved."""
    flights = worker.flights.values()
    kinds: tuple[tuple[str, Iterator[Tensor | None]], ...] = (
        ("weights", worker.copies.tensors()),
        ("gradients", _gradients(worker)),
        ("optimizer", _optimizer_state(worker)),
        ("activations", iter((*saved, *(t for f in flights for t in f.activations())))),
        (
            "messages",
            iter((*(t for f in flights for t in f.messages()), *worker.endpoint.messages())),
        ),
    )
    seen: set[int] = set()
    found = dict.fromkeys(KINDS, 0)
    for kind, tensors in kinds:
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[kind] += storage.nbytes()
    return found


def _optimizer_state(worker: Worker) -> Iterator[Tensor]:
    for copy in worker.copies:
        for state in copy.versions.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _gradients(worker: Worker) -> Iterator[Tensor | None]:
    for copy in worker.copies:
        yield from (parameter.grad for parameter in copy.versions.parameters())
        yield from copy.updates.gradients()
    yield from worker.endpoint.reductions()


class MemoryObserver:
    """Counts after every action of the workers while it is entered; ``peaks`` by rank.

    ``each`` is called after every count with rank, action and the bytes.  The workers are those of
    this thread: all ranks of an in-process engine, or the one of a process.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        each: Callable[[int, Action, dict[str, int]], None] | None = None,
    ):
        self.peaks = {worker.rank: Peak() for worker in workers}
        self._workers = {worker.rank: worker for worker in workers}
        self._saved: dict[int, weakref.WeakSet[_Saved]] = {
            rank: weakref.WeakSet() for rank in self._workers
        }
        self._each = each
        self._acting: tuple[int, Action] | None = None

    def __enter__(self) -> MemoryObserver:
        self._stack = ExitStack()
        for worker in self._workers.values():
            self._stack.callback(setattr, worker, "before", worker.before)
            worker.before = self._chained(worker, worker.before)
        self._stack.enter_context(saved_tensors_hooks(self._pack, lambda saved: saved.tensor))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._count()

    def _chained(
        self, worker: Worker, before: Callable[[Action], None] | None
    ) -> Callable[[Action], None]:
        def act(action: Action) -> None:
            self._count()
            self._acting = worker.rank, action
            if before is not None:
                before(action)

        return act

    def _pack(self, tensor: Tensor) -> _Saved:
        assert self._acting is not None, "a forward outside of the workers' actions"
        saved = _Saved(tensor)
        self._saved[self._acting[0]].add(saved)
        return saved

    def _count(self) -> None:
        """What the rank that acted last holds now: nobody has acted since."""
        if self._acting is None:
            return
        rank, action = self._acting
        found = held(self._workers[rank], [saved.tensor for saved in self._saved[rank]])
        self.peaks[rank].see(found, action)
        if self._each is not None:
            self._each(rank, action, found)
