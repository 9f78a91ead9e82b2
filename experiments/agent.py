"""The process that starts this host's ranks, watches them, and reports how each ended.

It is a process of its own so that the launcher may die at any time: the kernel then ends the agent,
and with it the ranks, which ask for the same.  Torch's elastic agent starts and stops the ranks; it
does not see one that is merely stopped, does not tell which of several failures came first, and
gives survivors 30 seconds after a failure whatever the shutdown time-out is.  The watch does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from runtimes.execution.status import die_with_parent

__all__ = ["LaunchSpec", "RankExit", "RankWatch", "Report", "main"]


@dataclass(frozen=True)
class LaunchSpec:
    """``command`` starts one of the ``ranks`` of this node; ``launch_id`` is one launch's own.

    After the first failure the others have ``shutdown_s`` seconds to end; a rank that is stopped
    (SIGSTOP) for ``stopped_s`` seconds is a failure.
    """

    command: tuple[str, ...]
    ranks: int
    launch_id: str
    nodes: int = 1
    node_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    local_address: str | None = None
    rendezvous: str = "c10d"
    shutdown_s: int = 5
    stopped_s: float = 5.0


@dataclass(frozen=True)
class RankExit:
    """How a rank of this node ended: ``code`` as of subprocess (negative: a signal), ``time`` in
    Unix seconds.  ``stopped``: by SIGSTOP, before; ``ended``: by the agent, after another's end."""

    rank: int
    code: int
    time: float
    stopped: bool = False
    ended: bool = False


@dataclass(frozen=True)
class Report:
    """What the agent has to say at the end; ``error``: what kept it from starting ranks."""

    exits: tuple[RankExit, ...] = ()
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Report:
        return cls(tuple(RankExit(**entry) for entry in document["exits"]), document["error"])


@dataclass
class _Watched:
    pid: int
    stopped_since: float | None = None
    stopped: bool = False
    ended: bool = False


@dataclass
class RankWatch:
    """Polls the ranks without reaping them, which is left to torch's agent."""

    spec: LaunchSpec
    period_s: float = 0.1
    exits: dict[int, RankExit] = field(default_factory=dict)
    _ranks: dict[int, _Watched] = field(default_factory=dict)
    _failed_at: float | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="rank-watch").start()

    def _run(self) -> None:
        while True:
            self._find()
            for rank, watched in self._ranks.items():
                if rank not in self.exits:
                    self._look(rank, watched)
            self._end_survivors()
            time.sleep(self.period_s)

    def _find(self) -> None:
        """Ranks are the children that the elastic agent told their rank."""
        if len(self._ranks) == self.spec.ranks:
            return
        for child in psutil.Process().children():
            try:
                told = child.environ()
            except psutil.Error:
                continue
            if told.get("TORCHELASTIC_RUN_ID") == self.spec.launch_id:
                self._ranks.setdefault(int(told["RANK"]), _Watched(child.pid))

    def _look(self, rank: int, watched: _Watched) -> None:
        events = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        try:
            seen = os.waitid(os.P_PID, watched.pid, events)
        except ChildProcessError:
            return  # Reaped by torch's agent, which knows the code.
        if seen is None:
            watched.stopped_since = None
        elif seen.si_code == os.CLD_STOPPED:
            watched.stopped_since = watched.stopped_since or time.monotonic()
            if time.monotonic() - watched.stopped_since >= self.spec.stopped_s:
                watched.stopped = True
                self._kill(watched)
        else:
            killed = seen.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            code = -seen.si_status if killed else seen.si_status
            self._record(rank, watched, code)

    def _record(self, rank: int, watched: _Watched, code: int) -> None:
        self.exits[rank] = RankExit(rank, code, time.time(), watched.stopped, watched.ended)
        if code != 0:
            self._failed_at = self._failed_at or time.monotonic()

    def _end_survivors(self) -> None:
        """SIGKILL for those that outlive torch's SIGTERM by more than the shutdown time-out."""
        if self._failed_at is None or time.monotonic() - self._failed_at < self.spec.shutdown_s:
            return
        for rank, watched in self._ranks.items():
            if rank not in self.exits and not watched.ended:
                watched.ended = True
                self._kill(watched)

    @staticmethod
    def _kill(watched: _Watched) -> None:
        try:
            os.kill(watched.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def report(self, failures: Mapping[int, Any], error: str | None = None) -> Report:
        """What was seen, completed by ``failures``: torch's, by rank."""
        exits = dict(self.exits)
        for rank, failure in failures.items():
            if rank not in exits:
                # It ended between two looks.  SIGTERM is what torch's agent ends survivors with.
                watched = self._ranks.get(rank, _Watched(failure.pid))
                ended = watched.ended or failure.exitcode == -signal.SIGTERM
                exits[rank] = RankExit(rank, failure.exitcode, time.time(), watched.stopped, ended)
        return Report(tuple(sorted(exits.values(), key=lambda exit: exit.time)), error)


def _run(spec: LaunchSpec, watch: RankWatch) -> Report:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if spec.rendezvous == "static":
        rendezvous: dict[str, Any] = {"rank": spec.node_rank}
    else:
        rendezvous = {"is_host": spec.node_rank == 0}
    config = LaunchConfig(
        min_nodes=spec.nodes,
        max_nodes=spec.nodes,
        nproc_per_node=spec.ranks,
        # Output is not redirected: it goes where the agent's goes, the run's log.
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        run_id=spec.launch_id,
        rdzv_endpoint=f"{spec.address}:{spec.port}",
        rdzv_backend=spec.rendezvous,
        rdzv_configs={**rendezvous, "timeout": 120},
        max_restarts=0,
        monitor_interval=0.2,
        local_addr=spec.local_address or (spec.address if spec.nodes == 1 else None),
        shutdown_timeout=spec.shutdown_s,
    )
    watch.start()
    program, *arguments = spec.command
    try:
        elastic_launch(config, program)(*arguments)
    except ChildFailedError as error:
        return watch.report(error.failures)
    except SignalException as error:
        return watch.report({}, f"the launch agent was ended by {error.sigval.name}")
    except Exception as error:  # Whatever it is, the launcher has to tell it to the user.
        return watch.report({}, f"the ranks did not start: {type(error).__name__}: {error}")
    return watch.report({})


def main(spec_text: str, parent: str, report_descriptor: str) -> None:
    """Run the ranks of a spec (JSON) and write the report (JSON) to a file descriptor."""
    die_with_parent()
    if os.getppid() != int(parent):
        return  # It died before the kernel could be asked to tell.
    values = json.loads(spec_text)
    spec = LaunchSpec(**{**values, "command": tuple(values["command"])})
    report = _run(spec, RankWatch(spec))
    with os.fdopen(int(report_descriptor), "w") as stream:
        json.dump(report.to_json(), stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
