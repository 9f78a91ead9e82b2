"""Whatever system without a flush, plan, batches and drains are drawn: results are those of the
reference, and no more is alive than the system's formulas say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.schedule import validate
from tests.oracles import synchronous
from tests.runtimes.transparency import (
    MODELS,
    ArrayFeed,
    Case,
    Outcome,
    engine_of,
    faults,
    stack_of,
)

VALIDATION, VALIDATED = ArrayFeed(data=1, augmented=False), 11
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "ashpipe": {"order": ["ours", "published"]},
    "pipedream": {"lr_scaling": ["none", "published"], "vertical_sync": [False, True]},
    "pipedream_2bw": {},
}


@st.composite
def cases(draw: Any) -> Case:
    """Batches may be smaller than the replicas, stages without weights, segments short."""
    name, model = draw(st.sampled_from([*OPTIONS])), draw(st.sampled_from(["widths", "in-place"]))
    layers = len(stack_of(model))
    stages, micro_batches, clip_by = draw(st.integers(1, 4)), 1, "stage"
    replicas = tuple(draw(st.integers(1, 4)) for _ in range(stages))
    options = {key: draw(st.sampled_from(values)) for key, values in OPTIONS[name].items()}
    if name == "pipedream_2bw":
        replicas = replicas[:1] * stages
        micro_batches = draw(st.integers(stages, stages + 3))
        clip_by = draw(st.sampled_from(["stage", "global"]))
    elif options.get("vertical_sync"):
        replicas = (1,) * stages
    size = draw(st.sampled_from([1, 2, 5, 8]))
    epoch = (size,) * draw(st.integers(1, 4)) + (draw(st.integers(1, size)),)
    rest, segments = epoch * 2, []
    while rest:
        length = draw(st.integers(1, len(rest)))
        segments.append(rest[:length])
        rest = rest[length:]
    return Case(
        name,
        stages,
        micro_batches,
        replicas,
        recompute=draw(st.booleans()),
        cuts=tuple(sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3)))),
        options=tuple(options.items()),
        segments=tuple(segments),
        model=model,
        optimizer=draw(st.sampled_from(["sgd", "nesterov", "adamw"])),
        clip=draw(st.sampled_from([None, 0.5])),
        clip_by=clip_by,
        epoch=epoch,
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_results_and_what_is_alive(case: Case) -> None:
    engine, outcome, first = engine_of(case), Outcome(), 0
    for segment in case.segments:
        carried = engine.workers[0].copies.carried
        program = engine.system.program(engine.plan, segment, carried=carried, norm=engine.norm)
        validate(program, engine.system.declared(engine.plan, carried=carried))
        for report in engine.train(Segment(first, segment)):
            for step, share in report.losses.items():
                outcome.losses[step] = outcome.losses.get(step, 0.0) + share
        first += len(segment)
        outcome.gradients[first - 1] = [
            worker.copies[0].updates.last_gradients for worker in engine.workers
        ]
        weights = engine.state()["weights"]
        outcome.weights[first - 1] = {name: weight.clone() for name, weight in weights.items()}
        check_evaluation(case, engine)
        check_what_is_alive(engine)
    outcome.optimizer = engine.state()["optimizer"]
    assert not faults(case, outcome)


def check_evaluation(case: Case, engine: InProcess) -> None:
    """Between two segments, on the latest weights."""
    images, labels = (array[:VALIDATED] for array in VALIDATION.arrays)
    weights = engine.state()["weights"]
    expected = synchronous.evaluate(MODELS[case.model], weights, images, labels)
    found = engine.evaluate(VALIDATION, VALIDATED, 4)
    assert (found.correct, found.loss_sum, found.samples) == pytest.approx((*expected, VALIDATED))


def check_what_is_alive(engine: InProcess) -> None:
    """At a drain, also the sets that are kept for versions to come."""
    declared = engine.system.declared(engine.plan)
    for worker in engine.workers:
        versions, limit = (
            worker.copies[0].versions,
            engine.system.live_versions(engine.plan, worker.stage_index),
        )
        assert versions.most_live <= limit
        assert len(versions._sets) + len(versions._free) <= limit
        assert worker.peak_in_flight <= declared.in_flight(worker.stage_index)
        assert not worker.copies[0].updates._made_on
        assert not worker.copies[0].updates._taken
    assert not any(engine.box.open.values())
    assert not engine.box.pending
