"""A run of a system on probes, and the properties that it is seen to have."""

from __future__ import annotations

import torch

from runtimes.conformance.cases import EPOCH, EVALUATED, EVALUATION_BATCH, SEGMENTS, Case
from runtimes.conformance.feed import MemoryFeed
from runtimes.conformance.probe import activations, probed_model
from runtimes.conformance.properties import Properties
from runtimes.conformance.reading import Reading
from runtimes.conformance.recorder import Recorder
from runtimes.execution.engine import Segment
from runtimes.execution.inprocess import InProcess
from runtimes.execution.training import next_drain
from runtimes.job import DataSpec, Job, ModelSpec, OptimizerSpec, Task
from runtimes.model.stack import LayerStack

__all__ = ["observe"]


def observe(case: Case) -> Properties:
    """Train as a run does, from drain to drain, with its evaluations; whatever the run raises.

    Between two evaluations no sample comes twice, so that it tells which batch it was in.
    """
    samples = sum(case.batches)
    plan, recorder = case.plan(case.probes + 1), Recorder(samples)
    stack = LayerStack.from_module(probed_model(case.probes, recorder))
    feed, validation = _feed(case, samples, case.batches), _feed(case, EVALUATED, (EVALUATED,))
    task = Task("conformance", case.system, plan, case.options)
    job = Job(
        tasks=(task,),
        model=ModelSpec("probes"),
        data=DataSpec("", ""),
        batch_size=EPOCH[0],
        epochs=SEGMENTS * case.epochs,
        optimizer=OptimizerSpec("sgd", lr=1.0),
        precision="float64",
        evaluate_every=case.epochs,
        checkpoint_every=case.epochs,
    )
    with recorder.watching_optimizers():
        engine, epoch = InProcess(job, task, stack, feed), 0
        while epoch < job.epochs:
            first, epoch = epoch, next_drain(job, task, epoch)
            engine.train(Segment(first * len(EPOCH), EPOCH * (epoch - first)))
            if epoch % job.evaluate_every == 0:
                engine.evaluate(validation, EVALUATED, EVALUATION_BATCH)
            recorder.phase += 1
    return Reading(recorder, plan, case.probes, feed).properties()


def _feed(case: Case, samples: int, sizes: tuple[int, ...]) -> MemoryFeed:
    labels = torch.zeros(samples, dtype=torch.int64)
    return MemoryFeed(activations(torch.arange(samples), case.probes), labels, sizes)
