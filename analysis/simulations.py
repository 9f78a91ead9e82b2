"""What `pipebench simulate` wrote: systems over batch sizes and bandwidths, beside the paper."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.evidence import Evidence
from analysis.layout import Table, View, fixed, percent
from analysis.over_dp import ratios_to_dp

__all__ = ["SCHEMA", "Study", "load_studies", "simulated_by_run", "simulated_runs", "tables"]

SCHEMA = "pipebench.simulation/1"
NESTED = ["plan", "parts", "options", "numbers"]
NUMBERS = ("all_reduce_to_compute", "transfer_to_stage")
CAPTION = (
    "Steady state, one batch after the other; ÷ dp at the same batch size and bandwidth. Links: "
    "the share of their nominal bandwidth that they reach. Idle and exposed (communication, "
    "reduction): percent of the time, mean over devices. All-reduce ÷ compute of a batch; transfer "
    "of a unit's activations ÷ a stage's computation of it. GB: of the fullest device."
)


@dataclass(frozen=True)
class Study:
    """One document, written at Unix time ``t``.  ``rows`` has a row a contender, batch size and
    share of bandwidth; ``paper`` is what a paper says of a ratio, if it does."""

    name: str
    source: str
    t: float
    rows: pd.DataFrame
    inputs: str
    paper: Mapping[str, Any] | None


def load_studies(results_dir: Path) -> list[Study]:
    """Fresh ones, and of reference/ those that there is no fresh one of.

    Raises:
        ValueError: a file is broken; the message names it.
    """
    found: dict[str, Study] = {}
    for source, directory in (
        ("", results_dir / "simulated"),
        ("reference", results_dir / "reference" / "simulated"),
    ):
        for path in sorted(directory.glob("*.json")):
            study = _study(path, source)
            found.setdefault(study.name, study)
    return [found[name] for name in sorted(found)]


def simulated_runs(results_dir: Path) -> pd.DataFrame:
    """Of all studies the rows of what may also have run as it was simulated: what fits, at the
    links' whole bandwidth.  ``run`` and ``label`` say which run it is, ``written`` when the study
    was, in Unix time."""
    studies = [study.rows.assign(written=study.t) for study in load_studies(results_dir)]
    if not studies:
        return pd.DataFrame(columns=["run", "label"])
    rows = pd.concat(studies)
    return rows[(rows["status"] == "ok") & (rows["bandwidth_share"] == 1)]


def simulated_by_run(results_dir: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """:func:`simulated_runs` by run and label."""
    rows = simulated_runs(results_dir).to_dict("records")
    return {(row["run"], row["label"]): {str(k): v for k, v in row.items()} for row in rows}


def _study(path: Path, source: str) -> Study:
    try:
        document = json.loads(path.read_bytes())
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']!r}, not {SCHEMA}")
        rows = pd.DataFrame(document["rows"])
        evidence = Evidence.parse(document["evidence"])
        return Study(
            document["name"],
            source,
            document["t"],
            rows.assign(
                name=document["name"],
                source=source,
                evidence=evidence.label,
                ratio_to_dp=ratios_to_dp(document["rows"], evidence),
                memory_gb=rows["memory_bytes"].map(max) / 1e9,
                **_numbers(rows),
                profile_reference_s=document["profile"].get("reference_seconds"),
            ),
            _inputs(document),
            document["paper"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is broken: {error!r}; simulate it anew, or delete it") from error
    except ValueError as error:
        raise ValueError(f"{path} is broken: {error}; simulate it anew, or delete it") from error


def _numbers(rows: pd.DataFrame) -> dict[str, list[float]]:
    """Those without a dimension; NaN for what does not fit, and in files that do not have them."""
    told = rows.get("numbers", pd.Series(None, rows.index, dtype=object))
    found = [entry if isinstance(entry, dict) else {} for entry in told]
    return {name: [entry.get(name, float("nan")) for entry in found] for name in NUMBERS}


def _inputs(document: Mapping[str, Any]) -> str:
    """What is measured and what assumed, in a sentence each."""
    profile, cluster = document["profile"], document["cluster"]
    kind = {"measured": "measured on", "analytic": "computed (roofline) for"}[profile["source"]]
    known = [f"{key} {value}" for key, value in profile["provenance"].items() if _short(value)]
    told = [f"{key}: {value}" for key, value in cluster["provenance"].items()]
    return (
        f"Layers {kind} {profile['device']} in {profile['precision']} ({', '.join(known)}). "
        f"Cluster {cluster['name']} ({'; '.join(told)})."
    )


def _short(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def tables(results_dir: Path) -> tuple[Table, ...]:
    """A table for each study."""
    return tuple(
        Table(
            "simulated",
            study.rows.drop(columns=NESTED, errors="ignore"),
            (_view(study),),
        )
        for study in load_studies(results_dir)
    )


def _view(study: Study) -> View:
    rows = study.rows
    caption = [CAPTION, study.inputs]
    if study.paper is not None:
        paper = study.paper
        caption.append(
            f"Paper: {paper['of']} ÷ {paper['over']} = {paper['ratio']} ({paper['source']})."
        )
    heading = f"Simulated: {study.name}" + (f", {study.source} record" if study.source else "")
    return View(heading, " ".join(caption), _cells(rows))


def _cells(rows: pd.DataFrame) -> pd.DataFrame:
    parts = [part if isinstance(part, dict) else {} for part in rows["parts"]]
    exposed = [
        sum(part[key] for key in ("communication", "reduce")) if part else None for part in parts
    ]
    return pd.DataFrame(
        {
            "system": rows["label"],
            "batch": rows["batch_size"].astype(str),
            "links": [f"{share:g}×" for share in rows["bandwidth_share"]],
            "ms/batch": [fixed(seconds * 1e3, 2) for seconds in rows["batch_seconds"]],
            "images/s": [fixed(speed, 1) for speed in rows["images_per_s"]],
            "÷ dp": [fixed(value) for value in rows["ratio_to_dp"]],
            "idle": [percent(part.get("idle")) for part in parts],
            "exposed": [percent(share) for share in exposed],
            "all-reduce ÷ compute": [fixed(value, 3) for value in rows[NUMBERS[0]]],
            "transfer ÷ stage": [fixed(value, 4) for value in rows[NUMBERS[1]]],
            "GB": [fixed(size, 1) for size in rows["memory_gb"]],
            "evidence": rows["evidence"],
            "status": rows["status"],
        }
    )
