"""What every system declares, beside what a run of it is seen to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from tabulate import tabulate

from experiments.errors import one_line
from experiments.oracles import check_oracles, oracle_error
from runtimes.conformance.cases import CASES, EVALUATED, Case
from runtimes.conformance.observed import observe
from runtimes.conformance.properties import Properties, Taken, declared

__all__ = ["LIMIT", "Row", "conformance_document", "conformance_table", "judge", "judge_all"]

#: Of the weights' relative difference to the oracle's, in float64.
LIMIT = 1e-10
#: Differences below are rounding, and their size is the machine's.
ROUNDING = 1e-12

HEADERS = (
    "system",
    "plan",
    "",
    "gradient delay",
    "live versions",
    "units in flight",
    "F and B",
    "samples an update",
    "averagings",
    "evaluated",
    "oracle",
)


@dataclass(frozen=True)
class Row:
    """``failure``: why the run ended early, if it did; then ``observed`` or ``error`` are None."""

    case: Case
    declared: Properties
    observed: Properties | None = None
    error: float | None = None
    failure: str | None = None

    @property
    def differences(self) -> list[str]:
        """Names of the properties that are not as declared."""
        if self.observed is None:
            return ["failure"]
        found = [
            field.name
            for field in fields(Properties)
            if getattr(self.observed, field.name) != getattr(self.declared, field.name)
        ]
        # Written so that a NaN differs.
        within = self.error is not None and self.error <= LIMIT
        return found + ["oracle"] * (not within)


def judge_all() -> list[Row]:
    """Every case; UserError if the oracles are not there."""
    check_oracles()
    return [judge(case) for case in CASES]


def judge(case: Case) -> Row:
    promised = declared(case)
    seen = error = None
    try:
        seen = observe(case)
        error = oracle_error(case)
    except Exception as failure:
        # Whatever breaks a run is what was observed of it.
        return Row(case, promised, seen, error, f"{type(failure).__name__}: {one_line(failure)}")
    return Row(case, promised, seen, error)


# ---- the document ------------------------------------------------------------------------------


def conformance_document(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "schema": "pipebench.conformance/1",
        "conforms": not any(row.differences for row in rows),
        "oracle_limit": LIMIT,
        "cases": [
            {
                "system": row.case.system,
                "options": dict(row.case.options),
                "replicas": list(row.case.replicas),
                "micro_batches": row.case.micro_batches,
                "pipelines": row.case.pipelines,
                "recompute": row.case.recompute,
                "overlap": row.case.overlap,
                "declared": _plain(asdict(row.declared)),
                "observed": row.observed and _plain(asdict(row.observed)),
                "oracle_error": _plain(row.error),
                "failure": row.failure,
                "differences": row.differences,
            }
            for row in rows
        ],
    }


def _plain(value: Any) -> Any:
    """As JSON has it: lists, and null for what is not finite."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- the table ---------------------------------------------------------------------------------


def conformance_table(rows: Sequence[Row]) -> str:
    """Markdown, two lines a case: as declared, and as observed."""
    lines = []
    for row in rows:
        lines.append(
            [row.case.system, row.case.title, "declared", *_cells(row.declared), f"≤ {LIMIT:.0e}"]
        )
        if row.observed is None:
            lines.append(["", "", "**failed**", row.failure or ""])
            continue
        word = "**observed**" if row.differences else "observed"
        oracle = _below(row.error) if row.error is not None else f"failed: {row.failure}"
        lines.append(["", "", word, *_cells(row.observed), oracle])
    return tabulate(lines, headers=HEADERS, tablefmt="github", disable_numparse=True)


def _cells(properties: Properties) -> list[str]:
    mixed = "same version" if not any(properties.mixed) else f"mixed: {_stages(properties.mixed)}"
    return [
        _segments([_stages(map(_delays, segment)) for segment in properties.delays]),
        _stages(properties.live),
        _stages(properties.in_flight),
        mixed,
        _segments([_stages(map(_samples, segment)) for segment in properties.taken]),
        _segments([_stages(map(_averagings, segment)) for segment in properties.averaged]),
        _segments([f"{count} of {EVALUATED}" for count in properties.evaluated]),
    ]


def _below(error: float) -> str:
    return f"< {ROUNDING:.0e}" if error < ROUNDING else f"{error:.0e}"


def _segments(texts: Sequence[str]) -> str:
    return texts[0] if len(set(texts)) == 1 else "; then ".join(texts)


def _stages(values: Iterable[object]) -> str:
    """Of stage 0, 1, …; once if all are alike."""
    texts = [str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def _delays(updates: Sequence[tuple[float, ...]]) -> str:
    """0,1,2,2,… goes on like that to the end of the segment."""
    words = [" or ".join(f"{delay:g}" for delay in update) or "none" for update in updates]
    while len(words) > 2 and words[-1] == words[-2] == words[-3]:
        words.pop()
    steady = len(words) >= 2 and words[-1] == words[-2]
    return ",".join(words) + ",…" * steady


def _averagings(updates: Sequence[tuple[bool, ...]]) -> str:
    """How many were seen, which is before the update after them."""
    partly = sum(len(moved) > 1 for moved in updates)
    return f"{updates.count((True,))}" + f" (and {partly} of some only)" * (partly > 0)


def _samples(updates: Sequence[Taken]) -> str:
    return ",".join(
        f"{taken.once}" + (f" (and {taken.otherwise} not once)" if taken.otherwise else "")
        for taken in updates
    )
