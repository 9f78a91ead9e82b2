"""Which clusters can be emulated, as far as plain data tells it."""

from __future__ import annotations

from runtimes.simulation.cluster import Cluster

__all__ = ["check_cluster"]


def check_cluster(cluster: Cluster, ranks: int) -> None:
    """ValueError, naming value, limit and way out, if so many ranks cannot run as on it."""
    cluster.check(ranks)
    if cluster.stolen_seconds_per_byte:
        raise ValueError(
            f"messages of {cluster.name} take {cluster.stolen_seconds_per_byte} s a byte from "
            "devices, but emulated links only delay: set stolen_seconds_per_byte to 0"
        )
