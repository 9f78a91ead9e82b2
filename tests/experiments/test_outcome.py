"""Who is to blame when several ranks end, and how it is said in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from experiments.agent import RankExit, Report
from experiments.outcome import LastWords, judge, last_words

WORDS = {
    0: LastWords("p0.s0.r0.RECV_GRAD3<r0[0:16]@1"),
    1: LastWords("p0.s1.r0.B3@1"),
}
TAIL = "; last actions: rank 0 p0.s0.r0.RECV_GRAD3<r0[0:16]@1, rank 1 p0.s1.r0.B3@1"


def test_all_well() -> None:
    outcome = judge(Report((RankExit(0, 0, 1.0), RankExit(1, 0, 1.1))), WORDS)
    assert (outcome.status, outcome.error) == ("ok", None)
    event = outcome.to_event(5.0)
    assert event["t"] == 5.0
    assert "last_actions" not in event


def test_a_killed_rank_is_named_though_its_peer_complained_first() -> None:
    exits = (RankExit(0, 1, 1.0), RankExit(1, -9, 1.1))
    words = WORDS | {0: LastWords(WORDS[0].action, "RuntimeError: Connection closed by peer", 0.9)}
    outcome = judge(Report(exits), words)
    assert (outcome.status, outcome.rank, outcome.signal) == ("failed", 1, "SIGKILL")
    assert outcome.error == "rank 1 was killed by SIGKILL during p0.s1.r0.B3@1" + TAIL


def test_a_rank_that_the_agent_killed_is_not_to_blame() -> None:
    exits = (RankExit(1, 13, 1.0), RankExit(0, -9, 6.0, ended=True))
    words = WORDS | {1: LastWords("p0.s1.r0.F4@1", "ActionTimeoutError: waited 300 s", 1.0)}
    outcome = judge(Report(exits), words)
    assert (outcome.status, outcome.rank, outcome.signal) == ("timeout", 1, None)
    assert outcome.error is not None
    assert "rank 1 failed during p0.s1.r0.F4@1: ActionTimeoutError: waited" in outcome.error


def test_a_stopped_rank_is_named_by_the_signal_that_stopped_it() -> None:
    exits = (RankExit(1, -9, 8.0, stopped=True), RankExit(0, -15, 8.1, ended=True))
    outcome = judge(Report(exits), WORDS)
    assert (outcome.status, outcome.rank, outcome.signal) == ("failed", 1, "SIGSTOP")
    assert outcome.error == "rank 1 was stopped by SIGSTOP during p0.s1.r0.B3@1" + TAIL


def test_of_two_errors_the_first_in_time_counts_not_the_first_seen() -> None:
    exits = (RankExit(0, 1, 3.0), RankExit(1, 1, 3.1))
    words = {
        0: LastWords("a", "Connection reset", 2.9),
        1: LastWords("b", "ValueError: the cause", 2.5),
    }
    outcome = judge(Report(exits), words)
    assert outcome.rank == 1
    assert outcome.error is not None
    assert "ValueError: the cause" in outcome.error


def test_an_abort_may_be_the_consequence_of_an_error() -> None:
    exits = (RankExit(1, -6, 3.0), RankExit(0, 1, 3.5))
    words = {0: LastWords("a", "ValueError: the cause", 2.5)}
    assert judge(Report(exits), words).rank == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [(13, "timeout"), (14, "oom"), (15, "diverged"), (1, "failed"), (7, "failed")],
)
def test_exit_codes_are_statuses(code: int, status: str) -> None:
    outcome = judge(Report((RankExit(0, code, 1.0),)), {})
    assert outcome.status == status
    assert outcome.error == f"rank 0 failed: exit code {code}, see the log"


def test_an_agent_that_was_killed() -> None:
    outcome = judge(None, WORDS, agent_signal="SIGKILL")
    assert (outcome.status, outcome.rank, outcome.signal) == ("failed", None, "SIGKILL")
    assert outcome.error is not None
    assert outcome.error.startswith("the launch agent was killed by SIGKILL")


def test_ranks_that_did_not_start() -> None:
    outcome = judge(Report((), "the ranks did not start: TimeoutError:\n  no store"), {})
    assert outcome.error == "the ranks did not start: TimeoutError: no store"


def test_an_interruption_is_nobodys_failure() -> None:
    outcome = judge(Report((RankExit(0, -15, 1.0, ended=True),)), WORDS, interrupted=True)
    assert (outcome.status, outcome.rank) == ("interrupted", None)


def test_last_words_are_read_from_what_ranks_leave(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "0.status").write_bytes(b"p0.s0.r0.F1@0".ljust(128))
    (tmp_path / "ranks" / "1.status").write_bytes(b"evaluation".ljust(128, b"\0"))
    (tmp_path / "ranks" / "2.status").write_bytes(b"")
    error = tmp_path / "error-1.json"
    error.write_text(json.dumps({"rank": 1, "error": "ValueError: two\nlines", "action": "x"}))
    os.utime(error, (5, 5))
    (tmp_path / "error-3.json").write_text('{"rank"')
    words = last_words(tmp_path)
    assert words[0] == LastWords("p0.s0.r0.F1@0")
    assert words[1] == LastWords("evaluation", "ValueError: two lines", 5.0)
    assert words[2] == LastWords(None)
    assert words[3].error == "failed without a word"
