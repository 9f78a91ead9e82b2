"""The copies of one stage on one rank, one a pipeline, and the reference that may tie them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from runtimes.execution.averaging import Averaging, mean_of
from runtimes.execution.optimizer import build_optimizer
from runtimes.execution.transport import Endpoint
from runtimes.execution.updates import StageUpdates
from runtimes.execution.versions import WeightVersions
from runtimes.job import Job
from runtimes.model.stage import Stage
from runtimes.plan import Plan
from runtimes.schedule.program import Program
from runtimes.system import System

__all__ = ["Copies", "Copy", "Weights"]


@dataclass(frozen=True)
class Weights:
    """What a forward computes with.  ``constants``: buffers and frozen parameters, which are the
    same whatever the version; of the buffers forwards in training mode change some."""

    parameters: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]

    def same(self, other: Weights) -> bool:
        """Whether both are the very same tensors."""
        return self.parameters is other.parameters and self.constants is other.constants


@dataclass(frozen=True)
class Copy:
    """One pipeline's own: its weights with their optimizer, its gradients, its running statistics.

    ``running``: those of ``constants`` that forwards change; the others are shared by all copies.
    """

    versions: WeightVersions
    updates: StageUpdates
    constants: dict[str, Tensor]
    running: dict[str, Tensor]

    @property
    def current(self) -> Weights:
        return Weights(self.versions.current, self.constants)

    def tensors(self) -> dict[str, Tensor]:
        """The latest weights and all constants, by name; references."""
        return {n: p.detach() for n, p in self.versions.current.items()} | self.constants

    def load(
        self,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Mapping[str, Any]],
        stash: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.versions.load(weights, optimizer, stash)
        for name, constant in self.constants.items():
            constant.copy_(weights[name])


class Copies:
    """A stage's copies by pipeline, all of the same initial ``weights``.

    ``averaging`` is None where the system keeps no reference beside them: then there is one copy.
    ``parts``: of ``module``, in the order of the forward.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        rank: int,
        system: System,
        endpoint: Endpoint,
        module: Stage,
        parts: Sequence[Stage],
        weights: Mapping[str, Tensor],
        steps_per_epoch: int,
        *,
        keep_gradients: bool = False,
    ):
        stage, self._replica = plan.place(rank)
        trained = {
            module.names[local]
            for local, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        layers = [[n for n in part.names.values() if n in trained] for part in parts[::-1]]

        def optimizer(parameters: list[Parameter]) -> torch.optim.Optimizer:
            made = build_optimizer(parameters, job.optimizer)
            module.charge(made, system.live_versions(plan, stage))
            return made

        def copy(pipeline: int) -> Copy:
            own = {
                name: tensor.clone() if pipeline else tensor
                for name, tensor in weights.items()
                if name in trained or name in module.running
            }
            constants = {n: own.get(n, w) for n, w in weights.items() if n not in trained}
            versions = WeightVersions(
                {name: tensor for name, tensor in own.items() if name in trained},
                optimizer,
                retain=system.retained(plan, stage),
            )
            updates = StageUpdates(
                job,
                plan,
                rank,
                system,
                endpoint,
                versions,
                layers,
                steps_per_epoch,
                keep_gradients=keep_gradients,
            )
            running = {name: constants[name] for name in module.running}
            return Copy(versions, updates, constants, running)

        self._copies = [copy(pipeline) for pipeline in range(plan.pipelines)]
        self._carries = system.carries
        elastic = system.elastic(plan)
        self.averaging: Averaging | None = None
        if elastic is not None:
            versions = [copy.versions for copy in self._copies]
            self.averaging = Averaging(elastic, versions, module.tying)
        elif plan.pipelines > 1:
            raise ValueError(
                f"{system.name} says nothing of how {plan.pipelines} pipelines are tied together"
            )

    def __getitem__(self, pipeline: int) -> Copy:
        return self._copies[pipeline]

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[Copy]:
        return iter(self._copies)

    def tensors(self) -> Iterator[Tensor]:
        """Weights of all versions of all copies, the reference's, and all constants."""
        for copy in self._copies:
            yield from (*copy.versions.parameters(), *copy.constants.values())
        if self.averaging is not None:
            yield from self.averaging.reference.values()

    def start(self, program: Program, first_step: int) -> None:
        """Training begins at a drain; update 0 of the program is ``first_step``."""
        for copy in self._copies:
            copy.updates.start(program, first_step)
            copy.versions.drained(program.carried)
        if self.averaging is not None:
            self.averaging.start()

    @property
    def most_live(self) -> int:
        """Most weight versions that a copy has held at once."""
        return max(copy.versions.most_live for copy in self._copies)

    @property
    def carried(self) -> int:
        """Versions before the latest that the next segment begins with; the same on all ranks."""
        return min(self._carries, self._copies[0].versions.latest)

    def evaluated(self, *, mean: bool = False) -> Weights:
        """What stands for the model: the reference, if there is one, or the ``mean`` of the copies.
        Running statistics are the mean of theirs; counts, the largest."""
        if self.averaging is None:
            return self._copies[0].current
        parameters = (
            mean_of([copy.versions.current for copy in self._copies])
            if mean
            else self.averaging.reference
        )
        running = mean_of([copy.running for copy in self._copies])
        return Weights(parameters, self._copies[0].constants | running)

    def state(self) -> dict[str, Any]:
        """As of :class:`Engine`: replica 0 speaks for all."""
        if self._replica:
            return {"weights": {}, "optimizer": {}, "stash": {}}
        if self.averaging is None:
            (copy,) = self._copies
            return {
                "weights": copy.tensors(),
                "optimizer": copy.versions.optimizer_state(),
                "stash": copy.versions.stash() if self.carried else {},
            }
        model = self.evaluated()
        return {
            "weights": {**model.parameters, **model.constants},
            "optimizer": {},
            "stash": {},
            "copies": {
                str(pipeline): {
                    "weights": copy.tensors(),
                    "optimizer": copy.versions.optimizer_state(),
                }
                for pipeline, copy in enumerate(self._copies)
            },
        }

    def load(self, state: Mapping[str, Any], *, carried: bool) -> None:
        """Take what this stage needs of a merged state, whatever plan wrote it.  ``carried``: the
        whole state has a stash, of which a stage without weights holds nothing.

        Without copies in it every copy and the reference are given its weights, and every copy its
        optimizer state.  Raises ValueError for another number of copies.
        """
        states = state.get("copies") or {}
        kept = len(self._copies) if self.averaging is not None else 0
        if states and len(states) != kept:
            raise ValueError(f"a state of {len(states)} copies, but there are {kept} to load")
        stash = state["stash"] if carried and self._carries else None
        for pipeline, copy in enumerate(self._copies):
            mine = states.get(str(pipeline), state)
            copy.load(mine["weights"], mine["optimizer"], stash)
        if self.averaging is not None:
            self.averaging.load(state["weights"])
