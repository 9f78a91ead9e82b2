"""What stands in for hardware in a config: read, checked against the run, and told from another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.clusters import load_cluster
from experiments.config import Config, Launch
from experiments.errors import UserError, one_line
from experiments.profiles import check_profile, content_hash, load_profile
from runtimes.emulation.limits import check_cluster
from runtimes.job import Emulation, OptimizerSpec, Task
from runtimes.plan import split
from runtimes.planning.profile import Profile
from runtimes.simulation.cluster import Cluster
from runtimes.systems import schedule_of

if TYPE_CHECKING:
    from runtimes.model.stack import LayerStack

__all__ = [
    "PIXEL",
    "check_emulation",
    "cluster_of",
    "emulated_stack",
    "emulation_of",
    "profile_of",
    "with_hashes",
]

#: (C, H, W) of the images that ranks read for layers that do not look at them.
PIXEL = (1, 1, 1)
TRUNCATION = 1000


def _contents(config: Config) -> dict[str, dict[str, Any]]:
    """The launch's profile and cluster, as read from a file: with texts for keys."""
    launch, found = config.launch, {}
    if launch.profile is not None:
        found["profile"] = load_profile(launch.profile).to_json()
    if launch.cluster is not None:
        found["cluster"] = cluster_of(launch).to_json()
    return {key: json.loads(json.dumps(document)) for key, document in found.items()}


def cluster_of(launch: Launch) -> Cluster:
    """The one that a launch names, with the share of its bandwidth that links reach."""
    assert launch.cluster is not None
    return load_cluster(launch.cluster).with_bandwidth(launch.bandwidth_share or 1.0)


def with_hashes(config: Config, file: str) -> Config:
    """The config with the hashes of what stands in for hardware, and with the default truncation.

    Hashes that are there stay: a record is of the contents that it was made with.
    """
    launch = config.launch
    changes: dict[str, Any] = {}
    if launch.device == "emulated" and launch.truncation is None:
        changes["truncation"] = TRUNCATION
    known = {"profile": launch.profile_hash, "cluster": launch.cluster_hash}
    if any(getattr(launch, key) is not None and known[key] is None for key in known):
        try:
            found = _contents(config)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        changes |= {f"{key}_hash": content_hash(value) for key, value in found.items()}
    if not changes:
        return config
    return config.model_copy(update={"launch": launch.model_copy(update=changes)})


def emulation_of(config: Config) -> Emulation | None:
    """What ranks need to know; None for a run on what is there.  UserError if a file has changed
    since the run was recorded."""
    launch = config.launch
    if not launch.emulated:
        return None
    found = _contents(config)
    for key, document in found.items():
        if content_hash(document) != getattr(launch, f"{key}_hash"):
            raise UserError(
                f"{config.name}: launch.{key} {getattr(launch, key)} is not what it was when this "
                f"run was recorded: leave launch.{key}_hash out for a run of its own"
            )
    return Emulation(found.get("profile"), found.get("cluster"), launch.truncation or 1)


def profile_of(config: Config, image: tuple[int, int, int]) -> Profile:
    """The profile of an emulated config; UserError if it is one of something else."""
    assert config.launch.profile is not None
    profile = load_profile(config.launch.profile)
    check_profile(profile, config, image, f"launch.profile {config.launch.profile}")
    return profile


def check_emulation(config: Config, tasks: Sequence[Task], optimizer: OptimizerSpec) -> None:
    """UserError if profile or cluster do not reach as far as the tasks."""
    launch = config.launch
    try:
        if launch.cluster is not None:
            check_cluster(cluster_of(launch), tasks[0].plan.world_size)
        if launch.device == "emulated":
            assert launch.profile is not None
            profile = load_profile(launch.profile)
            _check_profile(profile, tasks, config.train.batch_size, optimizer.method)
    except ValueError as error:
        raise UserError(f"{config.name}: {one_line(error)}") from None


def _check_profile(profile: Profile, tasks: Sequence[Task], batch_size: int, method: str) -> None:
    if method not in profile.optimizer_seconds_per_byte:
        known = ", ".join(profile.optimizer_seconds_per_byte) or "none"
        raise ValueError(
            f"the profile does not say what a step of {method} takes, but of {known}: profile it, "
            "or choose another optimizer"
        )
    for task in tasks:
        for samples in _unit_sizes(task, task.batch_size or batch_size):
            try:
                profile.forward(0, len(profile.layers), samples)
                profile.backward(0, len(profile.layers), samples)
            except ValueError as error:
                raise ValueError(f"units of {task.label}: {error}") from None


def _unit_sizes(task: Task, batch_size: int) -> list[int]:
    """Samples that any replica may compute at a time."""
    whole = schedule_of(task.system, task.options).rounds
    found = set()
    for low, high in split(batch_size, task.plan.micro_batches):
        for stage in task.plan.stages:
            shares = [(low, high)] if whole else split(high - low, stage.replicas)
            found |= {end - begin for begin, end in shares}
    return sorted(found - {0})


def emulated_stack(config: Config, optimizer: OptimizerSpec) -> LayerStack:
    """The layers at their truncated sizes, for questions of memory: no time passes on them."""
    from runtimes.emulation.layers import EmulatedStack

    launch = config.launch
    assert launch.profile is not None
    assert launch.truncation is not None
    return EmulatedStack(load_profile(launch.profile), optimizer, truncation=launch.truncation)
