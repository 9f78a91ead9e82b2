"""Throughput of the contenders of a benchmark: images/s, ratios, share of the bound, wall time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.accuracy import status_lines
from analysis.layout import Table, View, percent, with_interval
from analysis.records import PARTS, PEERS, Records
from analysis.rounds import ends, per_round, ratio_of, triple
from analysis.statistics import (
    MINIMUM_ROUNDS,
    NoiseFloor,
    Reading,
    median,
    noise_floor,
    read,
)

__all__ = ["AGAIN", "SHARES", "Comparison", "compare", "tables"]

AGAIN = "-again"
"""The second label of a system that is measured twice: ``X`` and ``X-again`` are an A/A pair."""
UNATTRIBUTED = "unattributed"
"""The wall time left by the parts that are known of a system: torch's schedules do not say when
they wait, and for what."""
SHARES = (*PARTS, UNATTRIBUTED)
FRACTION = "_fraction_of_wall"


@dataclass(frozen=True)
class Comparison:
    """The contenders of one launch; ``floor`` is the A/A floor and ``pair`` who showed it.

    ``contenders`` has a row a system, in the columns of the table; a value is NaN where it was
    not, or cannot be, measured.  ``ratio_to_dp`` and ``ratio_to_peer`` are of images/s, paired by
    round: above 1 is faster.  ``share_of_bound`` is compute_bound_s ÷ wall_s, paired by round: 1
    is as fast as the schedule can be.  The parts of the wall time are fractions, averaged over
    ranks, which add up to 1.
    """

    launch: str
    source: str
    name: str
    contenders: pd.DataFrame
    pair: str | None
    floor: NoiseFloor | None

    @property
    def shares(self) -> pd.DataFrame:
        """The parts of the wall time by label, of the contenders that account for it."""
        shares = self.contenders.set_index("label")[[part + FRACTION for part in SHARES]]
        return shares.set_axis([*SHARES], axis=1).dropna(how="all")


def compare(records: Records) -> tuple[Comparison, ...]:
    """One comparison a benchmark launch, fresh ones first."""
    runs = records.runs
    # Ranks that take turns in one process have no time that is a result.
    bench = runs[(runs["kind"] == "bench") & (runs["transport"] == "distributed")]
    launches = [field for _, field in bench.groupby(["source", "launch"], sort=False)]
    comparisons = [_comparison(records, field) for field in launches]
    comparisons.sort(key=lambda item: (item.source, _natural(item.name), item.launch))
    return tuple(comparisons)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts "m8" before "m16"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _comparison(records: Records, field: pd.DataFrame) -> Comparison:
    ran = field[(field["status"] == "ok") & field.index.isin(records.rounds["run"])]
    pair, floor = _floor(records, ran)
    shares = _shares(records, ran).reindex(field.index).add_suffix(FRACTION)
    rows = [
        {
            "rounds": (records.rounds["run"] == run).sum(),
            **(_measurements(records, ran, run, floor) if run in ran.index else {}),
            **shares.loc[run],
            "aa_floor_half_width": floor.half_width if floor else None,
            "aa_floor_reach": floor.reach if floor else None,
        }
        for run in field.index
    ]
    known = field.rename(columns={"launch": "benchmark", "batch_size": "batch_size_images"})
    contenders = known.join(pd.DataFrame(rows, index=field.index)).reindex(columns=COLUMNS)
    first = field.iloc[0]
    return Comparison(first["launch"], first["source"], first["name"], contenders, pair, floor)


COLUMNS = [
    *("source", "benchmark", "name", "label", "system", "status", "evidence", "plan"),
    *("stages", "replicas", "micro_batches", "batch_size_images", "rounds"),
    *triple("throughput", "_images_per_s"),
    *(*triple("ratio_to_dp"), "ratio_to_dp_reading", "peer"),
    *(*triple("ratio_to_peer"), "ratio_to_peer_reading"),
    *triple("share_of_bound"),
    *(part + FRACTION for part in SHARES),
    *("aa_floor_half_width", "aa_floor_reach", "error", "machine"),
]


def _measurements(
    records: Records, ran: pd.DataFrame, run: int, floor: NoiseFloor | None
) -> dict[str, Any]:
    """The columns that are worked out from the rounds of one contender."""
    speed, bound, wall = (
        per_round(records, ran, run, name) for name in ("images_per_s", "compute_bound_s", "wall_s")
    )
    peer = _partner(ran, run, PEERS.get(str(ran.at[run, "system"]), ""), (*ALIKE, *SHAPE))
    found = {
        "peer": None if peer is None else ran.at[peer, "label"],
        **ends("throughput", median(speed), "_images_per_s"),
        **ends("share_of_bound", ratio_of(bound, wall)),
    }
    partners = {"ratio_to_dp": _partner(ran, run, "dp", ALIKE), "ratio_to_peer": peer}
    for name, other in partners.items():
        if other is not None:
            ratio = ratio_of(speed, per_round(records, ran, other, "images_per_s"))
            found |= ends(name, ratio)
            found[f"{name}_reading"] = read(ratio, floor).value if ratio and floor else None
    return found


ALIKE = ("batch_size", "evidence")
SHAPE = ("stages", "replicas", "micro_batches")


def _partner(ran: pd.DataFrame, run: int, system: str, same: Sequence[str]) -> int | None:
    """Who stands on the other side of a ratio: alike in these columns, at its first measurement,
    the one under the system's own name first."""
    fitting = ran[(ran["system"] == system) & ~ran["label"].str.endswith(AGAIN)]
    fitting = fitting[(fitting[list(same)] == ran.loc[run, list(same)]).all(axis=1)]
    named = fitting.assign(other=fitting["label"] != system).sort_values(["other", "label"])
    return None if named.empty else int(named.index[0])


def _shares(records: Records, ran: pd.DataFrame) -> pd.DataFrame:
    """Fractions of each rank's wall time, averaged over ranks, of the parts known of every rank;
    :data:`UNATTRIBUTED` is what they leave of it, if a part is unknown.  Together they are 1."""
    ranks = records.ranks[records.ranks["run"].isin(ran.index)]
    fractions = ranks[[*PARTS]].div(ranks["wall"], axis=0)
    shares = fractions.groupby(ranks["run"]).mean(skipna=False)
    partly = shares.isna().any(axis=1) & shares.notna().any(axis=1)
    return shares.assign(**{UNATTRIBUTED: (1 - shares.sum(axis=1)).where(partly)})


def _floor(records: Records, ran: pd.DataFrame) -> tuple[str | None, NoiseFloor | None]:
    """The widest A/A floor of the launch; None if nothing ran twice, or for too few rounds."""
    runs = dict(zip(ran["label"], ran.index, strict=True))
    floors = []
    for label in sorted(label for label in runs if label + AGAIN in runs):
        pair = (label, label + AGAIN)
        first, again = (per_round(records, ran, runs[name], "images_per_s") for name in pair)
        if len(first.values.index.intersection(again.values.index)) >= MINIMUM_ROUNDS:
            floors.append((label, noise_floor(first, again)))
    return max(floors, key=lambda item: item[1].reach, default=(None, None))


def tables(records: Records) -> tuple[Table, ...]:
    """A table a benchmark launch."""
    return tuple(_table(comparison) for comparison in compare(records))


def _table(comparison: Comparison) -> Table:
    frame = comparison.contenders
    heading = f"{comparison.name} ({comparison.launch})"
    if comparison.source:
        heading += f", reference record of {comparison.source}"
    views = [View(f"Throughput: {heading}", _caption(comparison), _speeds(frame))]
    shares = comparison.shares
    if not shares.empty:
        cells = shares.map(percent).reset_index(names="system")
        views.append(View(f"Wall time: {heading}", WALL_TIME, cells))
    return Table("throughput", frame, tuple(views))


WALL_TIME = (
    "Percent of the wall time, mean over ranks and rounds. Compute is CPU time, or an emulated "
    "device's; interference is what background transfers take from it; communication is the "
    "exposed part; idle is waiting for another rank's work; unattributed is what is left where "
    "parts are unknown."
)


def _speeds(frame: pd.DataFrame) -> pd.DataFrame:
    speeds = frame[triple("throughput", "_images_per_s")]
    return pd.DataFrame(
        {
            "system": frame["label"],
            "plan": frame["plan"],
            "images/s": [with_interval(*ends) for ends in speeds.itertuples(index=False)],
            "÷ dp": frame.apply(_shown, axis=1, name="ratio_to_dp"),
            "÷ peer": frame.apply(_shown, axis=1, name="ratio_to_peer"),
            "share of bound": frame.apply(_shown, axis=1, name="share_of_bound"),
            "rounds": frame["rounds"].astype(str),
            "evidence": frame["evidence"],
            "status": status_lines(frame),
        }
    )


def _shown(row: Mapping[str, Any], name: str) -> str:
    middle, low, high = (row[column] for column in triple(name))
    if middle == low == high == 1:
        return "1"  # against itself
    alike = row.get(f"{name}_reading") == Reading.INDISTINGUISHABLE.value
    return with_interval(middle, low, high, 3) + (" ≈" if alike else "")


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
    machines = "; ".join(comparison.contenders["machine"].unique())
    return (
        "Median [95 % interval] over interleaved rounds; ratios of images/s and shares of the "
        "schedule's own bound are paired by round, and above 1 is faster; the peer is torch's "
        f"implementation of the same schedule. {noise}. Machine: {machines}."
    )
