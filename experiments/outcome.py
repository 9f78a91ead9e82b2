"""How a launch ended, in one status and one line: from the agent's report and what ranks left."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.agent import RankExit, Report
from experiments.errors import one_line
from runtimes.execution.status import EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, EXIT_TIMEOUT

__all__ = ["EXIT_STATUS", "LastWords", "Outcome", "judge", "last_words"]

#: What the rank program's exit codes mean; any other but 0 is "failed".
EXIT_STATUS = {
    EXIT_TIMEOUT: "timeout",
    EXIT_OUT_OF_MEMORY: "oom",
    EXIT_DIVERGED: "diverged",
}

# A peer's death can bring these about: they name a culprit only by the order in time.
_FOLLOWS = (signal.SIGABRT, signal.SIGPIPE)
_ERROR_LENGTH = 600


@dataclass(frozen=True)
class LastWords:
    """What a rank left: the text of the last action it began, and why it failed, if it did so by
    itself (at ``time``, Unix seconds)."""

    action: str | None = None
    error: str | None = None
    time: float | None = None


@dataclass(frozen=True)
class Outcome:
    """``rank`` and ``signal`` (its name) of the first failure, where there is one."""

    status: str
    error: str | None = None
    rank: int | None = None
    signal: str | None = None
    last_actions: Mapping[int, str] = field(default_factory=dict)

    def to_event(self, now: float) -> dict[str, Any]:
        """The "end" event of events.jsonl."""
        event = {
            "event": "end",
            "t": now,
            "status": self.status,
            "error": self.error,
            "rank": self.rank,
            "signal": self.signal,
        }
        if self.status != "ok" and self.last_actions:
            event["last_actions"] = {str(rank): text for rank, text in self.last_actions.items()}
        return event


def last_words(run_dir: Path) -> dict[int, LastWords]:
    """What each rank of a run left, by rank."""
    ranks = {int(file.stem): file for file in (run_dir / "ranks").glob("[0-9]*.status")}
    errors = {int(file.stem[6:]): file for file in run_dir.glob("error-[0-9]*.json")}
    words = {}
    for rank in sorted(ranks.keys() | errors.keys()):
        action = _status(ranks[rank]) if rank in ranks else None
        if rank not in errors:
            words[rank] = LastWords(action)
            continue
        document = _error(errors[rank])
        words[rank] = LastWords(
            action or document.get("action"),
            one_line(document.get("error") or "failed without a word")[:_ERROR_LENGTH],
            errors[rank].stat().st_mtime,
        )
    return words


def _status(file: Path) -> str | None:
    text = file.read_bytes().partition(b"\0")[0].decode(errors="replace")
    return one_line(text) or None


def _error(file: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(file.read_text())
    except ValueError:
        return {}  # Cut off: the rank died while it wrote.
    return document if isinstance(document, dict) else {}


def judge(
    report: Report | None,
    words: Mapping[int, LastWords],
    *,
    agent_signal: str | None = None,
    interrupted: bool = False,
) -> Outcome:
    """The outcome of a launch; ``report`` is None if the agent ended (by ``agent_signal``) without
    one, and ``interrupted`` if the user asked for the end."""
    actions = {rank: said.action for rank, said in words.items() if said.action}
    if interrupted:
        return Outcome("interrupted", "ended by Ctrl-C or SIGTERM", last_actions=actions)
    if report is None:
        how = f"was killed by {agent_signal}" if agent_signal else "ended without a report"
        error = f"the launch agent {how}, and its ranks ended with it{_listed(actions)}"
        return Outcome("failed", error, None, agent_signal, actions)
    culprit = _culprit(report, words)
    if culprit is None:
        if report.error is None:
            return Outcome("ok")
        return Outcome("failed", one_line(report.error)[:_ERROR_LENGTH], last_actions=actions)
    rank = culprit.rank
    during = f" during {actions[rank]}" if rank in actions else ""
    if culprit.stopped:
        name: str | None = "SIGSTOP"
        text = f"rank {rank} was stopped by SIGSTOP{during}"
    elif culprit.code < 0:
        name = _signal_name(-culprit.code)
        text = f"rank {rank} was killed by {name}{during}"
    else:
        name = None
        said = words[rank].error if rank in words else None
        text = f"rank {rank} failed{during}: {said or f'exit code {culprit.code}, see the log'}"
    status = EXIT_STATUS.get(culprit.code, "failed")
    return Outcome(status, text + _listed(actions), rank, name, actions)


def _culprit(report: Report, words: Mapping[int, LastWords]) -> RankExit | None:
    """The rank whose failure brought down the others.

    One that was stopped, or killed from outside, is to blame whenever it was noticed: nothing that
    a peer does causes that.  Others are ordered by when they failed: the loss of a peer shows as an
    error too, but later.  Those that the agent ended itself come last.
    """
    failed = [exit for exit in report.exits if exit.code != 0]

    def order(exit: RankExit) -> tuple[int, float]:
        said = words.get(exit.rank)
        time = said.time if said is not None and said.time is not None else exit.time
        if exit.ended:
            return 3, time
        outside = exit.code < 0 and -exit.code not in (*_FOLLOWS, signal.SIGTERM)
        if exit.stopped or outside:
            return 0, time
        return (2 if exit.code == -signal.SIGTERM else 1), time

    return min(failed, key=order, default=None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _listed(actions: Mapping[int, str]) -> str:
    if not actions:
        return ""
    listed = ", ".join(f"rank {rank} {action}" for rank, action in sorted(actions.items()))
    return f"; last actions: {listed}"
