"""Whole training runs on tiny data, in one process or several."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtimes.execution.checkpoint import load_state
from runtimes.execution.distributed import DistributedEngine
from runtimes.execution.feed import ArrayFeed
from runtimes.execution.inprocess import InProcess
from runtimes.execution.precision import dtype_of
from runtimes.execution.team import DistributedTeam, InProcessTeam, Team
from runtimes.execution.training import DivergedError, run_training
from runtimes.job import DataSpec, Job, ModelSpec, OptimizerSpec, Task
from runtimes.manifest import read_manifest
from runtimes.model.stack import build_stack
from runtimes.plan import Plan

__all__ = [
    "MODEL",
    "TWO",
    "cut_back",
    "events",
    "feeds",
    "job_of",
    "losses",
    "state_of",
    "steps",
    "train",
    "train_in_process",
    "write_data",
]

MODEL = ModelSpec(
    "VisionTransformer",
    {
        "img_size": 8,
        "patch_size": 4,
        "in_chans": 1,
        "embed_dim": 8,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 3,
        "proj_drop_rate": 0.1,
        "drop_path_rate": 0.1,
    },
)
TWO = Plan.even(4, 2, micro_batches=2)


def job_of(plan: Plan, epochs: int, system: str = "dapple", **changes: Any) -> Job:
    settings = {"optimizer": OptimizerSpec(lr=0.05, momentum=0.9), **changes}
    return Job(
        (Task("run", system, plan),),
        MODEL,
        DataSpec("train", "validation"),
        batch_size=8,
        epochs=epochs,
        action_timeout_s=20,
        evaluation_batch_size=5,
        **settings,
    )


def write_data(folder: Path) -> Path:
    """19 training images (a last batch of 3) and 13 validation images of three classes."""
    dice = np.random.default_rng(0)
    for name, count in (("train", 19), ("validation", 13)):
        directory = folder / name
        directory.mkdir()
        np.save(directory / "images.npy", dice.integers(0, 255, (count, 1, 8, 8), dtype=np.uint8))
        np.save(directory / "labels.npy", dice.integers(0, 3, count))
        meta = {"mean": [0.5], "std": [0.25], "classes": 3}
        (directory / "meta.json").write_text(json.dumps(meta))
    return folder


def feeds(job: Job, data: Path) -> tuple[ArrayFeed, ArrayFeed]:
    """Of training and of validation."""
    dtype = dtype_of(job.precision)
    training = ArrayFeed(data / "train", batch_size=job.batch_size, epochs=4, dtype=dtype)
    return training, ArrayFeed(data / "validation", batch_size=5, shuffle=False, dtype=dtype)


class KilledError(Exception):
    """Stands for a kill."""


def _killed_at(evaluation: int) -> Callable[[str], None]:
    """The ``note`` of a run that ends when its n-th evaluation begins (0: never)."""
    left = [evaluation]

    def note(what: str) -> None:
        left[0] -= what == "evaluation"
        if what == "evaluation" and not left[0]:
            raise KilledError

    return note


def train(
    rank: int, world_size: int, run_dir: Path, data: Path, job: Job, killed_at: int = 0
) -> str:
    """One rank of a run over processes; what it says of a loss that diverged."""
    run_dir.mkdir(exist_ok=True)
    feed, validation = feeds(job, data)
    stack = build_stack(MODEL)

    def build(task: Task) -> Team:
        engine = DistributedEngine(job, task, stack, feed, rank)
        return DistributedTeam(engine, task.plan, stack, rank, "cpu")

    try:
        run_training(build, job, run_dir, feed, validation, _killed_at(killed_at))
    except DivergedError as error:
        return str(error)
    except KilledError:
        return "killed"
    return ""


def train_in_process(run_dir: Path, data: Path, job: Job, killed_at: int = 0) -> None:
    run_dir.mkdir(exist_ok=True)
    feed, validation = feeds(job, data)
    stack = build_stack(MODEL)

    def build(task: Task) -> Team:
        return InProcessTeam(InProcess(job, task, stack, feed))

    with contextlib.suppress(KilledError):
        run_training(build, job, run_dir, feed, validation, _killed_at(killed_at))


def events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if not kinds or line["event"] in kinds]


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return events(run_dir, "step", "evaluation")


def losses(run_dir: Path) -> list[float]:
    return [event["loss"] for event in events(run_dir, "step")]


def cut_back(run_dir: Path) -> None:
    """What the launcher does before it resumes a run."""
    manifest = read_manifest(run_dir)
    assert manifest is not None
    lines = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "events.jsonl").write_text("".join(lines[: manifest.events]))


def state_of(run_dir: Path) -> dict[str, Tensor]:
    """Weights, of the version before too, and optimizer state of the last checkpoint, by readable
    names."""
    found = load_state(run_dir)
    assert found is not None
    weights, optimizer, stash = (found[1][kind] for kind in ("weights", "optimizer", "stash"))
    flat = {f"{name}, {key}": values[key] for name, values in optimizer.items() for key in values}
    flat |= {f"{name}, stash": weight for name, weight in stash.items()}
    return {**weights, **{name: torch.as_tensor(value) for name, value in flat.items()}}
