"""Training runs and what they have in common: task, study, and settings in words."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import pandas as pd

from analysis.records import PEERS, Records

__all__ = ["LEARNED", "short", "swept", "synchronous", "title", "training"]

LEARNED = (
    *("model.", "data.", "launch.device", "train.batch_size", "train.optimizer"),
    *("train.learning_rate", "train.label_smoothing", "train.precision", "train.start_from"),
)
"""Configuration that a synchronous system's losses depend on, besides seed and epochs."""
COSMETIC = (
    *("name", "tiers", "tracking.", "train.seed", "train.action_timeout_s", "data.root"),
    *("data.download", "launch.node_rank", "launch.address", "launch.port"),
    *("launch.local_address", "launch.rendezvous", "swept.", "best_of."),
)
"""Configuration that changes no result, and the seed, over which accuracies are averaged."""
OPTION = re.compile(r"(?:switch\.)?system\.options\.")
SYNCHRONOUS = (*PEERS, *PEERS.values())
"""Systems whose losses depend on nothing that tells them apart."""


def training(records: Records) -> pd.DataFrame:
    """The training runs, but for the points of sweeps; those of one study together, and with these
    columns more:

    ``task``: a key of model, data, regime, epochs and source.  Synchronous systems of one task and
    seed have the same loss at every step.
    ``study``: the same key, less what was swept or chosen by a sweep, and the names of that.
    ``variant``: a key of all but the seed: runs that differ in it are never averaged.
    ``swept``: the point of the sweep, by dotted keys; empty if the run belongs to none.
    ``chosen``: what the run took from a sweep, as in "lr = 0.1", or "".
    ``shown``: the system with its options, as in "dp (overlap = false)", and whether all its ranks
    were in one process: a time of such a run is none, its accuracy is as good as any.
    ``model``, ``data``, ``regime``: in words for people; ``task`` tells them apart.
    """
    runs = _runs(records)
    return runs[~runs["swept"].astype(bool)]


def swept(records: Records) -> pd.DataFrame:
    """The training runs that are points of sweeps, in the columns of :func:`training`."""
    runs = _runs(records)
    return runs[runs["swept"].astype(bool)]


def synchronous(records: Records) -> pd.DataFrame:
    """The training runs that are to agree with each other: of synchronous systems (of both, where
    one hands over to another), at settings that were given and not chosen for each by itself."""
    runs = training(records)
    alike = runs["system"].map(lambda system: {*system.split(" → ")} <= {*SYNCHRONOUS})
    return runs[alike.astype(bool) & (runs["chosen"] == "")]


def _runs(records: Records) -> pd.DataFrame:
    runs = records.runs[records.runs["kind"] == "train"]
    names = ["task", "study", "variant", "swept", "chosen", "shown", "model", "data", "regime"]
    added = [_described(run, _settings(run["config"])) for run in runs.to_dict("records")]
    runs = runs.join(pd.DataFrame(added, index=runs.index, columns=names))
    runs["first"] = runs.groupby("study")["name"].transform("first")
    return runs.sort_values(["source", "first", "study"], kind="stable").drop(columns="first")


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """A nested configuration by dotted keys, less what is cosmetic."""
    flat = pd.json_normalize(config).to_dict("records")[0] if config else {}
    return {str(key): flat[key] for key in flat if not str(key).startswith(COSMETIC)}


def _described(run: Mapping[Any, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    learned = {key: value for key, value in settings.items() if key.startswith(LEARNED)}
    swept = run["config"].get("swept", {})
    best = run["config"].get("best_of", {}).get("chosen", {})
    alike = {**learned, "train.epochs": settings.get("train.epochs", run["epochs"])}
    alike |= {"train.batch_size": run["batch_size"]}
    free = sorted(key for key in (*swept, *best) if key in alike)
    fixed = {key: value for key, value in alike.items() if key not in free}
    kind = "swept" if swept else "chosen" if best else "given"
    options = sorted(key for key in settings if OPTION.match(key))
    special = [f"{OPTION.sub('', key)} = {json.dumps(settings[key])}" for key in options]
    # Whoever chose a label has named the options, but for that of a switch, which tells when.
    own = run["label"] not in (run["system"], f"{run['system']}@{_moment(settings)}")
    remarks = [] if own else special
    if run["transport"] == "in-process":
        remarks.append("in-process")

    def key_of(*parts: Any) -> str:
        return json.dumps(parts, sort_keys=True, default=str)

    return {
        "task": key_of(run["source"], alike),
        "study": key_of(run["source"], fixed, free, kind),
        "variant": key_of(run["label"], run["evidence"], run["transport"], run["plan"], settings),
        "swept": swept,
        "chosen": ", ".join(f"{short(key)} = {value}" for key, value in best.items()),
        "shown": run["label"] + (f" ({', '.join(remarks)})" if remarks else ""),
        **_in_words({**settings, **fixed}, {*swept, *best}, kind),
    }


def _moment(settings: Mapping[str, Any]) -> str:
    return str(settings.get("switch.epoch", "plateau"))


def _in_words(settings: Mapping[str, Any], free: Collection[str], kind: str) -> dict[str, str]:
    """Model, data and regime; of what is ``free`` to differ only the name."""

    def words(*parts: tuple[str, str]) -> str:
        known = [
            word.format(settings[key])
            for word, key in parts
            if settings.get(key) and key not in free
        ]
        return " ".join(known)

    names = " and ".join(map(short, free))
    regime = (
        words(("{} epochs", "train.epochs")),
        words(("B = {}", "train.batch_size")),
        words(("{}", "train.optimizer.name"), ("{}", "train.optimizer.lr")),
        words(("momentum {}", "train.optimizer.momentum")),
        {"given": "", "swept": f"sweep of {names}", "chosen": f"{names} best of a sweep"}[kind],
        words(("{}", "train.learning_rate.kind")),
        words(("label smoothing {}", "train.label_smoothing")),
        words(("{}", "train.precision")),
        words(("from {}", "train.start_from")),
    )
    data = (
        words(("{}", "data.set"), ("{0}×{0}", "data.image_size")),
        words(("{} training images", "data.sizes.train")),
        words(("validated on {} others held out", "data.sizes.held_out")),
    )
    return {
        "model": words(
            ("{}", "model.name"),
            ("width {}", "model.args.embed_dim"),
            ("depth {}", "model.args.depth"),
            ("patch {}", "model.args.patch_size"),
        ),
        "data": ", ".join(filter(None, data)),
        "regime": ", ".join(filter(None, regime)),
    }


def short(key: str) -> str:
    return key.rpartition(".")[2]


def title(subject: str, runs: pd.DataFrame) -> str:
    first = runs.iloc[0]
    on = f"{first['model']} on {first['data']}" if first["data"] else first["model"]
    parts = [part for part in (on, first["regime"]) if part]
    if first["source"]:
        parts.append(f"reference record of {first['source']}")
    return f"{subject}: {', '.join(parts)}"
