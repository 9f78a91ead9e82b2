"""result.json as a pure function of a run's config, environment and events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.config import Config, Contender, Plan
from experiments.identity import bench_of, config_hash, contender_id

__all__ = ["FINISHED", "contender_events", "last_status", "record_ids", "summarise"]

Event = Mapping[str, Any]

#: Statuses that another attempt would only repeat.
FINISHED = ("ok", "diverged", "skipped_hardware")


def record_ids(config: Config, run: str) -> dict[str, Contender]:
    """The records that a run leaves: itself, or one for each contender of a benchmark."""
    contenders = config.contenders()
    if config.bench is None:
        return {run: contenders[0]}
    return {contender_id(run, contender.label): contender for contender in contenders}


def contender_events(events: Sequence[dict[str, Any]], label: str) -> list[dict[str, Any]]:
    """The part of a benchmark's events that concerns one contender."""
    return [event for event in events if event["event"] != "round" or event["task"] == label]


def last_status(events: Sequence[Event]) -> str:
    """ "unfinished" until the launcher has written how it ended."""
    last = events[-1] if events else {}
    return str(last["status"]) if last.get("event") == "end" else "unfinished"


def summarise(
    config: Config, record: str, environment: Mapping[str, Any], events: Sequence[Event]
) -> dict[str, Any]:
    """The result of one record, from the events of its own directory."""
    bench_id = bench_of(record)
    contender = record_ids(config, bench_id or record)[record]
    plan = config.plan.changed(contender.plan)
    end = events[-1] if last_status(events) != "unfinished" else {}
    result = {
        "schema": "pipebench.result/1",
        "id": record,
        "name": config.name,
        "kind": config.kind,
        # Neither system alone: a run that switches is not to be taken for one that does not.
        "system": contender.system if config.switch is None else config.label.partition("@")[0],
        "label": contender.label if bench_id is not None else config.label,
        "seed": config.train.seed,
        "status": last_status(events),
        "error": end.get("error"),
        "evidence": environment["evidence"],
        "machine": environment["machine"],
        "transport": config.launch.transport,
        "world_size": sum(_replicas(plan)),
        "batch_size": contender.batch_size or config.train.batch_size,
        **_shape(plan),
        "config_hash": config_hash(config),
        "attempts": max(
            (event["attempt"] for event in events if event["event"] == "launch"), default=0
        ),
    }
    if config.swept is not None:
        result["swept"] = config.swept
    for key in ("rank", "signal", "last_actions"):
        if end.get(key) is not None:
            result[key] = end[key]
    if bench_id is None:
        return result | _switch(config, events) | _training(events)
    return result | {"bench_id": bench_id} | _benchmark(events)


def _replicas(plan: Plan) -> tuple[int, ...]:
    return plan.replicas or (1,) * plan.stages


def _shape(plan: Plan) -> dict[str, int]:
    replicas = max(_replicas(plan))
    return {"micro_batches": plan.micro_batches, "stages": plan.stages, "replicas": replicas}


def _switch(config: Config, events: Sequence[Event]) -> dict[str, Any]:
    """What took over, and after which update; None if that has not happened."""
    if config.switch is None:
        return {}
    steps = [event["step"] for event in events if event["event"] == "switch"]
    then = {"system": config.switch.system.name, **_shape(config.switch.plan)}
    return {"switch": then | {"step": steps[-1] if steps else None}}


def _training(events: Sequence[Event]) -> dict[str, Any]:
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "evaluation"]
    segments = [
        event for event in events if event["event"] == "segment" and event["kind"] == "train"
    ]
    # Ranks that take turns in one process have no time.
    walls = [event["wall_s"] for event in segments if "wall_s" in event]
    wall = sum(walls) if len(walls) == len(segments) else None
    samples = sum(event["samples"] for event in segments)
    return {
        "final_loss": _number(steps[-1]["loss"]) if steps else None,
        "accuracy": evaluations[-1]["accuracy"] if evaluations else None,
        "epochs": steps[-1]["epoch"] + 1 if steps else 0,
        "steps": len(steps),
        "train_wall_s": wall,
        "images_per_s": samples / wall if wall else None,
    }


def _benchmark(events: Sequence[Event]) -> dict[str, Any]:
    rounds = [event for event in events if event["event"] == "round"]
    return {
        "rounds": [
            {
                "round": event["round"],
                "position": event["position"],
                "wall_s": event["wall_s"],
                "samples": event["samples"],
                "images_per_s": event["samples"] / event["wall_s"],
                "compute_bound_s": event.get("compute_bound_s"),
                "reference_s": event.get("reference_s"),
            }
            for event in rounds
        ],
        "breakdown": _breakdown([event["ranks"] for event in rounds]),
    }


def _breakdown(rounds: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Each rank's seconds and counts, as the mean over rounds; its place is the same in all."""
    ranks: dict[str, list[Mapping[str, Any]]] = {}
    for entries in rounds:
        for entry in entries:
            ranks.setdefault(str(entry["rank"]), []).append(entry)
    return {
        rank: {
            key: entries[0][key]
            if key in ("stage", "replica")
            else sum(entry[key] for entry in entries) / len(entries)
            for key in entries[0]
            if key != "rank"
        }
        for rank, entries in ranks.items()
    }


def _number(loss: float | str) -> float | None:
    """None for what strict JSON has no number for: the loss of a run that diverged, which ranks
    write as text."""
    value = float(loss)
    return value if math.isfinite(value) else None
