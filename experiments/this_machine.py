"""A cluster file of the machine that a profile was measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import tomli_w

from experiments.errors import UserError
from runtimes.planning.profile import Profile

__all__ = ["cluster_document", "write_cluster"]


def cluster_document(profile: Profile, name: str, memory_bytes: float) -> dict[str, Any]:
    """As ``experiments.clusters.ClusterFile`` reads it: one node, a device for each rank that
    measured, which share its memory.  UserError for a profile without links."""
    links = profile.links
    if links is None:
        raise UserError("a cluster needs links, which two ranks or more measure: add --ranks 2")
    told = profile.provenance
    machine = told.get("machine", {})
    return {
        "name": name,
        "stolen_seconds_per_byte": links.stolen_seconds_per_byte,
        "nodes": [{"devices": links.ranks, "memory_bytes": memory_bytes / links.ranks}],
        "inside": {
            "bandwidth_bytes_per_s": links.bandwidth_bytes_per_s,
            "latency_seconds": links.latency_seconds,
        },
        "all_reduce_seconds": {
            str(ranks): {str(size): seconds for size, seconds in curve.items()}
            for ranks, curve in links.all_reduce_seconds.items()
        },
        "action_seconds": dict(profile.action_seconds),
        "provenance": {
            "measured": f"median of {told.get('repeats')} rounds by `pipebench profile`, beside "
            f"{profile.model.name}",
            "machine": f"{machine.get('cores')} cores of {machine.get('cpu')}",
            "torch": str(told.get("versions", {}).get("torch")),
        },
    }


def write_cluster(profile: Profile, path: Path) -> None:
    """UserError for a profile without links, or a path that cannot be written."""
    memory = psutil.virtual_memory().total
    document = cluster_document(profile, path.stem, float(memory))
    try:
        path.write_text(tomli_w.dumps(document), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file") from None
