"""Cluster files: what a user says of machines, as typed data, and the cluster it means."""

from __future__ import annotations

import math
import tomllib
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from experiments.complaints import in_words
from experiments.errors import UserError, one_line
from experiments.paths import CLUSTERS, named_file
from experiments.section import Count, Positive, Section
from runtimes.schedule import Op
from runtimes.simulation.cluster import Cluster, Link, Node

__all__ = ["ClusterFile", "cluster_names", "load_cluster", "read_cluster"]

NotNegative = Annotated[float, Field(ge=0)]


class LinkSection(Section):
    """``bandwidth_bytes_per_s``: one way."""

    bandwidth_bytes_per_s: Positive
    latency_seconds: NotNegative = 0.0
    full_duplex: bool = True

    def link(self) -> Link:
        return Link(self.bandwidth_bytes_per_s, self.latency_seconds, self.full_duplex)


class NodeSection(Section):
    """``count`` nodes alike; ``device``: a name that analytic profiles know."""

    count: Count = 1
    devices: Count
    memory_bytes: Positive | None = None
    device: str | None = None


class ClusterFile(Section):
    """As ``runtimes.simulation.cluster.Cluster``, which says what each key means;
    ``all_reduce_seconds`` are its curves."""

    name: str
    nodes: Annotated[tuple[NodeSection, ...], Field(min_length=1)]
    inside: LinkSection
    between: LinkSection | None = None
    shared_nic: bool = True
    all_reduce: Literal["ring", "hierarchical"] = "ring"
    all_reduce_seconds: dict[Count, dict[Count, NotNegative]] = Field(default_factory=dict)
    stolen_seconds_per_byte: NotNegative = 0.0
    action_seconds: dict[Op, NotNegative] = Field(default_factory=dict)
    provenance: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _linked(self) -> ClusterFile:
        self.cluster()
        return self

    def cluster(self) -> Cluster:
        return Cluster(
            name=self.name,
            nodes=tuple(
                Node(section.devices, section.memory_bytes or math.inf)
                for section in self.nodes
                for _ in range(section.count)
            ),
            inside=self.inside.link(),
            between=None if self.between is None else self.between.link(),
            shared_nic=self.shared_nic,
            all_reduce=self.all_reduce,
            curves=self.all_reduce_seconds,
            stolen_seconds_per_byte=self.stolen_seconds_per_byte,
            action_seconds={op.value: seconds for op, seconds in self.action_seconds.items()},
            provenance=self.provenance,
        )


def cluster_names() -> list[str]:
    return sorted(file.stem for file in CLUSTERS.glob("*.toml"))


def read_cluster(name_or_path: str) -> ClusterFile:
    """The file of this path, or of this name in experiments/clusters.

    Raises UserError, in one line that names key and file, for whatever cannot be.
    """
    file = named_file(name_or_path, CLUSTERS, ".toml", "cluster")
    try:
        return ClusterFile.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"cannot read cluster file {name_or_path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"cluster file {name_or_path} is not TOML: {one_line(error)}") from None
    except ValidationError as error:
        raise UserError(in_words(error, ClusterFile, name_or_path)) from None


def load_cluster(name_or_path: str) -> Cluster:
    """What that file means; UserError as of :func:`read_cluster`."""
    return read_cluster(name_or_path).cluster()
