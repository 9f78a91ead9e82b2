"""Which run a config is: the hash of what it says, without what is cosmetic."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from experiments.config import Config
from runtimes.systems import SYSTEMS, system_options

__all__ = ["COSMETIC", "LATER", "bench_of", "config_hash", "contender_id", "run_id"]

#: What changes neither the result nor what is measured, only where it goes, or how it is shown.
COSMETIC = (
    ("name",),
    ("tiers",),
    ("scales",),
    # Where values come from: what decides is the values.
    ("sweep",),
    ("swept",),
    ("best_of",),
    ("paper",),
    ("tracking",),
    ("train", "seeds"),
    ("train", "action_timeout_s"),
    ("data", "root"),
    ("data", "download"),
    # What decides is the hashes of their contents.
    ("launch", "profile"),
    ("launch", "cluster"),
    ("launch", "node_rank"),
    ("launch", "address"),
    ("launch", "port"),
    ("launch", "local_address"),
    ("launch", "rendezvous"),
)

#: Keys that configs did not always have, with the value that says nothing: left out where they have
#: it, so that earlier runs keep their names.  A section is meant wherever it occurs.
LATER: tuple[tuple[str, str, object], ...] = (
    ("model", "batch_norm", None),
    ("launch", "profile_hash", None),
    ("launch", "cluster_hash", None),
    ("launch", "truncation", None),
    ("plan", "pipelines", 1),
    ("train", "start_from_reference", False),
)


def config_hash(config: Config) -> str:
    """SHA-256, in hex, of the config's canonical JSON: keys sorted, defaults filled in."""
    document = config.model_dump(mode="json")
    for *path, last in COSMETIC:
        node = document
        for key in path:
            node = node[key]
        node.pop(last, None)
    if config.system is not None:
        document["system"]["options"] = _options(config.system.name, config.system.options)
    if config.switch is not None:
        then = config.switch.system
        document["switch"]["system"]["options"] = _options(then.name, then.options)
    if config.bench is not None:
        # A contender's plan is the benchmark's with its changes, however they are written down.
        document.pop("plan")
        for entry, contender in zip(
            document["bench"]["contenders"], config.bench.contenders, strict=True
        ):
            entry["options"] = _options(contender.system, contender.options)
            entry["plan"] = config.plan.changed(contender.plan).model_dump(mode="json")
    _leave_out_later(document)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _leave_out_later(document: dict[str, Any]) -> None:
    """In place."""
    for section, key, silent in LATER:
        for node in _sections(document, section):
            if node.get(key, silent) == silent:
                node.pop(key, None)


def _sections(document: Any, name: str) -> list[dict[str, Any]]:
    """Every table of that name, however deep."""
    if isinstance(document, list):
        return [table for item in document for table in _sections(item, name)]
    if not isinstance(document, dict):
        return []
    here = [document[name]] if isinstance(document.get(name), dict) else []
    return here + [table for value in document.values() for table in _sections(value, name)]


def _options(system: str, given: dict[str, Any]) -> dict[str, Any]:
    """An option that is left out and its default written down are the same, as are 1 and 1.0."""
    if system not in SYSTEMS:
        return given
    options = system_options(system)
    defaults = {name: option.default for name, option in options.items()}
    return defaults | {name: options[name].checked(value) for name, value in given.items()}


def run_id(config: Config) -> str:
    """E.g. "digits-dapple-s0-1f3a5c7e", "digits-dp-dapple-s0-…" with a switch, or
    "random-bench-s0-…" for a benchmark.

    The readable part repeats what is hashed, so that another name of the same run stays the same.
    """
    what = config.system.name if config.system is not None else "bench"
    if config.switch is not None:
        what += f"-{config.switch.system.name}"
    return f"{config.data.set}-{what}-s{config.train.seed}-{config_hash(config)[:8]}"


def contender_id(bench_id: str, label: str) -> str:
    """The record of one contender: the benchmark's id, a dot, its label."""
    return f"{bench_id}.{label}"


def bench_of(record_id: str) -> str | None:
    """The benchmark that a record belongs to; None for a training run."""
    bench_id, dot, _ = record_id.partition(".")
    return bench_id if dot else None
