"""When the ports of a cluster are free again: one table for all ranks of a host."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Sequence

import torch.distributed as dist

from runtimes.simulation.cluster import Cluster, Port

__all__ = ["Ports"]

_TIME = struct.Struct("q")


class Ports:
    """A mapped file with the time at which each port is free, and its lock.

    Every rank of the process group makes one at the same place: a collective.  Nothing is left of
    the file when that is done, but for the ranks that have it open.
    """

    def __init__(self, cluster: Cluster, ranks: int):
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        ports = sorted({port for pair in pairs for port in cluster.ports(*pair)})
        self._place = {port: number * _TIME.size for number, port in enumerate(ports)}
        name: list[str] = [""]
        if dist.get_rank() == 0:
            descriptor, path = tempfile.mkstemp(prefix="pipebench-ports-")
            os.truncate(descriptor, max(1, len(ports)) * _TIME.size)
            os.close(descriptor)
            name = [path]
        dist.broadcast_object_list(name)
        self._file = open(name[0], "r+b")  # noqa: SIM115 - as long as this.
        self._free = mmap.mmap(self._file.fileno(), 0)
        dist.barrier()
        if dist.get_rank() == 0:
            os.unlink(name[0])

    def pass_through(
        self, ports: Sequence[Port], ready: int, hold: int, latency: int
    ) -> tuple[int, int]:
        """Take one port after the other, for ``hold`` ns each, as soon as it is free.

        The message is at the first port at ``ready``, and ``latency`` ns after it has begun to
        pass that at the others, which it passes at the same time if they are free.  Returns when it
        began to leave, and when it is all there.
        """
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            begin, earliest = ready, ready
            for number, port in enumerate(ports):
                place = self._place[port]
                (free,) = _TIME.unpack_from(self._free, place)
                # What takes no time fits in at any time.
                at = max(earliest, free) if hold else earliest
                _TIME.pack_into(self._free, place, max(free, at + hold))
                if number == 0:
                    begin, earliest = at, at + latency
                else:
                    earliest = at
            return begin, earliest + hold
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
