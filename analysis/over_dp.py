"""÷ dp of simulated rows, for whoever prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.evidence import Evidence, Quantity, ratio

__all__ = ["ratios_to_dp"]


def ratios_to_dp(rows: Sequence[Mapping[str, Any]], evidence: Evidence) -> list[float]:
    """Of each row's images/s to those of the first dp of the same batch size and bandwidth; NaN
    where one of the two has none."""
    places = [(row["batch_size"], row["bandwidth_share"]) for row in rows]
    speeds = [Quantity(row.get("images_per_s", float("nan")), evidence) for row in rows]
    base: dict[tuple[Any, ...], Quantity] = {}
    for row, place, speed in zip(rows, places, speeds, strict=True):
        if row["system"] == "dp" and "images_per_s" in row:
            base.setdefault(place, speed)
    return [
        ratio(speed, base[place]).value if place in base else float("nan")
        for place, speed in zip(places, speeds, strict=True)
    ]
