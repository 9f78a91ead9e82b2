"""Run a function in several processes that form one gloo process group, in fractions of a second.

    results = run_ranks(4, worker, argument)      # calls worker(rank, 4, argument) on each rank

``worker`` is any function at the top level of a file, the test's own file included; it is found by
its file, so neither packages nor sys.path matter.  Arguments and results are pickled (tensors too).
Ranks are forked from one server that has torch and timm loaded; it ends with the test session.
A call ends within ``timeout_s``: then every rank still there is killed, and the error shows where
each of them was.  A rank that outlives the test process is ended by its own alarm.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["RankError", "run_ranks"]

PRELOAD = [
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.pipelining",
    "torch.nn.parallel",
    "timm",
    "timm.models.vision_transformer",
    "pytest",
]
GRACE_S = 0.5  # After a failure: time for the other ranks to say what they saw of it.


class RankError(RuntimeError):
    """One or more ranks failed or ran out of time.  ``rank`` is the first that did."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60
) -> list[Any]:
    """``function(rank, world_size, *args)`` on each rank; the results in the order of ranks.

    Raises RankError with the traceback of the rank that failed first, or with the stacks of all
    ranks when the time is over.  No process is left in any case.
    """
    file, name = inspect.getfile(function), function.__qualname__
    if "<" in name:
        raise ValueError(
            f"{name} must stand at the top level of its file: ranks load it from there"
        )
    payload = pickle.dumps(args)
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as scratch:
        ranks: list[tuple[ForkServerProcess, Connection]] = []
        try:
            for rank in range(world_size):
                receiver, sender = _context().Pipe(duplex=False)
                place = (rank, world_size, scratch, timeout_s)
                process = _context().Process(
                    target=_serve, args=(place, sender, file, function.__module__, name, payload)
                )
                process.start()
                sender.close()
                ranks.append((process, receiver))
            return _collect(ranks, deadline, timeout_s, Path(scratch))
        finally:
            for process, receiver in ranks:
                process.kill()
                process.join()
                receiver.close()


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _collect(
    ranks: list[tuple[ForkServerProcess, Connection]],
    deadline: float,
    timeout_s: float,
    scratch: Path,
) -> list[Any]:
    waiting = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    crashed: list[int] = []
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                succeeded, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                ranks[rank][0].join()
                succeeded, value = False, f"ended with exit code {ranks[rank][0].exitcode}\n"
                crashed.append(rank)
            (results if succeeded else failures)[rank] = value
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        # Peers of a failed rank fail too, after it: the first to report is the cause, unless one
        # could not even report.
        order = crashed + [rank for rank in failures if rank not in crashed]
        texts = [f"rank {rank}: {failures[rank]}" for rank in order]
        raise RankError(order[0], "\n".join(texts))
    if waiting:
        raise RankError(
            min(waiting.values()),
            f"no result of ranks {sorted(waiting.values())} within {timeout_s} s\n"
            + _stacks(ranks, scratch),
        )
    return [results[rank] for rank in range(len(ranks))]


def _stacks(ranks: list[tuple[ForkServerProcess, Connection]], scratch: Path) -> str:
    for process, _ in ranks:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.2)
    files = sorted(scratch.glob("stack-*"))
    return "\n".join(f"rank {file.name.split('-')[1]}: {file.read_text()}" for file in files)


def _serve(
    place: tuple[int, int, str, float],
    sender: Connection,
    file: str,
    module: str,
    name: str,
    payload: bytes,
) -> None:
    """What a rank runs: join the group, call the function, send back what came of it."""
    rank, world_size, scratch, timeout_s = place
    signal.alarm(int(timeout_s) + 10)
    with open(Path(scratch, f"stack-{rank}"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack)
        try:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            if any(interface == "lo" for _, interface in socket.if_nameindex()):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(f"{scratch}/store", world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            # Before the arguments are unpickled: their classes may stand in that file.
            function = functools.reduce(getattr, name.split("."), _module(file, module))
            result = function(rank, world_size, *pickle.loads(payload))
            message = pickle.dumps((True, result))
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        sender.send_bytes(message)
        faulthandler.unregister(signal.SIGUSR1)


def _module(file: str, name: str) -> ModuleType:
    """The module of a file under the name it has in the test process, whatever gave it that."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
