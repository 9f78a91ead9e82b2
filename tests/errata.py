"""What the published code's faults do, in figures: the tables of docs/errata.md.

    python -m tests.errata

Everything is computed by the variants of tests/oracles/published_faults.py on a ViT of two blocks,
in float64, from fixed seeds: what is measured is a re-creation, not the published code itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from tests.oracles.asynchronous import ashpipe
from tests.oracles.cases import RECIPES, VIT, batches, weights_of
from tests.oracles.published_faults import (
    adam_does_not_train,
    batch_norm_updated_twice,
    drop_last_validation,
    masks_drawn_anew,
    stash_kept_over_drain,
)
from tests.oracles.stages import Stages
from tests.oracles.synchronous import Batch, History, Recipe, evaluate, vision_transformer

__all__ = ["tables"]

#: Embedding, two blocks, head: a stage each.
RANGES = ((0, 1), (1, 2), (2, 3), (3, 4))
SGD, ADAM = RECIPES["momentum"], RECIPES["adamw"]
#: Units before the drain and after it, and the samples of one.
BEFORE, AFTER, SAMPLES = 8, 4, 8

Weights = Mapping[str, Tensor]


def model(rate: float = 0.0) -> nn.Module:
    """With one rate for all its dropouts."""
    rates = {name: rate for name in VIT if name.endswith("_rate")}
    return vision_transformer(**{**VIT, **rates, "drop_path_rate": 0.0})


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def share(value: float) -> str:
    """A relative size; what is rounding alone is none."""
    return "0" if value < 1e-12 else f"{value:.2g}"


def distance(ours: Weights, theirs: Weights) -> float:
    """‖ours − theirs‖ / ‖theirs‖, all tensors taken together."""
    differences = [float((ours[name] - theirs[name]).norm()) ** 2 for name in theirs]
    return (sum(differences) / sum(float(t.norm()) ** 2 for t in theirs.values())) ** 0.5


def by_stage(stages: Stages, ours: Weights, theirs: Weights) -> list[float]:
    return [
        distance({n: ours[n] for n in names}, {n: theirs[n] for n in names})
        for names in stages.names
    ]


def gradient_errors(
    build: Callable[[], nn.Module],
    history: History,
    data: Sequence[Sequence[Batch]],
    recipe: Recipe,
) -> list[list[float]]:
    """Unit by unit and stage by stage, what the applied gradient differs from the one that autograd
    gives at the same versions of the weights: those of the run itself, faults and all."""
    stages, errors = Stages(build, RANGES, recipe, torch.float64), []
    held = [stages.split(weights_of(build))]
    held += [stages.split(update.weights) for update in history.updates]
    for first, segment in zip((0, len(data[0])), data, strict=True):
        for k, batch in enumerate(segment):
            update = history.updates[first + k]
            used = [held[first + version][s] for s, version in enumerate(update.versions)]
            _, right = stages.gradients(used, batch, first + k)
            flat = {name: g for gradients in right for name, g in gradients.items()}
            errors.append(by_stage(stages, update.gradients, flat))
    return errors


def two_segments() -> list[list[Batch]]:
    data = batches([SAMPLES] * (BEFORE + AFTER))
    return [data[:BEFORE], data[BEFORE:]]


def stash() -> str:
    data, rows = two_segments(), []
    arguments: Any = (model, weights_of(model), SGD, RANGES, data, [0.05] * (BEFORE + AFTER))
    right = ashpipe(*arguments)
    for recompute in (False, True):
        wrong = stash_kept_over_drain(*arguments, recompute=recompute)
        errors = gradient_errors(model, wrong, data, SGD)
        before = max(map(max, errors[:BEFORE]))
        apart = by_stage(
            Stages(model, RANGES, SGD, torch.float64),
            wrong.updates[-1].weights,
            right.updates[-1].weights,
        )
        for s in range(len(RANGES)):
            rows.append(
                [
                    "yes" if recompute else "no",
                    str(s),
                    share(before),
                    *(share(errors[BEFORE + k][s]) for k in range(AFTER)),
                    share(apart[s]),
                ]
            )
    units = [f"unit {k}" for k in range(AFTER)]
    return table(["recomputation", "stage", "before the drain", *units, "weights"], rows)


def adam() -> str:
    start, data = weights_of(model), two_segments()
    arguments: Any = (model, start, ADAM, RANGES, data, [0.01] * (BEFORE + AFTER))
    stages = Stages(model, RANGES, ADAM, torch.float64)
    moved = [
        by_stage(stages, history.updates[-1].weights, start)
        for history in (adam_does_not_train(*arguments), ashpipe(*arguments))
    ]
    rows = [
        [str(s), str(len(RANGES) - s), share(published), share(ours)]
        for s, (published, ours) in enumerate(zip(*moved, strict=True))
    ]
    return table(["stage", "versions", "moved, as published", "moved, as declared"], rows)


def masks() -> str:
    rows = []
    for rate in (0.0, 0.1, 0.2):
        build = partial(model, rate)
        data = two_segments()
        arguments: Any = (build, weights_of(build), SGD, RANGES, data, [0.05] * (BEFORE + AFTER))
        errors = gradient_errors(build, masks_drawn_anew(*arguments), data, SGD)
        means = [sum(unit[s] for unit in errors) / len(errors) for s in range(len(RANGES))]
        rows.append([f"{rate:g}", *map(share, means)])
    return table(["dropout", *(f"stage {s}" for s in range(len(RANGES)))], rows)


def norms() -> str:
    generator = torch.Generator().manual_seed(0)
    data = [3 + 2 * torch.randn(32, 4, generator=generator, dtype=torch.float64) for _ in range(20)]
    rows = []
    for momentum in (0.1, 0.01):
        layers = [
            [
                batch_norm_updated_twice(data[:n], momentum, recompute=twice)
                for twice in (True, False)
            ]
            for n in (1, len(data))
        ]
        # From 0, one update leads to momentum · mean.
        means = [float(layer.running_mean[0] / data[0].mean(0)[0]) for layer in layers[0]]
        (twice, once), counted = layers[1], [int(x.num_batches_tracked) for x in layers[1]]
        rows.append(
            [
                f"{momentum:g}",
                f"{means[0]:.4g}",
                share(distance({"": twice.running_mean}, {"": once.running_mean})),
                share(distance({"": twice.running_var}, {"": once.running_var})),
                f"{counted[0]} for {counted[1]}",
            ]
        )
    headers = ["momentum", "in effect", "running mean", "running variance", "batches counted"]
    return table(headers, rows)


def validation() -> str:
    start = weights_of(model)
    (data,) = batches([23])
    rows = []
    for size in (23, 8, 20, 24):
        hits, loss, seen = drop_last_validation(model, start, data.images, data.labels, size)
        told = [f"{hits / seen:.4f}", f"{loss / seen:.4f}"] if seen else ["none", "none"]
        rows.append([str(size), f"{seen} of 23", *told])
    hits, loss = evaluate(model, start, data.images, data.labels)
    rows.append(["as declared", "23 of 23", f"{hits / 23:.4f}", f"{loss / 23:.4f}"])
    return table(["batch size", "seen", "accuracy", "loss"], rows)


def unseen() -> str:
    rows = [
        [title, *(str(count % size) for size in (64, 256, 1024))]
        for title, count in (("CIFAR-100, 10,000", 10_000), ("ImageNet, 50,000", 50_000))
    ]
    return table(["validation images", "batches of 64", "256", "1024"], rows)


def tables() -> dict[str, str]:
    """By their titles, as the page has them."""
    return {
        "Stash kept over a drain": stash(),
        "Adam": adam(),
        "Masks drawn anew": masks(),
        "BatchNorm": norms(),
        "Validation": validation(),
        "Images never validated on": unseen(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for title, text in tables().items():
        print(f"{title}\n\n{text}\n")
