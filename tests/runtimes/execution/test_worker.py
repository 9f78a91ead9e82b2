"""What a worker trains, keeps and refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.job import DataSpec, Job, ModelSpec, OptimizerSpec, Task
from runtimes.model.stack import LayerStack
from runtimes.plan import Plan
from runtimes.schedule import Op, validate


class Rows:
    """Six rows of three numbers, three classes."""

    def batch_sizes(self) -> tuple[int, ...]:
        return (4, 2)

    def indices(self, step: int) -> np.ndarray[Any, Any]:
        return np.arange(4) if step == 0 else np.arange(4, 6)

    def images(self, indices: np.ndarray[Any, Any], step: int) -> Tensor:
        rows = torch.arange(18, dtype=torch.float64).reshape(6, 3).sin()
        return rows[torch.as_tensor(indices)]

    def labels(self, indices: np.ndarray[Any, Any]) -> Tensor:
        return torch.as_tensor(indices) % 3


class Shifted(nn.Module):
    """Adds a buffer; has one frozen and one trained parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.frozen(x) + self.shift


def engine_of(plan: Plan) -> InProcess:
    task = Task("run", "dapple", plan)
    job = Job(
        (task,),
        ModelSpec("Sequential"),
        DataSpec("", ""),
        batch_size=4,
        epochs=1,
        precision="float64",
        optimizer=OptimizerSpec(lr=0.1, momentum=0.9, weight_decay=0.5),
    )
    stack = LayerStack.from_module(nn.Sequential(Shifted(), nn.Linear(3, 3)))
    return InProcess(job, task, stack, Rows())


def copies(engine: InProcess) -> dict[str, Tensor]:
    return {name: w.clone() for name, w in engine.state()["weights"].items()}


def test_buffers_and_frozen_parameters_do_not_change_and_are_part_of_the_state() -> None:
    for plan in (Plan.even(2, 1), Plan.even(2, 2, (2, 1), micro_batches=2)):
        engine = engine_of(plan)
        before = copies(engine)
        engine.train(Segment(0, (4, 2)))
        after = copies(engine)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {"0.linear.weight", "0.linear.bias", "1.weight", "1.bias"}
        assert torch.equal(after["0.shift"], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


def test_a_loaded_state_is_taken_whole() -> None:
    one, other = engine_of(Plan.even(2, 1)), engine_of(Plan.even(2, 2))
    state = one.state()
    with torch.no_grad():
        for tensor in state["weights"].values():
            tensor.add_(0.25)
    other.load(state)
    for name, tensor in copies(other).items():
        assert torch.equal(tensor, state["weights"][name])


def test_training_can_follow_evaluation_and_the_other_way_round() -> None:
    engine, straight = engine_of(Plan.even(2, 2)), engine_of(Plan.even(2, 2))
    feed = Rows()
    first = engine.evaluate(feed, 6, 4)
    engine.train(Segment(0, (4,)))
    assert engine.evaluate(feed, 6, 4) != first
    engine.train(Segment(1, (2,)))
    straight.train(Segment(0, (4, 2)))
    for name, tensor in copies(straight).items():
        assert torch.equal(tensor, engine.state()["weights"][name])
    assert engine.evaluate(feed, 6, 1).samples == 6


def test_messages_of_a_unit_may_leave_in_any_order() -> None:
    plan = Plan.even(2, 2, (1, 2))
    engine, straight = engine_of(plan), engine_of(plan)
    program = engine.system.program(plan, (4, 2))
    actions = list(program.of_rank(0)[0])
    at = [i for i, action in enumerate(actions) if action.op == Op.SEND_ACT][:2]
    actions[at[0]], actions[at[1]] = actions[at[1]], actions[at[0]]
    program = program.replaced(0, actions)
    validate(program)
    engine.run(program, 0)
    straight.train(Segment(0, (4, 2)))
    for name, tensor in copies(straight).items():
        assert torch.equal(tensor, copies(engine)[name])
