"""A rank that walks several streams over processes and computes nothing: every message and every
sum says of itself what it has to be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtimes.execution.endpoint import GroupEndpoint
from runtimes.plan import Plan
from runtimes.schedule.action import RECEIVES, SENDS, Action, Op
from runtimes.schedule.program import Program, channel

__all__ = ["Walk", "endpoint_of"]

WIDTH = 3


def endpoint_of(plan: Plan, rank: int, timeout_s: float = 20) -> GroupEndpoint:
    end = GroupEndpoint(plan, rank, timeout_s, plan.micro_batches, None)
    end.device, end.dtype = torch.device("cpu"), torch.float64
    end.shapes = [(WIDTH,)] * plan.layers
    return end


def message(action: Action, plan: Plan) -> Tensor:
    """What a send or receive carries: (samples, WIDTH), of pipeline, place, unit and sample."""
    assert action.interval is not None
    way = channel(action, plan)
    place = 10 * way.sender + way.receiver
    samples = torch.arange(*action.interval, dtype=torch.float64)
    values = samples + 1e2 * action.unit + 1e5 * action.pipeline + 1e6 * place
    return values[:, None].expand(-1, WIDTH).contiguous()


def share(action: Action, rank: int) -> Tensor:
    """What a rank gives to a sum of the update, all of the same size."""
    part = 0 if action.part is None else action.part
    value = 1 + action.unit + 100 * action.pipeline + 10_000 * part + 1_000_000 * rank
    return torch.full((7,), float(value), dtype=torch.float64)


@dataclass
class Walk:
    """``held(action)``: whether an action may not be performed yet, whatever the transport says.
    ``turned``: the last stream goes first."""

    end: GroupEndpoint
    program: Program
    before: Callable[[Action], None] = lambda action: None
    held: Callable[[Action], bool] = lambda action: False
    turned: bool = False
    #: What was performed, in its order.
    done: list[Action] = field(default_factory=list)
    #: What was not what it had to be.
    wrong: list[str] = field(default_factory=list)
    #: How often the rank slept, and how often it looked whether it can go on.
    rests: int = 0
    looks: int = 0

    def run(self) -> None:
        self._reduced: dict[tuple[int, int], list[tuple[Action, Tensor]]] = {}
        self._normed: set[tuple[int, int]] = set()
        streams = self.program.of_rank(self.end.rank)
        order = streams[::-1] if self.turned else streams
        self._heads = [iter(stream) for stream in order]
        self._next = [next(head, None) for head in self._heads]
        self.end.open(self.program)
        while any(action is not None for action in self._next):
            if not self._advance():
                self.rests += 1
                waiting = [action for action in self._next if action is not None]
                self.end.rest(self._can_go_on, waiting)
        self.end.close()
        assert threading.active_count() == 1, threading.enumerate()

    def _can_go_on(self) -> bool:
        self.looks += 1
        return any(action is not None and self._ready(action) for action in self._next)

    def _ready(self, action: Action) -> bool:
        waits = action.op in RECEIVES or action.op in (Op.NORM, Op.STEP)
        return not self.held(action) and (not waits or self.end.ready(action))

    def _advance(self) -> bool:
        for number, action in enumerate(self._next):
            if action is not None and self._ready(action):
                self.before(action)
                self._perform(action)
                self.done.append(action)
                self._next[number] = next(self._heads[number], None)
                return True
        return False

    def _check(self, action: Action, found: Tensor, expected: Tensor) -> None:
        if not torch.equal(found, expected):
            self.wrong.append(f"{action}: {found.flatten()[0]}, not {expected.flatten()[0]}")

    def _perform(self, action: Action) -> None:
        end, plan, key = self.end, self.program.plan, (action.pipeline, action.unit)
        if action.op in SENDS:
            end.send(action, message(action, plan))
        elif action.op in RECEIVES:
            expected = message(action, plan)
            self._check(action, end.receive(action, tuple(expected.shape)), expected)
        elif action.op == Op.REDUCE:
            given = share(action, end.rank)
            self._reduced.setdefault(key, []).append((action, given))
            end.reduce(action, [given])
        elif action.op == Op.NORM:
            self._finish_reduce(action)
            end.norm(action, share(action, end.rank))
            self._normed.add(key)
        elif action.op == Op.STEP and key in self._normed:
            everyone = range(plan.world_size)
            self._check(action, end.finish_norm(action), self._sum(action, everyone))
        elif action.op == Op.STEP:
            self._finish_reduce(action)

    def _finish_reduce(self, action: Action) -> None:
        self.end.finish_reduce(action)
        ranks = self.program.plan.stages[action.stage].ranks
        for reduce, found in self._reduced.pop((action.pipeline, action.unit), ()):
            self._check(reduce, found, self._sum(reduce, ranks))

    def _sum(self, action: Action, ranks: Sequence[int]) -> Tensor:
        return torch.stack([share(action, rank) for rank in ranks]).sum(0)
