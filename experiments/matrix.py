"""Many runs: which they are, in which order, and what came of each."""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from experiments.config import Config
from experiments.errors import UserError, did_you_mean
from experiments.loading import config_names, load, load_runs, tiers

__all__ = ["Entry", "Row", "exit_code", "run_all", "select"]


@dataclass(frozen=True)
class Entry:
    """One run of the matrix; ``title`` is the config's, with the seed where there are more.

    ``settings`` were applied to the config; values of a ``best_of`` are still to be put in.
    """

    title: str
    config: Config
    settings: tuple[str, ...] = ()

    @property
    def timed(self) -> bool:
        return self.config.kind == "bench"

    @property
    def turn(self) -> int:
        """Entries of one turn may run at a time: what takes values from a sweep comes after it,
        what is timed last."""
        return 2 if self.timed else int(self.config.waits_for is not None)


@dataclass(frozen=True)
class Row:
    """What came of an entry: its results, or the error that kept it from starting."""

    title: str
    results: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None

    @property
    def status(self) -> str:
        """The worst of its results: "refused" if it did not start, "interrupted" if it was not
        let to."""
        if self.error is not None:
            return "refused"
        found = {str(result["status"]) for result in self.results}
        good = ("ok", "skipped_hardware")
        return next(
            iter(sorted(found - set(good)) or [status for status in good if status in found]),
            "interrupted",
        )


def select(tier: str | None, only: str | None = None, settings: Sequence[str] = ()) -> list[Entry]:
    """The runs of a tier (None: of all) in the order of their turns and names.

    ``only`` is a glob that the config's name must match.  UserError if there are none.
    """
    names = config_names()
    if tier is not None:
        if tier not in tiers():
            raise UserError(f"unknown tier {tier!r}{did_you_mean(tier, tiers())}")
        names = [name for name in names if tier in load(name).tiers]
    chosen = [name for name in names if only is None or fnmatch.fnmatchcase(name, only)]
    if not chosen:
        where = f" of tier {tier!r}" if tier is not None else ""
        raise UserError(f"--only {only!r} matches no config{where}{did_you_mean(str(only), names)}")
    entries = []
    for name in chosen:
        runs = load_runs(name, settings)
        several = len({config.train.seed for config in runs}) > 1
        for config in runs:
            title = f"{config.title}#{config.train.seed}" if several else config.title
            entries.append(Entry(title, config, tuple(settings)))
    return sorted(entries, key=lambda entry: entry.turn)


def run_all(
    entries: Sequence[Entry],
    run: Callable[[Entry], list[dict[str, Any]]],
    *,
    jobs: int = 1,
    stop: threading.Event | None = None,
) -> list[Row]:
    """``run`` every entry, in order; up to ``jobs`` at a time of those that are not timed.

    A failure is a row and keeps no other from running.  Once ``stop`` is set, no more are started;
    those that were not have no results.
    """
    stop = stop or threading.Event()

    def one(entry: Entry) -> Row:
        if stop.is_set():
            return Row(entry.title)
        try:
            return Row(entry.title, run(entry))
        except UserError as error:
            return Row(entry.title, error=str(error))

    rows: list[Row] = []
    for _, group in groupby(entries, key=lambda entry: entry.turn):
        together = list(group)
        with ThreadPoolExecutor(1 if together[0].timed else jobs) as pool:
            rows += pool.map(one, together)
    return rows


def exit_code(statuses: Sequence[str]) -> int:
    """0 done (or not for this hardware), 1 something failed, 3 interrupted; 2 if everything was
    refused for what the user asked."""
    if "interrupted" in statuses:
        return 3
    if statuses and all(status == "refused" for status in statuses):
        return 2
    return int(any(status not in ("ok", "skipped_hardware") for status in statuses))
