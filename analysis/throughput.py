"""Throughput of the contenders of a benchmark: images/s, ratios, share of the bound, wall time."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.layout import Cell, Column, Row, Table, View, fixed, percent, with_interval
from analysis.records import PARTS, Record, Round
from analysis.statistics import (
    MINIMUM_ROUNDS,
    Estimate,
    NoiseFloor,
    Reading,
    Series,
    median,
    noise_floor,
    paired_ratios,
    read,
)

__all__ = [
    "AGAIN",
    "PEERS",
    "SHARES",
    "Comparison",
    "Contender",
    "compare",
    "machine_line",
    "order",
    "plan_line",
    "status_line",
    "tables",
]

PEERS = {"dp": "torch-ddp", "gpipe": "torch-gpipe", "dapple": "torch-1f1b"}
"""The peer that runs the same schedule."""
AGAIN = "-again"
"""The second label of a system that is measured twice: ``X`` and ``X-again`` are an A/A pair."""
UNATTRIBUTED = "unattributed"
"""The wall time left by the parts that are known of a system: torch's schedules do not say when
they wait, and for what."""
SHARES = (*PARTS, UNATTRIBUTED)

ORDER = tuple(name for pair in PEERS.items() for name in pair)


@dataclass(frozen=True)
class Contender:
    """One system in a benchmark.  A value is None where it was not, or cannot be, measured.

    ``to_dp`` and ``to_peer`` are ratios of images/s paired by round: above 1 is faster.
    ``of_bound`` is compute_bound_s ÷ wall_s paired by round: 1 is as fast as the schedule can be.
    ``shares`` are the parts of the wall time as fractions, averaged over ranks; they add up to 1.
    """

    record: Record
    images_per_s: Estimate | None
    to_dp: Estimate | None
    peer: str | None
    to_peer: Estimate | None
    of_bound: Estimate | None
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """The contenders of one launch; ``floor`` is the A/A floor and ``pair`` who showed it."""

    launch: str
    source: str
    name: str
    contenders: tuple[Contender, ...]
    pair: str | None
    floor: NoiseFloor | None


def order(record: Record) -> tuple[int, str, int, str, int]:
    """Sort key of rows: a system, then its peer, as in :data:`PEERS`; then size, label and seed."""
    place = ORDER.index(record.system) if record.system in ORDER else len(ORDER)
    return place, record.system, record.micro_batches, record.label, record.seed


def compare(records: Iterable[Record]) -> tuple[Comparison, ...]:
    """One comparison a benchmark launch, fresh ones first."""
    launches: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.kind == "bench":
            launches.setdefault((record.source, _launch(record)), []).append(record)
    comparisons = [_comparison(*key, sorted(group, key=order)) for key, group in launches.items()]
    return tuple(
        sorted(comparisons, key=lambda item: (item.source, _natural(item.name), item.launch))
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts "m8" before "m16"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _launch(record: Record) -> str:
    return record.bench_id or record.id


def _comparison(source: str, launch: str, records: Sequence[Record]) -> Comparison:
    pair, floor = _floor(records)
    contenders = tuple(_contender(record, records) for record in records)
    return Comparison(launch, source, records[0].name, contenders, pair, floor)


def _contender(record: Record, field: Sequence[Record]) -> Contender:
    if not record.ok or not record.rounds:
        return Contender(record, None, None, None, None, None, {})
    speed = _series(record, lambda timed: timed.images_per_s)
    dp, peer = _baseline(record, field), _peer(record, field)
    return Contender(
        record,
        images_per_s=median(speed),
        to_dp=_ratio(record, dp),
        peer=peer.label if peer else None,
        to_peer=_ratio(record, peer),
        of_bound=_share_of_bound(record),
        shares=_shares(record.breakdown),
    )


def _series(record: Record, value: Callable[[Round], float]) -> Series:
    values = {timed.index: value(timed) for timed in record.rounds}
    return Series(values, record.evidence, _launch(record))


def _ratio(record: Record, other: Record | None) -> Estimate | None:
    if other is None:
        return None
    ours, theirs = (_series(side, lambda timed: timed.images_per_s) for side in (record, other))
    return (
        median(paired_ratios(ours, theirs)) if ours.values.keys() & theirs.values.keys() else None
    )


def _share_of_bound(record: Record) -> Estimate | None:
    bounded = [timed for timed in record.rounds if timed.compute_bound_s is not None]
    if not bounded:
        return None
    bound = {timed.index: timed.compute_bound_s or math.nan for timed in bounded}
    walls = _series(record, lambda timed: timed.wall_s)
    return median(paired_ratios(Series(bound, walls.evidence, walls.launch), walls))


def _shares(breakdown: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Fractions of each rank's wall time, averaged over ranks, of the parts known of every rank;
    :data:`UNATTRIBUTED` is what they leave of it, if a part is unknown.  Together they are 1."""
    ranks = list(breakdown.values())
    known = [part for part in PARTS if ranks and all(part in seconds for seconds in ranks)]
    if not known:
        return {}
    shares = {
        part: statistics.fmean(seconds[part] / seconds["wall"] for seconds in ranks)
        for part in known
    }
    if len(known) < len(PARTS):
        shares[UNATTRIBUTED] = 1 - sum(shares.values())
    return shares


def _candidates(record: Record, field: Sequence[Record], system: str) -> list[Record]:
    """Who may stand on the other side of a ratio: of the same batch and evidence class, at its
    first measurement, the one under the system's own name first."""
    fitting = [
        other
        for other in field
        if other.system == system
        and other.ok
        and other.rounds
        and other.batch_size == record.batch_size
        and other.evidence == record.evidence
        and not other.label.endswith(AGAIN)
    ]
    return sorted(fitting, key=lambda other: (other.label != system, other.label))


def _baseline(record: Record, field: Sequence[Record]) -> Record | None:
    return next(iter(_candidates(record, field, "dp")), None)


def _peer(record: Record, field: Sequence[Record]) -> Record | None:
    shape = (record.stages, record.replicas, record.micro_batches)
    return next(
        (
            other
            for other in _candidates(record, field, PEERS.get(record.system, ""))
            if (other.stages, other.replicas, other.micro_batches) == shape
        ),
        None,
    )


def _floor(records: Sequence[Record]) -> tuple[str | None, NoiseFloor | None]:
    """The widest A/A floor of the launch; None if nothing ran twice, or for too few rounds."""
    first = {record.label: record for record in records if record.ok}
    floors: list[tuple[str, NoiseFloor]] = []
    for label, record in sorted(first.items()):
        again = first.get(label + AGAIN)
        if again is None:
            continue
        speeds = [_series(side, lambda timed: timed.images_per_s) for side in (record, again)]
        if len(speeds[0].values.keys() & speeds[1].values.keys()) >= MINIMUM_ROUNDS:
            floors.append((label, noise_floor(*speeds)))
    return max(floors, key=lambda item: item[1].reach, default=(None, None))


def tables(records: Iterable[Record]) -> tuple[Table, ...]:
    """A table a benchmark launch."""
    return tuple(_table(comparison) for comparison in compare(records))


def _table(comparison: Comparison) -> Table:
    rows = tuple(_row(contender, comparison) for contender in comparison.contenders)
    heading = f"{comparison.name} ({comparison.launch})"
    if comparison.source:
        heading += f", reference record of {comparison.source}"
    measured = View(f"Throughput: {heading}", _caption(comparison), _throughput_columns(comparison))
    split = View(
        f"Wall time: {heading}",
        "Percent of the wall time, mean over ranks and rounds. Compute is CPU time; interference "
        "is what background transfers take from it; communication is the exposed part; idle is "
        "waiting for another rank's work; unattributed is what is left where parts are unknown.",
        (
            Column("system", lambda row: str(row["label"]), numeric=False),
            *(Column(part, _part(part)) for part in SHARES),
        ),
        rows=lambda row: row["compute_fraction_of_wall"] is not None,
    )
    views = (measured, split) if any(split.rows(row) for row in rows) else (measured,)
    return Table("throughput", rows, views)


def _part(part: str) -> Callable[[Row], str]:
    return lambda row: percent(row[f"{part}_fraction_of_wall"])


def _row(contender: Contender, comparison: Comparison) -> Row:
    record, floor = contender.record, comparison.floor
    row: dict[str, Cell] = {
        "source": comparison.source or "fresh",
        "benchmark": comparison.launch,
        "name": record.name,
        "label": record.label,
        "system": record.system,
        "status": record.status,
        "evidence": record.evidence.label,
        "plan": plan_line(record),
        "stages": record.stages,
        "replicas": record.replicas,
        "micro_batches": record.micro_batches,
        "batch_size_images": record.batch_size,
        "rounds": len(record.rounds),
        **_estimate("throughput", contender.images_per_s, "_images_per_s"),
        **_estimate("ratio_to_dp", contender.to_dp),
        "ratio_to_dp_reading": _reading(contender.to_dp, floor),
        "peer": contender.peer,
        **_estimate("ratio_to_peer", contender.to_peer),
        "ratio_to_peer_reading": _reading(contender.to_peer, floor),
        **_estimate("share_of_bound", contender.of_bound),
        **{f"{part}_fraction_of_wall": contender.shares.get(part) for part in SHARES},
        "aa_floor_half_width": floor.half_width if floor else None,
        "aa_floor_reach": floor.reach if floor else None,
        "error": record.error,
        "machine": machine_line(record.machine),
    }
    return row


def _estimate(name: str, estimate: Estimate | None, unit: str = "") -> dict[str, Cell]:
    return {
        f"{name}_median{unit}": estimate.median if estimate else None,
        f"{name}_low{unit}": estimate.low if estimate else None,
        f"{name}_high{unit}": estimate.high if estimate else None,
    }


def _reading(ratio: Estimate | None, floor: NoiseFloor | None) -> str | None:
    return read(ratio, floor).value if ratio and floor else None


def _throughput_columns(comparison: Comparison) -> tuple[Column, ...]:
    def speed(row: Row) -> str:
        names = [f"throughput_{end}_images_per_s" for end in ("median", "low", "high")]
        return with_interval(row, names)

    def ratio(name: str) -> Callable[[Row], str]:
        def text(row: Row) -> str:
            shown = _interval(row, name)
            alike = row[f"{name}_reading"] == Reading.INDISTINGUISHABLE.value
            return f"{shown} ≈" if alike and shown != "1" else shown

        return text

    return (
        Column("system", lambda row: str(row["label"]), numeric=False),
        Column("plan", lambda row: str(row["plan"]), numeric=False),
        Column("images/s", speed),
        Column("÷ dp", ratio("ratio_to_dp")),
        Column("÷ peer", ratio("ratio_to_peer")),
        Column("share of bound", lambda row: _interval(row, "share_of_bound")),
        Column("rounds", lambda row: fixed(row["rounds"], 0)),
        Column("evidence", lambda row: str(row["evidence"]), numeric=False),
        Column("status", status_line, numeric=False),
    )


def _interval(row: Row, name: str) -> str:
    names = [f"{name}_{end}" for end in ("median", "low", "high")]
    if all(row[end] == 1 for end in names):
        return "1"  # against itself
    return with_interval(row, names, decimals=3)


def status_line(row: Row) -> str:
    """How a row's runs ended, and why."""
    return f"{row['status']}: {row['error']}" if row["error"] else str(row["status"])


def _caption(comparison: Comparison) -> str:
    floor = comparison.floor
    if floor is None:
        noise = (
            f"A/A floor: unknown (it takes a system X that also runs as X{AGAIN}, for "
            f"{MINIMUM_ROUNDS} rounds or more)"
        )
    else:
        noise = (
            f"A/A floor: ±{percent(floor.reach)} % (half-width {percent(floor.half_width)} %), "
            f"{comparison.pair} against itself, {floor.count} pairs; ≈ marks a ratio inside it"
        )
    machines = dict.fromkeys(machine_line(item.record.machine) for item in comparison.contenders)
    return (
        "Median [95 % interval] over interleaved rounds; ratios of images/s and shares of the "
        "schedule's own bound are paired by round, and above 1 is faster; the peer is torch's "
        f"implementation of the same schedule. {noise}. Machine: {'; '.join(machines)}."
    )


def plan_line(record: Record) -> str:
    """A plan in the papers' letters: S stages, R replicas of each, M micro-batches."""
    parts = (("S", str(record.stages)), ("R", record.replicas), ("M", str(record.micro_batches)))
    return " ".join(f"{letter}={count}" for letter, count in parts if count != "1") or "S=1"


def machine_line(machine: Mapping[str, Any]) -> str:
    """One line of what a record says of its machine; keys it does not know are named."""
    words = {
        "cpu": "{}",
        "cores": "{} cores",
        "memory_gb": "{} GB memory",
        "accelerators": "{}",
        "system": "{}",
    }
    parts = []
    for key, value in machine.items():
        if value not in (None, "", []):
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            parts.append(words.get(key, key + " {}").format(shown))
    return ", ".join(parts) or "not recorded"
