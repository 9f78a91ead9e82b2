"""Values that come from a finished sweep: the point with the best held-out accuracy."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.config import Config
from experiments.errors import UserError
from experiments.identity import run_id
from experiments.loading import load, load_runs, with_point
from experiments.overrides import parse_setting
from experiments.store import Store
from experiments.summary import last_status
from experiments.sweep import Axes, Point, points

__all__ = ["load_resolved", "resolved"]


def load_resolved(name_or_path: str, settings: Sequence[str], store: Store) -> list[Config]:
    """As :func:`load_runs`, with the values of ``best_of`` put in."""
    runs = load_runs(name_or_path, settings)
    return [resolved(config, settings, store) for config in runs]


def resolved(config: Config, settings: Sequence[str], store: Store) -> Config:
    """The config with the values of the sweep that it waits for, if it does, put in.

    ``settings``, which were applied to the config, hold for the sweep too, but for its seeds.
    Raises UserError if the sweep is not finished, or has no best.
    """
    sweep = config.waits_for
    if sweep is None:
        return config
    point = _best(sweep, [text for text in settings if not _of_seeds(text)], store)
    return with_point(config, point, {"best_of": {"sweep": sweep, "chosen": point}})


def _of_seeds(setting: str) -> bool:
    return parse_setting(setting)[0] in (("train", "seed"), ("train", "seeds"))


def _best(sweep: str, settings: Sequence[str], store: Store) -> Point:
    config = load(sweep, settings)
    if config.sweep is None:
        raise UserError(f"best_of.sweep is {sweep!r}, but that config has no [sweep]")
    if config.data.sizes.held_out is None:
        raise UserError(
            f"best_of.sweep is {sweep!r}, which validates on the test images, and a choice must "
            "not have seen them: set data.sizes.held_out there"
        )
    runs = load_runs(sweep, settings)
    scores = [_Score.of(run, store) for run in runs]
    if left := sum(not score.done for score in scores):
        words = shlex.join(["pipebench", "run", sweep, *_as_options(settings)])
        raise UserError(
            f"the sweep {sweep} is not finished: {left} of its {len(runs)} runs are not done; run "
            f"{words}"
        )
    candidates = []
    for point in points(config.sweep):
        found = [score for run, score in zip(runs, scores, strict=True) if run.swept == point]
        accuracies = [score.accuracy for score in found if score.accuracy is not None]
        # What diverged with one of its seeds is no choice.
        if len(accuracies) == len(found):
            mean = sum(accuracies) / len(accuracies)
            candidates.append((-mean, _place(config.sweep, point), point))
    if not candidates:
        raise UserError(
            f"every point of the sweep {sweep} diverged: give it other values of "
            f"{', '.join(config.sweep)}"
        )
    return min(candidates, key=lambda candidate: candidate[:2])[2]


def _as_options(settings: Sequence[str]) -> list[str]:
    return [word for text in settings for word in ("--set", text)]


@dataclass(frozen=True)
class _Score:
    """``accuracy`` of the last evaluation; None if the run diverged, or is not ``done``."""

    done: bool
    accuracy: float | None = None

    @classmethod
    def of(cls, config: Config, store: Store) -> _Score:
        events = store.run(run_id(config)).events()
        status = last_status(events)
        if status == "ok":
            evaluations = [event for event in events if event["event"] == "evaluation"]
            return cls(True, evaluations[-1]["accuracy"])
        return cls(status == "diverged")


def _place(axes: Axes, point: Point) -> tuple[int, ...]:
    """Where a point stands among its equals: at the smaller value; at the earlier one of words."""
    places = []
    for key, values in axes.items():
        numbers = all(isinstance(value, int | float) for value in values)
        ordered: Sequence[Any] = sorted(values) if numbers else values
        places.append(ordered.index(point[key]))
    return tuple(places)
