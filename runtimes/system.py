"""What makes a system: its order, its weight versions, its declared properties.  Pure data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from runtimes.plan import Plan
from runtimes.schedule import (
    Batches,
    Declared,
    Order,
    Program,
    flush,
    forward_only,
    lower,
    one_step_a_unit,
)

__all__ = ["Drain", "Elastic", "FlushSystem", "System", "UnflushedSystem", "evaluation_program"]

#: Where a pipeline drains: after every epoch, or only where the run asks for it (evaluation,
#: checkpoint, switch, end).
Drain = Literal["epoch", "run"]


@dataclass(frozen=True)
class Elastic:
    """How AVERAGE ties the copies of parallel pipelines to a reference.

    ``alpha`` draws both sides to each other; ``centre_first``: a copy to the new reference, not the
    old one; ``joint``: all copies at once, when all have made their step, not each when it has.
    """

    alpha: float
    centre_first: bool = True
    joint: bool = True


@dataclass(frozen=True)
class System(ABC):
    """A system is a frozen dataclass: its fields are its options, the defaults those of the paper.

    All the rest (lowering, execution, validation, drawing) is shared.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    #: Versions beside the latest that the next segment needs.
    carries: ClassVar[int] = 0
    #: Whether all stages take an update's gradients together, as clipping by global norm needs.
    global_norm: ClassVar[bool] = True
    #: Whether whole batches go round a stage's replicas, instead of being shared by them.
    rounds: ClassVar[bool] = False
    #: Whether several pipelines may share the devices.
    parallel: ClassVar[bool] = False

    @abstractmethod
    def compute_order(
        self, plan: Plan, batches: Batches, *, carried: int, norm: bool, phase: int
    ) -> Order:
        """What each replica computes, in order, over a segment between two drains.

        ``carried`` as of Program; ``norm``: with a NORM before every step; ``phase``: updates of
        the run before the segment, modulo ``period``.
        """

    @abstractmethod
    def declared(self, plan: Plan, *, carried: int = 0) -> Declared:
        """Gradient delay and units in flight, which the validator holds the program to."""

    def live_versions(self, plan: Plan, stage: int) -> int:
        """Weight versions a stage may hold at once."""
        return 1

    def retained(self, plan: Plan, stage: int) -> int:
        """Versions before the latest that a later forward may still ask for."""
        return 0

    def rate_factor(self, plan: Plan, stage: int) -> float:
        """What the learning rate is multiplied by at a stage."""
        return 1.0

    def elastic(self, plan: Plan) -> Elastic | None:
        """How the plan's pipelines are averaged; None: a rank keeps no reference beside them."""
        return None

    @property
    def period(self) -> int:
        """After how many updates what a segment does repeats, whatever drains in between."""
        return 1

    @property
    def drain(self) -> Drain:
        return "epoch"

    @property
    def blocking_reduce(self) -> bool:
        """Whether replicas reduce one parameter after the other, after the backward."""
        return False

    @property
    def rendezvous(self) -> bool:
        """Whether activations are sent and received as of Program.rendezvous."""
        return False

    def averages(self, plan: Plan, update: int) -> bool:
        """Whether the plan's pipelines are averaged after that update of the run."""
        return self.elastic(plan) is not None and (update + 1) % self.period == 0

    def warnings(self, plan: Plan) -> tuple[str, ...]:
        """What can be run, but should not be without a second look; a sentence each."""
        return ()

    def check(self, plan: Plan) -> None:
        """ValueError, naming value, limit and way out, if the system cannot run the plan."""
        if plan.pipelines != 1 and not self.parallel:
            raise ValueError(
                f"{self.name} has one pipeline, but plan.pipelines is {plan.pipelines}: set it to 1"
            )
        elastic, replicas = self.elastic(plan), max(stage.replicas for stage in plan.stages)
        if elastic is not None and not elastic.joint and replicas > 1:
            # Each copy's averaging has its place in an order, which replicas would have to share.
            raise ValueError(
                f"asynchronous averaging at a stage of {replicas} replicas, whose orders would "
                'differ: use one replica a stage, or averaging = "synchronous"'
            )

    def program(
        self,
        plan: Plan,
        sizes: tuple[int, ...],
        *,
        carried: int = 0,
        norm: bool = False,
        phase: int = 0,
    ) -> Program:
        """The program that trains batches of these sizes; ``carried``, ``norm`` and ``phase`` as
        of compute_order."""
        self.check(plan)
        if norm and not self.global_norm:
            raise ValueError(
                f"{self.name} steps its stages at different times, so there is no global norm to "
                'clip by: set optimizer.clip_by = "stage"'
            )
        batches = Batches(sizes, plan.micro_batches, plan.pipelines, self.rounds)
        elastic = self.elastic(plan)
        return lower(
            self.compute_order(plan, batches, carried=carried, norm=norm, phase=phase),
            plan,
            batches,
            blocking_reduce=self.blocking_reduce,
            rendezvous=self.rendezvous,
            carried=carried,
            joint_average=elastic is None or elastic.joint,
            phase=phase,
        )


@dataclass(frozen=True)
class FlushSystem(System):
    """A synchronous schedule: the pipeline drains before every step.

    All that is special about one is how many forwards precede the first backward.
    """

    @abstractmethod
    def warm_up(self, stage: int, stages: int, units: int) -> int:
        """K_s: forwards of a batch of ``units`` units before the first backward at a stage."""

    def compute_order(
        self, plan: Plan, batches: Batches, *, carried: int, norm: bool, phase: int
    ) -> Order:
        stages = len(plan.stages)
        return flush(
            batches,
            lambda stage, units: self.warm_up(stage, stages, units),
            norm=norm,
            averaged=lambda update: self.averages(plan, phase + update),
        )

    def declared(self, plan: Plan, *, carried: int = 0) -> Declared:
        stages, units = len(plan.stages), plan.micro_batches
        return Declared(
            delay=lambda stage, update: 0,
            in_flight=lambda stage: self.warm_up(stage, stages, units),
            averages=lambda update: self.averages(plan, update),
        )


@dataclass(frozen=True)
class UnflushedSystem(System):
    """A whole batch is a unit, and every backward is followed by an update of its stage.

    All that is special about one is its warm-up, and the version that a unit's update runs on.
    """

    global_norm = False

    @abstractmethod
    def warm_up(self, plan: Plan, stage: int) -> int:
        """w_s: forwards before the first forward-backward pair."""

    def version(self, plan: Plan, stage: int, update: int) -> int:
        """max(0, i − w_s): the latest there is when the unit's forward begins."""
        return max(0, update - self.warm_up(plan, stage))

    def compute_order(
        self, plan: Plan, batches: Batches, *, carried: int, norm: bool, phase: int
    ) -> Order:
        return one_step_a_unit(
            batches,
            [stage.replicas for stage in plan.stages],
            lambda stage: self.warm_up(plan, stage),
            lambda stage, update: self.version(plan, stage, update),
        )

    def declared(self, plan: Plan, *, carried: int = 0) -> Declared:
        return Declared(
            delay=lambda stage, update: update - self.version(plan, stage, update),
            in_flight=lambda stage: self.warm_up(plan, stage) + 1,
        )

    def live_versions(self, plan: Plan, stage: int) -> int:
        return self.warm_up(plan, stage) + 1

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if plan.micro_batches != 1:
            raise ValueError(
                f"{self.name} moves whole batches, but plan.micro_batches is {plan.micro_batches}: "
                "set it to 1"
            )


def evaluation_program(plan: Plan, samples: int, batch_size: int) -> Program:
    """Every sample forward once: units of up to ``batch_size`` samples, the last one smaller."""
    full, rest = divmod(samples, batch_size)
    batches = Batches((batch_size,) * full + ((rest,) if rest else ()))
    return lower(forward_only(batches), plan, batches, training=False)
