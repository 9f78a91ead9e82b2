"""Starts the ranks of a run through an agent process, waits for their end, and tells how it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from experiments.agent import LaunchSpec, Report
from experiments.config import Launch
from experiments.outcome import Outcome, judge, last_words
from experiments.paths import REPOSITORY
from experiments.store import writing

__all__ = ["launch", "launch_spec", "rank_command"]

_PERIOD_S = 0.25
_ENDING_S = 10.0  # What the agent has, beyond the ranks' shutdown time-out, to end and report.

#: Left to itself glibc returns freed memory at limits that move with what was freed before.  GPipe
#: frees a batch's activations at once, and paid for it with none to 9,600 page faults a batch (38
#: of 400 ms of CPU time), depending on which system a benchmark had run just before it.
#: Ranks therefore keep their heap.  32 MB is as high as glibc itself would move the first limit.
_KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}


def rank_command(run_dir: Path) -> tuple[str, ...]:
    """One rank: it imports runtimes only, and reads job.json of the run's directory."""
    return (sys.executable, "-m", "runtimes.execution.rank", str(run_dir))


def launch_spec(section: Launch, command: Sequence[str], processes: int, run: str) -> LaunchSpec:
    """What the agent of this node is to start: its share of the job's processes."""
    return LaunchSpec(
        command=tuple(command),
        ranks=processes // section.nodes,
        # Ranks carry it in their environment, by which they are told from those of other launches.
        launch_id=f"{run}-{uuid.uuid4().hex[:12]}",
        nodes=section.nodes,
        node_rank=section.node_rank,
        address=section.address,
        port=section.port,
        local_address=section.local_address,
        rendezvous=section.rendezvous,
    )


def launch(
    run_dir: Path,
    spec: LaunchSpec,
    *,
    keep_open: Sequence[int] = (),
    stop: threading.Event | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run ``spec`` to its end, all output going to the run's log.

    The agent inherits the descriptors ``keep_open`` (the run's lock).  ``watch`` is called now and
    then; once ``stop`` is set, ranks and agent end, and the outcome is "interrupted".  When this
    returns no process of the launch is left.
    """
    stop = stop or threading.Event()
    inbox, outbox = os.pipe()
    try:
        with writing(run_dir / "log"), (run_dir / "log").open("ab") as log:
            agent = _start(spec, outbox, keep_open, log.fileno())
    finally:
        os.close(outbox)
    with os.fdopen(inbox, "rb") as stream:
        try:
            interrupted = _wait(agent, spec, stop, watch)
        finally:
            # Reached with a living agent only if something broke here.
            if agent.poll() is None:
                agent.kill()
                agent.wait()
            _end_orphans(spec.launch_id)
        text = stream.read()
    return judge(
        _report(text),
        last_words(run_dir),
        agent_signal=signal.Signals(-agent.returncode).name if agent.returncode < 0 else None,
        interrupted=interrupted,
    )


def _report(text: bytes) -> Report | None:
    """None if the agent was killed before it wrote all of one."""
    try:
        return Report.from_json(json.loads(text))
    except ValueError:
        return None


def _start(
    spec: LaunchSpec, outbox: int, keep_open: Sequence[int], log: int
) -> subprocess.Popen[bytes]:
    # One thread a rank: with more, ranks on one host would take the cores from each other.
    environment = {**_KEEP_FREED_MEMORY, **os.environ, "OMP_NUM_THREADS": "1"}
    if spec.nodes == 1:
        # Ranks of one host need no network, and a host name that resolves to nowhere is common.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    arguments = [json.dumps(asdict(spec)), str(os.getpid()), str(outbox)]
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.agent", *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(outbox, *keep_open),
        # The terminal's Ctrl-C is for the launcher alone, which ends the agent in its own time.
        start_new_session=True,
    )


def _wait(
    agent: subprocess.Popen[bytes],
    spec: LaunchSpec,
    stop: threading.Event,
    watch: Callable[[], None],
) -> bool:
    """Wait for the agent's end; True if it was brought about here, because of ``stop``."""
    while agent.poll() is None and not stop.wait(_PERIOD_S):
        watch()
    if agent.poll() is not None:
        return False
    agent.terminate()
    try:
        agent.wait(spec.shutdown_s + _ENDING_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
    return True


def _end_orphans(launch_id: str) -> None:
    """Ranks of an agent that was killed end by themselves; this makes sure, and waits for it."""
    deadline = time.monotonic() + _ENDING_S
    while left := _ranks_of(launch_id):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _ranks_of(launch_id: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get("TORCHELASTIC_RUN_ID") == launch_id
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found
