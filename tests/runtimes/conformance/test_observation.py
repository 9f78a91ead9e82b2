"""What probes see is what a system declares, and they see it when a system does something else."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from runtimes.ashpipe import AshPipe
from runtimes.avgpipe import AvgPipe
from runtimes.conformance import observed, probe, reading, recorder
from runtimes.conformance.cases import CASES, EVALUATED, Case
from runtimes.conformance.observed import observe
from runtimes.conformance.properties import Properties, declared
from runtimes.dapple import Dapple
from runtimes.execution import inprocess
from runtimes.execution.averaging import Averaging
from runtimes.execution.copies import Copies
from runtimes.execution.versions import WeightVersions
from runtimes.execution.worker import Worker
from runtimes.gpipe import GPipe
from runtimes.schedule import flush
from runtimes.schedule.action import Action
from runtimes.systems import SYSTEMS

Original = Callable[..., Any]

DP = Case("dp", (3,))
DAPPLE = Case("dapple", (1, 1), 4)
ASHPIPE = Case("ashpipe", (1, 1, 1))
REPLICATED = Case("ashpipe", (2, 3))
RECOMPUTING = Case("ashpipe", (1, 1, 1), recompute=True)
TWO_BUFFERS = Case("pipedream_2bw", (1, 1), 2)
TIED = Case("avgpipe", (1, 1), 2, pipelines=2)
ONE_BY_ONE = Case("avgpipe", (1, 1), 2, pipelines=3, options={"averaging": "asynchronous"})
UNDRAINED = Case("ashpipe", (1, 1, 1), options={"drain": "run"}, epochs=2)


def differing(case: Case) -> set[str]:
    promised, seen = declared(case), observe(case)
    return {
        f.name for f in fields(Properties) if getattr(promised, f.name) != getattr(seen, f.name)
    }


def test_every_system_has_cases() -> None:
    assert {case.system for case in CASES} == set(SYSTEMS)
    titles = [(case.system, case.title) for case in CASES]
    assert len(set(titles)) == len(titles)
    # Only between evaluations further apart can a pipeline be seen not to drain.
    assert all((case.epochs > 1) == (case.build().drain == "run") for case in CASES)
    assert {case.system for case in CASES if case.epochs > 1} == {"ashpipe", "pipedream"}


def test_the_sequence_of_delays_ramps_up_after_every_drain() -> None:
    """The numbers of the paper, written out."""
    ramp = ((0,), (1,), (2,), (2,), (2,), (2,), (2,), (2,))
    seen = observe(ASHPIPE)
    assert seen.delays[0][0] == seen.delays[1][0] == ramp
    assert seen.live == seen.in_flight == (3, 2, 1)
    batch_late = observe(TWO_BUFFERS).delays
    assert batch_late == (((((0,),) + ((1,),) * 7),) * 2, (((1,),) * 8,) * 2)


def test_a_pipeline_that_stays_full_ramps_up_after_an_evaluation_alone() -> None:
    """Sixteen updates from drain to drain, with the smaller batch of an epoch in their midst."""
    ramp = ((0,), (1,), *((2,),) * 14)
    seen = observe(UNDRAINED)
    assert seen.delays[0][0] == seen.delays[1][0] == ramp
    assert [taken.once for taken in seen.taken[1][0]] == [8, 8, 8, 8, 8, 8, 8, 3] * 2
    assert (seen.live, seen.in_flight) == ((3, 2, 1), (3, 2, 1))


def test_copies_and_reference_of_parallel_pipelines() -> None:
    """Each pipeline has its own units in flight and its own half of the samples."""
    seen = observe(TIED)
    assert (seen.live, seen.in_flight) == ((3, 3), (2, 1))
    assert seen.delays == (((((0,),) * 8,) * 2),) * 2
    assert [taken.once for taken in seen.taken[1][0]] == [8, 8, 8, 8, 8, 8, 8, 3]
    # Nothing precedes the first update of the run.
    assert seen.averaged == ((((False,), *((True,),) * 7),) * 2, (((True,),) * 8,) * 2)
    assert seen.evaluated == (EVALUATED, EVALUATED)
    assert not any(moved != (False,) for moved in observe(DAPPLE).averaged[1][0])


# ---- mutants -----------------------------------------------------------------------------------


def backward_on_the_latest_weights(step: Original, self: WeightVersions, gradients: Any) -> None:
    """Round autograd's back, what a unit in flight was made with becomes the latest."""
    step(self, gradients)
    for version in self._sets.values():
        for name, parameter in version.items():
            parameter.data.copy_(self.current[name].data)


def disguised(held: Any, values: Any, compute: Callable[[], None]) -> None:
    """Compute with the parameters ``held`` while they have other values."""
    own = {name: parameter.detach().clone() for name, parameter in held.items()}
    for name, parameter in held.items():
        parameter.data.copy_(values[name])
    compute()
    for name, parameter in held.items():
        parameter.data.copy_(own[name])


def recomputed_on_the_latest_weights(recompute: Original, self: Worker, action: Action) -> None:
    latest = {name: p.detach().clone() for name, p in self.copies[0].versions.current.items()}
    disguised(self.copies[0].versions[action.version or 0], latest, lambda: recompute(self, action))


def stash_kept_over_a_drain(backward: Original, self: Worker, action: Action) -> None:
    """As in the published AshPipe: the first backwards after a drain load a version from before."""
    held = self.copies[0].versions[action.version or 0]
    if self.first_step == 0:
        self.kept = {n: p.detach().clone() for n, p in held.items()}  # type: ignore[attr-defined]
    if self.first_step == 0 or action.version or self.is_last:
        backward(self, action)
    else:
        disguised(held, self.kept, lambda: backward(self, action))  # type: ignore[attr-defined]


def one_sample_twice(flight: Original, self: Worker, action: Action) -> Any:
    """And another not at all."""
    found = flight(self, action)
    if self.program.training and len(found.samples) > 1:
        found.samples = found.samples.copy()
        found.samples[0] = found.samples[1]
    return found


def gradients_kept_after_the_step(step: Original, self: WeightVersions, gradients: Any) -> None:
    kept = {name: gradient.clone() for name, gradient in gradients.items()}
    step(self, gradients)
    for name, parameter in self.current.items():
        parameter.grad = kept[name]


def mean_over_replicas(complete: Original, self: inprocess.Mailbox, key: Any) -> None:
    shares = dict(self.open[key])
    complete(self, key)
    for share in shares.values():
        for tensor in share:
            tensor /= len(shares)


def no_partial_batch_evaluated(program: Original, plan: Any, samples: int, size: int) -> Any:
    return program(plan, samples // size * size, size)


def evaluated_on_old_weights(evaluated: Original, self: Copies, **words: Any) -> Any:
    versions = self[0].versions
    latest, versions.latest = versions.latest, min(versions._sets)
    found = evaluated(self, **words)
    versions.latest = latest
    return found


def versions_never_freed(retire: Original, self: WeightVersions, *_: Any) -> None:
    return None


def flushed_before_every_step(order: Original, self: Any, plan: Any, batches: Any, **_: Any) -> Any:
    return flush(batches, lambda stage, units: 1)


def all_forwards_first(order: Original, self: Any, plan: Any, batches: Any, **words: Any) -> Any:
    return GPipe().compute_order(plan, batches, **words)


def one_copy_is_not_averaged(tie: Original, self: Averaging, copies: Any) -> None:
    tie(self, [copy for copy in copies if copy is not self._copies[-1]])


def nothing_is_averaged(tie: Original, self: Averaging, copies: Any) -> None:
    return None


def a_copy_is_evaluated(evaluated: Original, self: Copies, **words: Any) -> Any:
    return evaluated(self, **words) if words.get("mean") else self[0].current


def the_mean_is_kept(evaluated: Original, self: Copies, **words: Any) -> Any:
    self.kept = [*getattr(self, "kept", []), found := evaluated(self, **words)]  # type: ignore[attr-defined]
    return found


def the_reference_is_evaluated_twice(evaluated: Original, self: Copies, **words: Any) -> Any:
    return evaluated(self)


def loss_of_the_whole_batch(loss: Original, self: Worker, flight: Any, logits: Any) -> Any:
    batches, index = self.program.batches, flight.step - self.first_step
    share = batches.share_of_batch(flight.pipeline, index)
    return loss(self, flight, logits) * share / batches.sizes[index]


def pipelines_train_the_same_share(flight: Original, self: Worker, action: Action) -> Any:
    """The first one's."""
    found = flight(self, action)
    if self.program.training and action.pipeline:
        low, _ = self.program.batches.samples(0, action.unit)
        batch = self.active_feed.indices(found.step)
        found.samples = batch[low : low + len(found.samples)]
    return found


def drained_after_every_epoch(drain: Original, job: Any, task: Any, epoch: int) -> int:
    return epoch + 1


def drained_at_the_end_alone(drain: Original, job: Any, task: Any, epoch: int) -> int:
    return int(job.epochs)


#: Mutant, what it changes, a case in which it must be seen, and as what.
MUTANTS: list[tuple[Original, Any, str, Case, str]] = [
    (backward_on_the_latest_weights, WeightVersions, "step", ASHPIPE, "mixed"),
    (recomputed_on_the_latest_weights, Worker, "_recompute", RECOMPUTING, "mixed"),
    (stash_kept_over_a_drain, Worker, "_backward", ASHPIPE, "mixed"),
    (one_sample_twice, Worker, "_flight", DAPPLE, "taken"),
    (gradients_kept_after_the_step, WeightVersions, "step", DAPPLE, "taken"),
    (mean_over_replicas, inprocess.Mailbox, "complete", DP, "taken"),
    (mean_over_replicas, inprocess.Mailbox, "complete", REPLICATED, "delays"),
    (no_partial_batch_evaluated, inprocess, "evaluation_program", DAPPLE, "evaluated"),
    (evaluated_on_old_weights, Copies, "evaluated", TWO_BUFFERS, "evaluated"),
    (versions_never_freed, WeightVersions, "_retire", ASHPIPE, "live"),
    (flushed_before_every_step, AshPipe, "compute_order", ASHPIPE, "delays"),
    (all_forwards_first, Dapple, "compute_order", DAPPLE, "in_flight"),
    (one_copy_is_not_averaged, Averaging, "_tie", TIED, "averaged"),
    (one_copy_is_not_averaged, Averaging, "_tie", ONE_BY_ONE, "averaged"),
    (nothing_is_averaged, Averaging, "_tie", TIED, "averaged"),
    (a_copy_is_evaluated, Copies, "evaluated", TIED, "evaluated"),
    (a_copy_is_evaluated, Copies, "evaluated", ONE_BY_ONE, "evaluated"),
    (the_reference_is_evaluated_twice, Copies, "evaluated", ONE_BY_ONE, "evaluated"),
    (the_mean_is_kept, Copies, "evaluated", TIED, "live"),
    (loss_of_the_whole_batch, Worker, "_loss", TIED, "taken"),
    (pipelines_train_the_same_share, Worker, "_flight", TIED, "taken"),
    (all_forwards_first, AvgPipe, "compute_order", TIED, "in_flight"),
    (drained_after_every_epoch, observed, "next_drain", UNDRAINED, "delays"),
    (drained_at_the_end_alone, observed, "next_drain", UNDRAINED, "evaluated"),
    (drained_at_the_end_alone, observed, "next_drain", ASHPIPE, "delays"),
]


@pytest.mark.parametrize(
    ("mutant", "owner", "name", "case", "property_"),
    MUTANTS,
    ids=[f"{mutant.__name__}-{case.system}" for mutant, *_, case, _ in MUTANTS],
)
def test_a_mutant_is_seen(
    monkeypatch: pytest.MonkeyPatch,
    mutant: Original,
    owner: Any,
    name: str,
    case: Case,
    property_: str,
) -> None:
    assert not differing(case)
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: mutant(original, *a, **k))
    assert property_ in differing(case)


def test_a_step_into_weights_in_flight_is_not_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd itself refuses it: the ledger is a tensor that the backward needs."""

    def in_place(self: WeightVersions, gradients: Any) -> None:
        with torch.no_grad():
            for parameters in self._sets.values():
                for name, parameter in parameters.items():
                    if gradients[name] is not None:
                        parameter -= gradients[name]
        self.latest += 1
        self._sets[self.latest], self._users[self.latest] = self._sets[self.latest - 1], 0

    monkeypatch.setattr(WeightVersions, "step", in_place)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        observe(ASHPIPE)


# ---- independence ------------------------------------------------------------------------------


def test_counters_of_the_runtime_are_not_what_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = observe(ASHPIPE)
    monkeypatch.setattr(WeightVersions, "most_live", property(lambda _: 99, lambda *_: None), False)
    monkeypatch.setattr(Worker, "peak_in_flight", property(lambda _: 99, lambda *_: None), False)
    assert observe(ASHPIPE) == before


def test_what_observes_knows_neither_programs_nor_promises() -> None:
    for module in (probe, recorder, reading, observed):
        assert module.__file__ is not None
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith(("runtimes.schedule", "runtimes.system"))
                assert "declared" not in {alias.name for alias in node.names}
            if isinstance(node, ast.Attribute):
                assert node.attr not in {"workers", "program", "versions", "most_live_versions"}


def test_segments_are_long_enough_to_hold_all_versions() -> None:
    """n live versions: n − 1 updates on the first, then n updates until the oldest is done with."""
    for case in CASES:
        promised = declared(case)
        for updates, versions in zip(promised.taken[0], promised.live, strict=True):
            assert len(updates) >= 2 * versions - 1
