"""The process that starts this host's ranks, watches them, and reports how each ended.

It is a process of its own so that the launcher may die at any time: the kernel then ends the agent,
and with it the ranks, which ask for the same.  Ranks are started by the agent of torch's
elastic_launch.  By itself that does not see a rank that is merely stopped, does not tell which of
several failures came first, and leaves survivors of a failure 30 seconds whatever its
shutdown_timeout; so it asks a watch here how its ranks are.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from runtimes.execution.rank import AGENT_VARIABLE
from runtimes.execution.status import die_with_parent

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec

__all__ = ["LaunchSpec", "RankExit", "RankWatch", "Report", "main"]

_RENDEZVOUS_S = 120  # For the agents of all nodes to meet.


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


class RankWatch:
    """Looks at ranks, which are children of this process, without reaping them: that is left to
    torch's agent, which then finds the codes too."""

    def __init__(self, spec: LaunchSpec, period_s: float = 0.05):
        self.exits: dict[int, RankExit] = {}
        self._spec, self._period_s = spec, period_s
        self._ranks: dict[int, _Watched] = {}

    def begin(self, pids: Mapping[int, int]) -> None:
        """``pids`` of the ranks of this node, by global rank."""
        self._ranks = {rank: _Watched(pid) for rank, pid in pids.items()}

    def over(self) -> bool:
        """Whether all ranks have ended; brought about here as soon as one has failed."""
        self._look()
        if any(exit.code != 0 for exit in self.exits.values()):
            self._end_survivors()
        return len(self.exits) == len(self._ranks)

    def report(self, error: str | None = None) -> Report:
        exits = sorted(self.exits.values(), key=lambda exit: exit.time)
        return Report(tuple(exits), error)

    @property
    def _alive(self) -> list[_Watched]:
        return [watched for rank, watched in self._ranks.items() if rank not in self.exits]

    def _look(self) -> None:
        for rank, watched in self._ranks.items():
            if rank not in self.exits:
                self._look_at(rank, watched)

    def _look_at(self, rank: int, watched: _Watched) -> None:
        events = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        seen = os.waitid(os.P_PID, watched.pid, events)
        if seen is None:
            watched.stopped_since = None
        elif seen.si_code == os.CLD_STOPPED:
            watched.stopped_since = watched.stopped_since or time.monotonic()
            if time.monotonic() - watched.stopped_since >= self._spec.stopped_s:
                watched.stopped = True
                _signal(watched, signal.SIGKILL)
        else:
            killed = seen.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            code = -seen.si_status if killed else seen.si_status
            self.exits[rank] = RankExit(rank, code, time.time(), watched.stopped, watched.ended)

    def _end_survivors(self) -> None:
        """SIGTERM, and SIGKILL for those that outlive it by more than the shutdown time-out."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for watched in self._alive:
                watched.ended = True
                _signal(watched, number)
            deadline = time.monotonic() + self._spec.shutdown_s
            while self._alive and time.monotonic() < deadline:
                time.sleep(self._period_s)
                self._look()


def _signal(watched: _Watched, number: signal.Signals) -> None:
    """To the rank and what it has started: torch's agent gives each rank a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(watched.pid, number)


def _worker_spec(spec: LaunchSpec) -> WorkerSpec:
    """What torch's elastic_launch makes of its configuration."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    static = spec.rendezvous == "static"
    place = {"rank": spec.node_rank} if static else {"is_host": spec.node_rank == 0}
    address = spec.local_address or (spec.address if spec.nodes == 1 else None)
    meeting = RendezvousParameters(
        backend=spec.rendezvous,
        endpoint=f"{spec.address}:{spec.port}",
        run_id=spec.launch_id,
        min_nodes=spec.nodes,
        max_nodes=spec.nodes,
        local_addr=address,
        timeout=_RENDEZVOUS_S,
        **place,
    )
    program, *arguments = spec.command
    return WorkerSpec(
        role="rank",
        local_world_size=spec.ranks,
        entrypoint=program,
        args=tuple(arguments),
        rdzv_handler=get_rendezvous_handler(meeting),
        max_restarts=0,
        monitor_interval=0.1,
        master_addr=spec.address if static else None,
        master_port=spec.port if static else None,
        local_addr=address,
    )


def _agent(spec: LaunchSpec, watch: RankWatch) -> SimpleElasticAgent:
    """The agent of torch's elastic_launch, but one that asks the watch."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            pids: dict[int, Any] = super()._start_workers(worker_group)
            ranks = [worker.global_rank for worker in worker_group.workers]
            watch.begin({ranks[local]: pid for local, pid in pids.items()})
            return pids

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            if not watch.over():
                return RunResult(state=WorkerState.HEALTHY)
            result: RunResult = super()._monitor_workers(worker_group)
            return result

    # Output is not redirected: it goes where the agent's goes, the run's log.
    logs = DefaultLogsSpecs(log_dir=os.devnull)
    return Agent(_worker_spec(spec), logs, shutdown_timeout=spec.shutdown_s)


def _run(spec: LaunchSpec, watch: RankWatch) -> Report:
    from torch.distributed.elastic.multiprocessing import SignalException

    try:
        agent = _agent(spec, watch)
        agent.run()
        agent.get_worker_group().spec.rdzv_handler.shutdown()
    except SignalException as error:
        return watch.report(f"the launch agent was ended by {error.sigval.name}")
    except Exception as error:  # Whatever it is, the launcher has to tell it to the user.
        return watch.report(f"the ranks did not start: {type(error).__name__}: {error}")
    return watch.report()


def main(spec_text: str, parent: str, report_descriptor: str) -> None:
    """Run the ranks of a spec (JSON) and write the report (JSON) to a file descriptor."""
    die_with_parent(int(parent))
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    values = json.loads(spec_text)
    spec = LaunchSpec(**{**values, "command": tuple(values["command"])})
    report = _run(spec, RankWatch(spec))
    with os.fdopen(int(report_descriptor), "w") as stream:
        json.dump(report.to_json(), stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
