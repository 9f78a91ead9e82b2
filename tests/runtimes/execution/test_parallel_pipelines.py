"""Training runs of parallel pipelines: their records, checkpoints, starts and switches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtimes.execution.averaging import Averaging
from runtimes.execution.checkpoint import load_state
from runtimes.execution.copies import Copies
from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.execution.starting import copies_kept
from runtimes.job import Job, OptimizerSpec, SwitchSpec, Task
from runtimes.model.stack import LayerStack, build_stack
from runtimes.plan import Plan
from tests.runtimes.execution.runs import (
    MODEL,
    TWO,
    cut_back,
    events,
    feeds,
    job_of,
    train_in_process,
    write_data,
)

Original = Callable[..., Any]
SYMMETRIC = {"form": "symmetric", "alpha": 0.3}
RUNNING = ("2.running_mean", "2.running_var", "2.num_batches_tracked")
ALONE = {"averaging": "asynchronous", "alpha": 0.4, "advance": 1, "every": 2}
ADAM = OptimizerSpec("adamw", lr=0.01)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path)


def avgpipe(
    pipelines: int, epochs: int, options: Mapping[str, Any] | None = None, **changes: Any
) -> Job:
    plan = replace(TWO, pipelines=pipelines)
    job = job_of(plan, epochs, "avgpipe", precision="float64", **changes)
    return replace(job, tasks=(replace(job.tasks[0], options=dict(options or {})),))


def engine_of(job: Job, data: Path) -> InProcess:
    return InProcess(job, job.tasks[0], build_stack(MODEL), feeds(job, data)[0])


def flat(state: Mapping[str, Any], above: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{key} ")
        else:
            found[above + key] = torch.as_tensor(value).detach()
    return found


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    left, right = flat(one), flat(other)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def last(run_dir: Path) -> dict[str, Any]:
    found = load_state(run_dir)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("pipelines", "options", "changes"),
    [
        (2, {"every": 2}, {}),
        (3, SYMMETRIC, {"optimizer": ADAM}),
        (2, ALONE, {"optimizer": replace(ADAM, clip=0.5)}),
        (1, {"alpha": 0.5}, {}),
    ],
)
def test_a_killed_run_ends_as_if_undisturbed(
    tmp_path: Path, data: Path, pipelines: int, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Bit by bit: all copies, their optimizers, the reference; and its record.  An epoch has three
    updates, so that averagings of every second fall elsewhere in each."""
    job, whole, parts = avgpipe(pipelines, 3, options, **changes), tmp_path / "a", tmp_path / "b"
    train_in_process(whole, data, job)
    train_in_process(parts, data, job, killed_at=2)
    cut_back(parts)
    train_in_process(parts, data, job)
    assert events(parts) == events(whole)
    assert same(last(whole), last(parts))
    assert list(last(whole)["copies"]) == [str(pipeline) for pipeline in range(pipelines)]


def test_what_is_recorded(tmp_path: Path, data: Path) -> None:
    job = avgpipe(2, 1, ALONE)
    train_in_process(tmp_path / "run", data, job)
    first, second, third = events(tmp_path / "run", "step")
    for event in (first, second):
        assert event["loss"] == pytest.approx(sum(event["losses"]) / 2)
        assert event["losses"][0] != event["losses"][1]
    assert third["loss"] == pytest.approx((third["losses"][0] + 2 * third["losses"][1]) / 3)
    (segment,) = events(tmp_path / "run", "segment")
    assert [sorted(order) for order in segment["averaged"]] == [[0, 1], [0, 1]]
    state = last(tmp_path / "run")
    trained = state["copies"]["0"]["optimizer"]
    for copy, distance in zip(state["copies"].values(), segment["distances"], strict=True):
        away = [(copy["weights"][name] - state["weights"][name]).norm() for name in trained]
        assert distance == pytest.approx(float(torch.stack(away).norm()))
    (evaluation,) = events(tmp_path / "run", "evaluation")
    assert evaluation["mean_of_copies"].keys() == {"accuracy", "loss"}
    json.dumps(evaluation, allow_nan=False)


def test_a_pipeline_without_a_sample_has_no_loss(tmp_path: Path, data: Path) -> None:
    """19 images: the last batch has one, for two pipelines."""
    job = replace(avgpipe(2, 1), batch_size=9)
    train_in_process(tmp_path / "run", data, job)
    event = events(tmp_path / "run", "step")[-1]
    assert event["losses"] == [None, event["loss"]]


def test_one_pipeline_records_and_keeps_nothing_new(tmp_path: Path, data: Path) -> None:
    """With the default strength the reference would be the only copy: as DAPPLE, to the bit."""
    for name, job in (("a", avgpipe(1, 2)), ("d", job_of(TWO, 2, "dapple", precision="float64"))):
        train_in_process(tmp_path / name, data, job)
    assert events(tmp_path / "a") == events(tmp_path / "d")
    assert same(last(tmp_path / "a"), last(tmp_path / "d"))


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_the_reference_is_evaluated_and_the_mean_beside_it(data: Path) -> None:
    """An engine that has only their weights evaluates to the same."""
    job = avgpipe(3, 2, SYMMETRIC)
    engine, (_, validation) = engine_of(job, data), feeds(job, data)
    engine.train(Segment(0, (8, 8, 3)))
    found = engine.evaluate(validation, 13, 5)
    state = engine.state()
    copies = [copy["weights"] for copy in state["copies"].values()]
    mean = {n: sum(c[n] for c in copies) / 3 for n in state["weights"]}
    plain = engine_of(job_of(TWO, 2, precision="float64"), data)
    assert found.mean is not None
    for weights, what in ((state["weights"], found), (mean, found.mean)):
        plain.load({"weights": weights, "optimizer": {}, "stash": {}})
        alone = plain.evaluate(validation, 13, 5)
        assert what.loss_sum == pytest.approx(alone.loss_sum, rel=1e-12)
        assert what.correct == alone.correct
    assert found.loss_sum != pytest.approx(found.mean.loss_sum, rel=1e-6)


def test_running_statistics_belong_to_copies_and_the_reference_has_their_mean(data: Path) -> None:
    """A copy's are those of a run of its own share; counts of what was seen are not added up."""
    norms = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    stack = LayerStack.from_module(norms, batch_norm="per-unit")
    job, plain = avgpipe(2, 1), job_of(TWO, 1, precision="float64")
    feed, validation = feeds(job, data)
    engine = InProcess(job, job.tasks[0], stack, feed)
    # One update: the copies' forwards are all made before they are drawn together.
    engine.train(Segment(0, (8,)))
    alone = []
    for pipeline in range(2):
        one = InProcess(plain, plain.tasks[0], stack, _Half(feed, pipeline))
        one.train(Segment(0, (4,)))
        alone.append({name: one.state()["weights"][name] for name in RUNNING})
    state = engine.state()
    for copy, expected in zip(state["copies"].values(), alone, strict=True):
        assert all(torch.equal(copy["weights"][name], expected[name]) for name in RUNNING)
    assert not torch.equal(alone[0]["2.running_mean"], alone[1]["2.running_mean"])
    for name in ("2.running_mean", "2.running_var"):
        mean = (alone[0][name] + alone[1][name]) / 2
        torch.testing.assert_close(state["weights"][name], mean, rtol=0, atol=1e-14)
    assert int(state["weights"]["2.num_batches_tracked"]) == 2
    found = engine.evaluate(validation, 13, 5)
    other = InProcess(plain, plain.tasks[0], stack, feed)
    other.load({kind: values for kind, values in state.items() if kind != "copies"})
    assert found.loss_sum == pytest.approx(other.evaluate(validation, 13, 5).loss_sum, rel=1e-12)


# -- starting from another run ------------------------------------------------------------


def test_another_number_of_copies_or_another_system_is_refused(tmp_path: Path, data: Path) -> None:
    origin = tmp_path / "origin"
    train_in_process(origin, data, avgpipe(2, 1))
    refused = {
        "avgpipe has 3": avgpipe(3, 2, start_from=str(origin)),
        "avgpipe has none": avgpipe(1, 2, start_from=str(origin)),
        "dapple has none": job_of(TWO, 2, precision="float64", start_from=str(origin)),
    }
    for number, (said, job) in enumerate(refused.items()):
        with pytest.raises(ValueError, match=f"copies of 2 pipelines, but {said}: .*reference"):
            train_in_process(tmp_path / f"run{number}", data, job)
        asked = replace(job, start_from_reference=True)
        train_in_process(tmp_path / f"asked{number}", data, asked)
        assert len(last(tmp_path / f"asked{number}").get("copies", {})) == copies_kept(job.tasks[0])


def test_a_reference_that_is_not_there_cannot_be_started_from(tmp_path: Path, data: Path) -> None:
    train_in_process(tmp_path / "origin", data, job_of(TWO, 1, precision="float64"))
    job = avgpipe(2, 2, start_from=str(tmp_path / "origin"), start_from_reference=True)
    with pytest.raises(ValueError, match="no reference beside its weights"):
        train_in_process(tmp_path / "run", data, job)


def test_as_many_copies_go_on_as_they_were(tmp_path: Path, data: Path) -> None:
    train_in_process(tmp_path / "whole", data, avgpipe(2, 3))
    train_in_process(tmp_path / "first", data, avgpipe(2, 1))
    # The end of the first run is the same drain, and its rate does not depend on its length.
    job = avgpipe(2, 3, start_from=str(tmp_path / "first"))
    train_in_process(tmp_path / "then", data, job)
    assert same(last(tmp_path / "whole"), last(tmp_path / "then"))


def test_from_the_reference_all_copies_and_their_optimizers_begin_alike(data: Path) -> None:
    job = avgpipe(2, 2)
    engine = engine_of(job, data)
    engine.train(Segment(0, (8, 8)))
    state = engine.state()
    other = engine_of(avgpipe(3, 2), data)
    other.load({kind: values for kind, values in state.items() if kind != "copies"})
    for copy in other.state()["copies"].values():
        assert same(copy["weights"], state["weights"])
        assert not any(copy["optimizer"].values())
    with pytest.raises(ValueError, match="2 copies, but there are 3"):
        other.load(state)


@pytest.mark.parametrize("first", ["avgpipe", "dapple"])
def test_a_switch_takes_the_reference_or_gives_its_weights_to_all(
    tmp_path: Path, data: Path, first: str
) -> None:
    """And is resumed as if undisturbed."""
    job, then = avgpipe(2, 3, SYMMETRIC), Task("then", "dapple", TWO)
    if first == "dapple":
        job, then = job_of(TWO, 3, precision="float64"), job.tasks[0]
    job = replace(job, switch=SwitchSpec(then, 1))
    train_in_process(tmp_path / "whole", data, job)
    train_in_process(tmp_path / "parts", data, job, killed_at=3)
    cut_back(tmp_path / "parts")
    train_in_process(tmp_path / "parts", data, job)
    assert events(tmp_path / "parts") == events(tmp_path / "whole")
    assert same(last(tmp_path / "parts"), last(tmp_path / "whole"))
    told = [("losses" in event) for event in events(tmp_path / "whole", "step")]
    assert told == [first == "avgpipe"] * 3 + [first == "dapple"] * 6
    assert "copies" in last(tmp_path / "whole") or first == "avgpipe"


# -- replicas, statistics, mutants --------------------------------------------------------


def test_replicas_of_a_stage_hold_the_same_copies_and_reference(data: Path) -> None:
    plan = Plan.even(4, 2, (2, 1), micro_batches=2, pipelines=2, recompute=True, cuts=(1,))
    job = avgpipe(2, 1, {"every": 2}, optimizer=replace(ADAM, clip=0.5))
    job = replace(job, tasks=(replace(job.tasks[0], plan=plan),))
    single = replace(job, tasks=(replace(job.tasks[0], plan=replace(TWO, pipelines=2)),))
    engine, alone = engine_of(job, data), engine_of(single, data)
    for each in (engine, alone):
        each.train(Segment(0, (8, 8, 3)))
    first, second, _ = (worker.copies for worker in engine.workers)
    for pipeline in range(2):
        assert same(first[pipeline].tensors(), second[pipeline].tensors())
    assert first.averaging is not None
    assert second.averaging is not None
    assert same(first.averaging.reference, second.averaging.reference)
    left, right = flat(engine.state()), flat(alone.state())
    assert distance(left, right) < 1e-10


def old_for_new(tie: Original, self: Averaging, copies: Any) -> None:
    elastic = self.elastic
    self.elastic = replace(elastic, centre_first=not elastic.centre_first)
    tie(self, copies)
    self.elastic = elastic


def old_for_the_reference(tie: Original, self: Averaging, copies: Any) -> None:
    """The reference is drawn to what the copies have become."""
    before = {name: tensor.clone() for name, tensor in self.reference.items()}
    tie(self, copies)
    for name, tensor in self.reference.items():
        moved = sum((copy.current[name].detach() - before[name]) for copy in copies)
        tensor.copy_(before[name] + self.elastic.alpha * moved)


def momentum_averaged(tie: Original, self: Averaging, copies: Any) -> None:
    tie(self, copies)
    for name in self.reference:
        momenta = [copy.optimizer_state()[name]["momentum_buffer"] for copy in self._copies]
        mean = torch.stack(momenta).mean(0)
        for momentum in momenta:
            momentum.copy_(mean)


def one_is_lost(average: Original, self: Averaging, pipeline: int, update: int) -> None:
    """The second pipeline's of the first update."""
    if (pipeline, update) == (1, 0):
        self.order.append(pipeline)
    else:
        average(self, pipeline, update)


def a_copy_is_evaluated(evaluated: Original, self: Copies, *, mean: bool = False) -> Any:
    return evaluated(self, mean=True) if mean else self[0].current


#: Mutant, what it changes, and whether averaging is asynchronous where it must be noticed.
MUTANTS: list[tuple[Original, Any, str, bool]] = [
    (old_for_new, Averaging, "_tie", False),
    (old_for_new, Averaging, "_tie", True),
    (old_for_the_reference, Averaging, "_tie", False),
    (old_for_the_reference, Averaging, "_tie", True),
    (momentum_averaged, Averaging, "_tie", False),
    (one_is_lost, Averaging, "average", True),
    (a_copy_is_evaluated, Copies, "evaluated", False),
]


def by_hand(job: Job, data: Path, order: list[int] | None) -> tuple[dict[str, Tensor], float]:
    """Two updates of plain engines of one copy, tied by the equations; the weights of reference and
    copies, and the reference's validation loss.  ``order``: of the asynchronous averagings."""
    elastic_alpha = job.tasks[0].options["alpha"]
    plain = job_of(TWO, job.epochs, precision="float64", optimizer=job.optimizer)
    shares = [replace(plain, batch_size=4) for _ in range(2)]
    engines = [engine_of(each, data) for each in shares]
    feed, validation = feeds(job, data)
    for pipeline, engine in enumerate(engines):
        for worker in engine.workers:
            worker.feed = _Half(feed, pipeline)
    c = {n: w.clone() for n, w in engines[0].state()["weights"].items()}
    turns = [[0, 1], [0, 1]] if order is None else [[p] for p in order]
    made = [0, 0]
    for turn in turns:
        for pipeline in turn:
            engines[pipeline].train(Segment(made[pipeline], (4,)))
            made[pipeline] += 1
        x = [engines[p].state()["weights"] for p in turn]
        new = {n: c[n] + elastic_alpha * sum(w[n] - c[n] for w in x) for n in c}
        with torch.no_grad():
            for weights in x:
                for name, weight in weights.items():
                    weight.copy_(weight - elastic_alpha * (weight - new[name]))
        c = new
    last_one = engine_of(plain, data)
    last_one.load({"weights": c, "optimizer": {}, "stash": {}})
    found = {"c": c} | {f"x{p}": e.state()["weights"] for p, e in enumerate(engines)}
    return flat(found), last_one.evaluate(validation, 13, 5).loss_sum


class _Half:
    """One pipeline's share of each batch of 8."""

    def __init__(self, feed: Any, pipeline: int):
        self._feed, self._part = feed, slice(4 * pipeline, 4 * pipeline + 4)
        self.images, self.labels = feed.images, feed.labels

    def batch_sizes(self) -> tuple[int, ...]:
        return (4, 4)

    def indices(self, step: int) -> Any:
        return self._feed.indices(step)[self._part]


def trained(job: Job, data: Path) -> tuple[InProcess, float]:
    engine, (_, validation) = engine_of(job, data), feeds(job, data)
    engine.train(Segment(0, (8, 8)))
    return engine, engine.evaluate(validation, 13, 5).loss_sum


def agrees(job: Job, data: Path) -> bool:
    engine, loss = trained(job, data)
    tied = engine.workers[0].copies.averaging
    assert tied is not None
    weights, expected = by_hand(job, data, None if tied.elastic.joint else tied.order)
    state = engine.state()
    found = {"c": state["weights"]}
    found |= {f"x{p}": copy["weights"] for p, copy in state["copies"].items()}
    return distance(flat(found), weights) < 1e-10 and loss == pytest.approx(expected, rel=1e-10)


def of(asynchronous: bool) -> Job:
    return avgpipe(
        2, 1, {"alpha": 0.4, "averaging": "asynchronous" if asynchronous else "synchronous"}
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tied_as_the_equations_say(data: Path, asynchronous: bool) -> None:
    assert agrees(of(asynchronous), data)


@pytest.mark.parametrize(
    ("mutant", "owner", "name", "asynchronous"),
    MUTANTS,
    ids=[f"{entry[0].__name__}-{'async' if entry[3] else 'sync'}" for entry in MUTANTS],
)
def test_a_mutant_is_caught(
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Original,
    owner: Any,
    name: str,
    asynchronous: bool,
) -> None:
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **rest: mutant(original, *args, **rest))
    assert not agrees(of(asynchronous), data)
