"""A config's systems on a cluster, simulated: time and memory of every batch size and bandwidth."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from analysis.evidence import Evidence
from analysis.over_dp import ratios_to_dp
from experiments.clusters import cluster_names, load_cluster, read_cluster
from experiments.config import Config
from experiments.emulation import cluster_of
from experiments.errors import UserError, one_line
from experiments.identity import run_id
from experiments.loading import load
from experiments.memory import largest_batch, largest_pipelines, memory_peaks_of
from experiments.profiles import check_profile, load_profile, model_of
from experiments.resolve import image_of, job_of, layers_of, stack_of, tasks_of, warnings_of
from runtimes.job import DataSpec, Job, Task
from runtimes.planning.profile import Profile
from runtimes.schedule import Op, Program
from runtimes.simulation.cluster import Cluster
from runtimes.simulation.costs import ProfileCosts
from runtimes.simulation.simulator import simulate
from runtimes.simulation.steady import steady
from runtimes.systems import schedule_of
from runtimes.timeline import Span, Timeline

__all__ = ["Request", "Simulated", "simulated", "simulation_rows"]


@dataclass(frozen=True)
class Request:
    """``cluster``, ``profile``: names or paths; None for what the config's devices are emulated
    with, or, of the profile, for one computed for the cluster's devices.  ``batch_sizes``: the
    config's own if empty; ``bandwidth_shares``: what links reach of their bandwidth, each in turn.
    """

    config: str
    settings: Sequence[str]
    cluster: str | None = None
    profile: str | None = None
    batch_sizes: Sequence[int] = ()
    bandwidth_shares: Sequence[float] = (1.0,)


@dataclass(frozen=True)
class _Inputs:
    """``configs``: one a batch size; ``clusters``: by share of their bandwidth."""

    name: str
    configs: Sequence[Config]
    cluster: Cluster
    clusters: Mapping[float, Cluster]
    profile: Profile


def _inputs(request: Request) -> _Inputs:
    named = load(request.config, request.settings)
    request = _filled(request, named)
    cluster = _cluster(request, named)
    scaled = {share: cluster.with_bandwidth(share) for share in request.bandwidth_shares}
    configs = list(_configs(request))
    return _Inputs(named.name, configs, cluster, scaled, _profile(request, configs))


@dataclass(frozen=True)
class Simulated:
    """``document``: of schema pipebench.simulation/1; ``timelines``: if asked for, of every
    contender the segment that the benchmark times, at the first batch size and share of
    bandwidth."""

    document: dict[str, Any]
    timelines: Sequence[Timeline]


def simulated(request: Request, *, traced: bool = False) -> Simulated:
    """UserError for what cannot be simulated."""
    try:
        given = _inputs(request)
        document = _document(given)
        return Simulated(document, _timelines(given) if traced else ())
    except ValueError as error:
        raise UserError(one_line(error)) from None


def _document(given: _Inputs) -> dict[str, Any]:
    rows, warnings = list[dict[str, Any]](), list[str]()
    for config in given.configs:
        warnings += warnings_of(config, tasks_of(config, layers_of(config)))
        rows += _rows_of(config, given.profile, given.clusters)
    if all(row["status"] == "oom" for row in rows):
        raise UserError(rows[0]["why"])
    profile, paper = given.profile, given.configs[0].paper
    return {
        "schema": "pipebench.simulation/1",
        "name": f"{given.name}@{given.cluster.name}",
        "t": time.time(),
        "evidence": "simulated",
        "warnings": warnings,
        "paper": None if paper is None else paper.model_dump(),
        "cluster": given.cluster.to_json(),
        "profile": {
            "model": profile.model.name,
            "precision": profile.precision,
            "device": profile.device,
            "source": profile.source,
            "provenance": profile.provenance,
            "reference_seconds": profile.reference_seconds,
        },
        "rows": rows,
    }


def _timelines(given: _Inputs) -> list[Timeline]:
    config, cluster = given.configs[0], next(iter(given.clusters.values()))
    tasks = tasks_of(config, layers_of(config))
    job = job_of(config, tasks, DataSpec("", ""))
    return [_timeline(job, task, given.profile, cluster) for task in tasks]


def _timeline(job: Job, task: Task, profile: Profile, cluster: Cluster) -> Timeline:
    program = _program(job, task, _steps(job, task))
    costs = _costs(job, task, profile)
    ranks = tuple(
        tuple(Span(item.action, item.start, item.end) for item in items)
        for items in simulate(program, cluster, costs).timed
    )
    return Timeline(
        task.label, "simulated", task.plan, program.batches, ranks, f"on {cluster.name}"
    )


def _costs(job: Job, task: Task, profile: Profile) -> ProfileCosts:
    system = schedule_of(task.system, task.options)
    versions = [system.live_versions(task.plan, stage) for stage in range(len(task.plan.stages))]
    return ProfileCosts(profile, task.plan, job.optimizer.method, versions)


def _steps(job: Job, task: Task) -> int:
    """Batches of the segment that the benchmark times."""
    return len(job.batches(task, job.bench.steps if job.bench else 1))


def _program(job: Job, task: Task, batches: int) -> Program:
    sizes = (task.batch_size or job.batch_size,) * batches
    system = schedule_of(task.system, task.options)
    return system.program(task.plan, sizes, norm=job.optimizer.global_norm)


def _configs(request: Request) -> Iterator[Config]:
    sizes = [[f"train.batch_size={size}"] for size in request.batch_sizes] or [[]]
    for extra in sizes:
        yield load(request.config, [*request.settings, *extra])


def _filled(request: Request, config: Config) -> Request:
    """With what the config's launch says, where the request says nothing."""
    return replace(
        request,
        cluster=request.cluster or config.launch.cluster,
        profile=request.profile or config.launch.profile,
    )


def _cluster(request: Request, config: Config) -> Cluster:
    if request.cluster is not None:
        named = config.launch.cluster == request.cluster
        return cluster_of(config.launch) if named else load_cluster(request.cluster)
    if config.launch.device == "emulated":
        # Nothing delays its messages.
        return Cluster.ideal(tasks_of(config, layers_of(config))[0].plan.world_size)
    raise UserError(
        f"{config.name} names no cluster: give --cluster, one of {', '.join(cluster_names())} or a "
        "file"
    )


def _profile(request: Request, configs: Sequence[Config]) -> Profile:
    """Of a file, or of what the cluster's devices could do at most; UserError for neither."""
    if request.profile is not None:
        return load_profile(request.profile)
    from runtimes.planning.device_specs import device_spec
    from runtimes.planning.roofline import analytic_profile

    assert request.cluster is not None, "an emulated device has a profile"
    kinds = {node.device for node in read_cluster(request.cluster).nodes}
    device = kinds.pop()
    if device is None or kinds:
        raise UserError(
            f"{request.cluster} does not say of which one kind its devices are: set nodes.device, "
            "or give --profile"
        )
    config, largest = configs[0], max(config.train.batch_size for config in configs)
    stack = stack_of(config)
    # Every size that a unit may have lies between two; some BatchNorms refuse a single sample.
    least = int(any(stack.lone_norms(image_of(config))))
    sizes = sorted({1 << power for power in range(least, largest.bit_length())} | {largest})
    return analytic_profile(
        model_of(config),
        stack,
        image_of(config),
        sizes,
        device_spec(device),
        precision=config.train.precision,
    )


def _rows_of(
    config: Config, profile: Profile, clusters: Mapping[float, Cluster]
) -> Iterator[dict[str, Any]]:
    check_profile(profile, config, image_of(config), "the profile")
    if config.switch is not None:
        raise UserError(f"{config.name} switches systems: simulate a config of each")
    tasks = tasks_of(config, layers_of(config))
    job = job_of(config, tasks, DataSpec("", ""))
    for task in tasks:
        for cluster in clusters.values():
            cluster.check(task.plan.world_size)
        peaks = _peaks(config, job, task)
        # Bandwidth changes nothing of it.
        why = _too_much(config, job, task, peaks, next(iter(clusters.values())))
        for share, cluster in clusters.items():
            row = {
                "config": config.name,
                "run": run_id(config),
                "label": task.label,
                "system": task.system,
                "options": dict(task.options),
                "plan": task.plan.to_json(),
                "batch_size": task.batch_size or job.batch_size,
                "bandwidth_share": share,
                "memory_bytes": peaks,
            }
            yield row | (
                {"status": "oom", "why": why} if why else _times(job, task, profile, cluster)
            )


def _peaks(config: Config, job: Job, task: Task) -> list[int]:
    """Bytes that each rank holds at most."""
    return [peak.total for peak in memory_peaks_of(config, job, task)]


def _too_much(
    config: Config, job: Job, task: Task, peaks: Sequence[int], cluster: Cluster
) -> str | None:
    """Why what the ranks hold does not fit on the cluster's devices, and what would."""

    def lacking(needs: Sequence[int]) -> tuple[int, int] | None:
        """The rank that lacks most, and what it needs."""
        lacks = [needed - cluster.memory_bytes(rank) for rank, needed in enumerate(needs)]
        worst = max(range(len(needs)), key=lacks.__getitem__)
        return (worst, needs[worst]) if lacks[worst] > 0 else None

    def fits(size: int) -> bool:
        return lacking(_peaks(config, replace(job, batch_size=size), task)) is None

    found = lacking(peaks)
    if found is None:
        return None
    rank, needed = found
    largest = largest_batch(job.batch_size, [task], fits)
    way_out = f"the largest batch that fits is {largest}" if largest else "no batch fits"
    pipelines = largest_pipelines(
        [task], lambda changed: lacking(_peaks(config, job, changed[0])) is None
    )
    if pipelines:
        way_out = f"plan.pipelines = {pipelines} is the most that fit, {way_out}"
    return (
        f"{task.label}: rank {rank} needs {needed / 1e9:.3g} GB, a device of {cluster.name} has "
        f"{cluster.memory_bytes(rank) / 1e9:.3g} GB: {way_out}"
    )


def _times(job: Job, task: Task, profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """Of a segment as the benchmark times it, and of one batch in the steady state."""
    costs = _costs(job, task, profile)
    size, steps = task.batch_size or job.batch_size, _steps(job, task)
    segment = simulate(_program(job, task, steps), cluster, costs, keep=False)
    # Enough to fill the pipeline, for every replica to have its turn, and in whole periods.
    period = schedule_of(task.system, task.options).period
    enough = -(-2 * task.plan.world_size // period) * period
    full = steady(lambda batches: _program(job, task, batches), cluster, costs, enough)
    return {
        "status": "ok",
        "why": None,
        "numbers": _numbers(task, costs, cluster, size),
        "segment_batches": steps,
        "segment_seconds": segment.makespan_seconds,
        "batch_seconds": full.batch_seconds,
        "images_per_s": size / full.batch_seconds,
        "parts": full.shares,
    }


def _numbers(task: Task, costs: ProfileCosts, cluster: Cluster, size: int) -> dict[str, float]:
    """What decides between systems, whatever the hardware: seconds of all stages' all-reduces ÷ of
    the slowest stage's computation of a batch, and of a unit's activations from stage to stage ÷ of
    its computation there; of each the largest."""
    plan = task.plan
    unit = -(-size // plan.micro_batches)
    computed = [
        costs.compute_seconds(Op.F, index, 0, None, share)
        + costs.compute_seconds(Op.B, index, 0, None, share)
        for index, stage in enumerate(plan.stages)
        for share in [-(-unit // stage.replicas)]
    ]
    reduced = [
        cluster.all_reduce_seconds(stage.ranks, *costs.reduced(index, None))
        for index, stage in enumerate(plan.stages)
    ]
    moved = [
        cluster.link(here.ranks[-1], there.ranks[0]).seconds(
            costs.message_bytes(index) * unit / max(here.replicas, there.replicas)
        )
        for index, (here, there) in enumerate(pairwise(plan.stages))
    ]
    slowest = max(computed)
    return {
        "all_reduce_to_compute": max(reduced) / (plan.micro_batches * slowest),
        "transfer_to_stage": max(moved, default=0.0) / slowest,
    }


def simulation_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """For ``reports.columns``; ÷ dp against the first dp of the same batch size and bandwidth."""
    lines = [
        ["contender", "batch", "links", "ms/batch", "images/s", "÷ dp", "idle", "exposed", "GB", ""]
    ]
    ratios = ratios_to_dp(document["rows"], Evidence.parse(document["evidence"]))
    for row, over_dp in zip(document["rows"], ratios, strict=True):
        line = [row["label"], str(row["batch_size"]), f"{row['bandwidth_share']:.3g}×"]
        memory = f"{max(row['memory_bytes']) / 1e9:.1f}"
        if row["status"] != "ok":
            lines.append([*line, "–", "–", "–", "–", "–", memory, row["why"]])
            continue
        parts = row["parts"]
        lines.append(
            [
                *line,
                f"{row['batch_seconds'] * 1e3:.2f}",
                f"{row['images_per_s']:.1f}",
                "–" if math.isnan(over_dp) else f"{over_dp:.3f}",
                f"{parts['idle']:.1%}",
                f"{parts['communication'] + parts['reduce']:.1%}",
                memory,
                "",
            ]
        )
    return lines
