"""What makes a system: its order, its weight versions, its declared properties.  Pure data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from runtimes.plan import Plan
from runtimes.schedule import Batches, Declared, Order, Program, flush, forward_only, lower

__all__ = ["FlushSystem", "System", "evaluation_program"]


@dataclass(frozen=True)
class System(ABC):
    """A system is a frozen dataclass: its fields are its options, the defaults those of the paper.

    All the rest (lowering, execution, validation, drawing) is shared.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]

    @abstractmethod
    def order(self, plan: Plan, batches: Batches) -> Order:
        """What each replica computes, in order, over a segment between two drains."""

    @abstractmethod
    def declared(self, plan: Plan) -> Declared:
        """Gradient delay and units in flight, which the validator holds the program to."""

    def live_versions(self, plan: Plan, stage: int) -> int:
        """Weight versions a stage may hold at once."""
        return 1

    @property
    def blocking_reduce(self) -> bool:
        """Whether replicas reduce one parameter after the other, after the backward."""
        return False

    @property
    def drain(self) -> Literal["epoch", "run"]:
        """Whether the pipeline drains after every epoch, or only where a run has to: before an
        evaluation, a checkpoint, a switch, and at the end."""
        return "epoch"

    def check(self, plan: Plan) -> None:
        """ValueError, naming value, limit and way out, if the system cannot run the plan."""
        if plan.pipelines != 1:
            raise ValueError(f"{self.name} has one pipeline, not {plan.pipelines}")

    def program(self, plan: Plan, sizes: tuple[int, ...]) -> Program:
        """The program that trains batches of these sizes, one update each."""
        self.check(plan)
        batches = Batches(sizes, plan.micro_batches, plan.pipelines)
        order = self.order(plan, batches)
        return lower(order, plan, batches, blocking_reduce=self.blocking_reduce)


@dataclass(frozen=True)
class FlushSystem(System):
    """A synchronous schedule: the pipeline drains before every step.

    All that is special about one is how many forwards precede the first backward.
    """

    @abstractmethod
    def warm_up(self, stage: int, stages: int, units: int) -> int:
        """K_s: forwards of a batch of ``units`` units before the first backward at a stage."""

    def order(self, plan: Plan, batches: Batches) -> Order:
        stages = len(plan.stages)
        return flush(batches, lambda stage, units: self.warm_up(stage, stages, units))

    def declared(self, plan: Plan) -> Declared:
        stages, units = len(plan.stages), plan.micro_batches
        return Declared(
            delay=lambda stage, update: 0,
            in_flight=lambda stage: self.warm_up(stage, stages, units),
        )


def evaluation_program(plan: Plan, samples: int, batch_size: int) -> Program:
    """Every sample forward once: units of up to ``batch_size`` samples, the last one smaller."""
    full, rest = divmod(samples, batch_size)
    batches = Batches((batch_size,) * full + ((rest,) if rest else ()))
    return lower(forward_only(batches), plan, batches, training=False)
