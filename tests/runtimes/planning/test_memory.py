"""Bytes that a run holds, counted from its tensors, are those that the model predicts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from runtimes.execution.versions import WeightVersions
from runtimes.execution.worker import Worker
from runtimes.schedule import Action
from tests.processes import run_ranks
from tests.runtimes.planning.observed import counted, counted_on_ranks, predicted, unlike
from tests.runtimes.transparency import Case


def case(
    system: str,
    stages: int = 1,
    micro_batches: int = 1,
    replicas: tuple[int, ...] | None = None,
    *,
    batch: int = 24,
    batches: int = 7,
    **rest: Any,
) -> Case:
    """Two equal segments: what a segment leaves behind is there in the next."""
    sizes = (batch,) * batches
    settings: dict[str, Any] = {"precision": "float32", "model": "vit", **rest}
    return Case(
        system, stages, micro_batches, replicas, epoch=sizes, segments=(sizes, sizes), **settings
    )


CLIP: dict[str, Any] = {"clip": 0.5}
VERTICAL = (("vertical_sync", True),)
POLICY_B, PUBLISHED = (("policy", "B"),), (("order", "published"),)
ADVANCE, SYMMETRIC = (("advance", 1),), (("form", "symmetric"),)
ALONE = (("averaging", "asynchronous"),)
CASES = [
    case("dp", replicas=(3,), cuts=(1, 2)),
    case("gpipe", 3, 4),
    case("gpipe", 2, 4, (2, 1), recompute=True, optimizer="adamw"),
    case("dapple", 3, 6, recompute=True),
    case("dapple", 3, 2, optimizer="adamw"),
    case("dapple", 4, 8, options=POLICY_B, **CLIP),
    case("dapple", 4, 8, options=POLICY_B, recompute=True, optimizer="adamw"),
    case("pipedream", 4),
    case("pipedream", 3, replicas=(2, 2, 1), batches=13, recompute=True, optimizer="adamw"),
    case("pipedream", 2, replicas=(3, 1), batches=12),
    case("pipedream", 3, options=VERTICAL, optimizer="adamw"),
    case("pipedream", 3, options=VERTICAL, recompute=True),
    case("pipedream_2bw", 3, 4, recompute=True),
    case("pipedream_2bw", 3, 6, optimizer="adamw", **CLIP),
    case("pipedream_2bw", 4, 4, recompute=True, **CLIP),
    case("pipedream_2bw", 2, 4, (2, 2), optimizer="adamw"),
    case("ashpipe", 4, optimizer="adamw"),
    case("ashpipe", 4, recompute=True),
    case("ashpipe", 3, replicas=(1, 3, 2), recompute=True, optimizer="adamw"),
    case("ashpipe", 3, replicas=(2, 1, 1), options=PUBLISHED),
    # Other layers, units of unequal samples and of one, other precisions.
    case("gpipe", 4, 4, model="widths", batch=23),
    case("gpipe", 3, 4, model="widths", batch=4),
    case("ashpipe", 4, model="in-place", recompute=True),
    case("dapple", 2, 6, model="vit-drops", batch=15),
    case("ashpipe", 3, replicas=(1, 2, 1), model="vit-registers", precision="float64"),
    case("gpipe", 3, 4, precision="bf16"),
    # Convolutions, pooling with its indices of 8 bytes, running statistics.
    case("ashpipe", 3, replicas=(2, 1, 1), model="resnet", cuts=(1,)),
    case("dapple", 2, 4, model="resnet", recompute=True, optimizer="adamw"),
    case("gpipe", 3, 4, model="vgg"),
    case("ashpipe", 3, model="alexnet"),
    # Copies and a reference; one that is always the only copy needs none.
    case("avgpipe", 3, 4, pipelines=2, options=ADVANCE),
    case("avgpipe", 3, 4, pipelines=1, options=ADVANCE),
    case("avgpipe", 2, 3, pipelines=1, options=SYMMETRIC),
    case("avgpipe", 2, 4, (2, 1), pipelines=3, batch=48, optimizer="adamw", recompute=True),
    case("avgpipe", 2, 2, pipelines=2, batch=13, options=ALONE, **CLIP),
    case("avgpipe", 2, 2, pipelines=2, model="resnet"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_counted_and_predicted_peaks_agree(case: Case) -> None:
    assert unlike(counted(case), predicted(case, "in-process")) == []


ON_RANKS = [
    case("dp", replicas=(4,), cuts=(1, 2)),
    case("gpipe", 4, 4, batch=26),
    case("dapple", 4, 6, recompute=True, optimizer="adamw"),
    case("pipedream", 3, replicas=(1, 2, 1)),
    case("pipedream_2bw", 4, 6, recompute=True, **CLIP),
    case("ashpipe", 2, replicas=(1, 3), cuts=(3,), batch=26),
    case("ashpipe", 3, replicas=(2, 1, 1), cuts=(1,), options=PUBLISHED, recompute=True),
]


def test_so_they_do_over_processes() -> None:
    """There also receives are posted, sends under way, and buckets of gradients reduced."""
    shares = run_ranks(4, counted_on_ranks, ON_RANKS, timeout_s=100)
    for number, case in enumerate(ON_RANKS):
        found = [share[number] for share in shares]
        assert unlike(found, predicted(case, "distributed")) == [], str(case)


def test_kinds_are_told_apart_by_hand() -> None:
    """GPipe on two stages of ViT, 4 units of 6 samples: the first stage, embedding and a block."""
    width, tokens, hidden, heads = 16, 5, 32, 2
    embedding = (16 + 1) * width + width + tokens * width
    block = 4 * width + (width + 1) * 4 * width + (width + 1) * hidden + (hidden + 1) * width
    images, ends = 64, tokens * width
    # Normalised twice (with mean and deviation), queries, keys and values in one, their product
    # with its log-sums, before and after GELU, the residual between; input and output of the block.
    kept = 2 * (ends + 2 * tokens) + 3 * ends + ends + heads * tokens + 2 * tokens * hidden
    kept += ends + 2 * ends
    (first, _) = counted(case("gpipe", 2, 4))
    parameters = 4 * (embedding + block)
    assert first.kinds["weights"] == first.kinds["gradients"] == parameters
    assert first.kinds["optimizer"] == parameters
    assert first.kinds["activations"] == 4 * 24 * (images + kept)


# -- mutants -----------------------------------------------------------------------------------

Original = Callable[..., Any]


def leaks_versions(retire: Original, self: WeightVersions, oldest_kept: int) -> None:
    """No set is ever free again."""


def leaks_gradients(step: Original, self: WeightVersions, gradients: Any) -> None:
    step(self, gradients)
    for name, parameter in self.current.items():
        parameter.grad = gradients[name]


def leaks_outputs(recompute: Original, self: Worker, action: Action) -> None:
    """The recomputed output is kept beside the one that was sent."""
    recompute(self, action)
    flight = self.flights[action.pipeline, action.unit]
    if not self.is_last:
        flight.output = flight.pieces[-1][1].clone()


def keeps_graphs(backward: Original, self: Worker, action: Action) -> None:
    flight = self.flights[action.pipeline, action.unit]
    self.__dict__.setdefault("graphs", []).extend(out for _, out in flight.pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.autograd, "backward", partial(torch.autograd.backward, retain_graph=True)
        )
        backward(self, action)


def steps_out_of_place(step: Original, self: WeightVersions, gradients: Any) -> None:
    """A set more than needed, on which nothing depends."""
    self._retain += 1
    step(self, gradients)
    self._retain -= 1


MUTANTS: list[tuple[Callable[..., Any], type, str, Case, str]] = [
    (leaks_versions, WeightVersions, "_retire", case("ashpipe", 3), "weights"),
    (steps_out_of_place, WeightVersions, "step", case("gpipe", 3, 4), "weights"),
    (leaks_gradients, WeightVersions, "step", case("ashpipe", 3), "gradients"),
    (keeps_graphs, Worker, "_backward", case("pipedream", 3), "activations"),
    (leaks_outputs, Worker, "_recompute", case("ashpipe", 3, recompute=True), "messages"),
]


@pytest.mark.parametrize(
    ("mutant", "owner", "name", "case", "kind"), MUTANTS, ids=[m[0].__name__ for m in MUTANTS]
)
def test_a_leak_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[..., Any],
    owner: type,
    name: str,
    case: Case,
    kind: str,
) -> None:
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *args: mutant(original, self, *args))
    wrong = unlike(counted(case), predicted(case, "in-process"))
    assert any(f"bytes of {kind}" in line for line in wrong), wrong
    assert any("bytes of total" in line for line in wrong), wrong
