"""Ranks that dawdle at random compute bit by bit what one process computes.

A buffer that is used before its message is there, or again while one is under way, would make a
result depend on who is late.  Rounding cannot hide it, as it may in long training at a rate near
divergence, where a difference of one bit in the first update grows to the size of the weights:
nothing is rounded differently here.  (Sums of three replicas and more have another order over gloo
than in one process, but always the same one.)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtimes.execution.endpoint import GroupEndpoint, Reduction
from runtimes.plan import Plan
from runtimes.schedule.action import Action, Op
from tests.processes import run_ranks
from tests.runtimes.transparency import Case, Outcome, train_in_process
from tests.runtimes.transparency_ranks import Share, merged, train_case


@dataclass(frozen=True)
class Parallel(Case):
    """Pipelines that share the ranks."""

    pipelines: int = 2

    @property
    def plan(self) -> Plan:
        return replace(super().plan, pipelines=self.pipelines)


EPOCH = (5, 5, 5, 2)
CASES = {
    2: [
        Case("dp", 1, 1, (2,), cuts=(3, 6), options=(("overlap", True),)),
        Case("gpipe", 2, 3, (1, 1), recompute=True),
        Case("dapple", 2, 4, (1, 1), cuts=(3,)),
        Case("ashpipe", 2, 1, (1, 1), options=(("order", "published"),)),
        Case("pipedream_2bw", 2, 3, (1, 1)),
        Parallel("avgpipe", 2, 2, (1, 1), clip=1.0),
        Parallel("avgpipe", 2, 3, (1, 1), options=(("form", "symmetric"),), pipelines=3),
        Parallel("avgpipe", 1, 1, (2,), cuts=(3, 6)),
    ],
    3: [
        Case("dp", 1, 1, (3,), options=(("overlap", False),)),
        Case("gpipe", 2, 4, (1, 2), cuts=(3, 6)),
        Case("dapple", 3, 5, (1, 1, 1), recompute=True),
        Case("ashpipe", 2, 1, (2, 1), cuts=(2, 3)),
        Case("ashpipe", 3, 1, (1, 1, 1), recompute=True),
        Case("pipedream", 2, 1, (1, 2)),
        Parallel("avgpipe", 3, 2, (1, 1, 1), recompute=True),
        Parallel("avgpipe", 2, 2, (2, 1), cuts=(2, 3)),
    ],
}
MOST_S = 0.002


def small(case: Case) -> Case:
    changed = {"epoch": EPOCH, "segments": (EPOCH, EPOCH), "model": "widths"}
    return replace(case, **changed)


def dawdling(rank: int, seed: int) -> Callable[[Action], None]:
    """Before some actions; one rank more than another, and every run another one."""
    dice = random.Random(f"{seed} {rank}")
    often = dice.choice([0.0, 0.1, 0.4])

    def before(_: Action) -> None:
        if dice.random() < often:
            time.sleep(MOST_S * dice.random())

    return before


def train_twice(rank: int, world_size: int, cases: list[Case], mutant: str) -> list[list[Share]]:
    if mutant:
        MUTANTS[mutant]()
    return [
        [train_case(rank, case, dawdling(rank, 2 * number + again)) for again in range(2)]
        for number, case in enumerate(cases)
    ]


def outcomes(cases: list[Case], mutant: str = "") -> list[tuple[Outcome, Outcome]]:
    """Of both runs of each case."""
    ranks = run_ranks(cases[0].plan.world_size, train_twice, cases, mutant, timeout_s=110)
    found = []
    for number, _ in enumerate(cases):
        one, other = (merged([rank[number][again] for rank in ranks]) for again in range(2))
        found.append((one, other))
    return found


def values(outcome: Outcome) -> dict[str, Tensor]:
    """All that it holds, by a name."""
    found = {f"loss {k}": torch.tensor(v, dtype=torch.float64) for k, v in outcome.losses.items()}
    for step, weights in outcome.weights.items():
        found |= {f"weight {step} {name}": weight for name, weight in weights.items()}
    for step, ranks in outcome.gradients.items():
        for rank, gradients in enumerate(ranks):
            found |= {f"gradient {step} {rank} {name}": g for name, g in gradients.items()}
    for name, state in outcome.optimizer.items():
        found |= {f"{key} {name}": torch.as_tensor(value) for key, value in state.items()}
    return found


def unlike(one: Outcome, other: Outcome) -> list[str]:
    """What is not the same bit by bit."""
    ours, theirs = values(one), values(other)
    assert ours.keys() == theirs.keys()
    return [name for name, value in ours.items() if not torch.equal(value, theirs[name])]


@pytest.mark.parametrize("world_size", CASES)
def test_who_is_late_changes_nothing(world_size: int) -> None:
    cases = [small(case) for case in CASES[world_size]]
    for case, (one, other) in zip(cases, outcomes(cases), strict=True):
        assert not unlike(one, other), str(case)
        if max(case.replicas or ()) <= 2:
            assert not unlike(one, train_in_process(case)), str(case)


# ---- mutants -----------------------------------------------------------------------------------


def not_awaited(*ops: Op) -> None:
    """What these actions wait for is used as it is."""
    wait, close, left = GroupEndpoint._wait, GroupEndpoint.close, list[dist.Work]()

    def mutant(self: GroupEndpoint, work: dist.Work, action: Action, **words: Any) -> None:
        if action.op in ops:
            left.append(work)  # gloo drops a message whose handle is gone.
        else:
            wait(self, work, action, **words)

    def closing(self: GroupEndpoint) -> None:
        close(self)
        while left:
            left.pop().wait()

    GroupEndpoint._wait, GroupEndpoint.close = mutant, closing  # type: ignore[method-assign]


def one_buffer_a_channel() -> None:
    """The next message is received where the last one may still be needed."""
    buffers: dict[Any, Tensor] = {}

    def mutant(self: GroupEndpoint, receives: Iterable[Action]) -> None:
        for action in receives:
            link = self._link(action)
            assert action.interval is not None
            shape = (action.interval[1] - action.interval[0], *link.shape)
            key = (id(self), action.op, action.peer, shape)
            tensor = buffers.setdefault(key, torch.empty(shape, dtype=self.dtype))
            work = dist.irecv(tensor, src=link.other, group=link.group)
            assert work is not None
            link.posted.append((work, tensor, 0))

    GroupEndpoint._post = mutant  # type: ignore[method-assign]


def one_bucket_for_all_parts() -> None:
    """A gradient is summed where another may be under way."""
    buckets: dict[int, Tensor] = {}

    def mutant(self: GroupEndpoint, action: Action, tensors: list[Tensor]) -> None:
        size = sum(tensor.numel() for tensor in tensors)
        if size:
            whole = buckets.setdefault(id(self), torch.empty(10_000, dtype=self.dtype))
            flat = whole[:size]
            flat.copy_(torch.cat([tensor.reshape(-1) for tensor in tensors]))
            group = self.groups.replicas[action.pipeline, action.stage]
            work = dist.all_reduce(flat, group=group, async_op=True)
            assert work is not None
            reduction = Reduction(work, flat, tensors, None)
            key = action.pipeline, action.unit
            self._reductions.setdefault(key, []).append(reduction)

    GroupEndpoint.reduce = mutant  # type: ignore[assignment, method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "activations": lambda: not_awaited(Op.RECV_ACT),
    "gradients": lambda: not_awaited(Op.RECV_GRAD),
    "reductions": lambda: not_awaited(Op.STEP),
    "buffer": one_buffer_a_channel,
    "bucket": one_bucket_for_all_parts,
}


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        ("activations", CASES[2][2]),
        ("gradients", CASES[2][2]),
        ("reductions", CASES[2][0]),
        ("buffer", CASES[2][1]),
        ("bucket", CASES[2][0]),
    ],
    ids=MUTANTS,
)
def test_what_is_used_too_early_shows(mutant: str, case: Case) -> None:
    ((one, other),) = outcomes([small(case)], mutant)
    assert unlike(one, other) or unlike(one, train_in_process(small(case)))
