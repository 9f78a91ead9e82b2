"""What messages and reductions between this launch's ranks cost, as the executor makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from runtimes.execution.precision import synchronize
from runtimes.planning.line_fit import LineFit, fit_line
from runtimes.planning.profile import Links

__all__ = ["MESSAGE_BYTES", "REDUCE_BYTES", "LinkTimes"]

#: As many short as long ones, so that latency is found as well as bandwidth.
MESSAGE_BYTES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 4_000_000, 16_000_000)
REDUCE_BYTES = (10_000, 100_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)
#: There and back at a time.
_TRIPS = 5
#: A bucket of gradients is made of so many tensors.
_TENSORS = 12
#: What is under way while a rank computes, and how long it computes.
_STOLEN_BYTES, _PIECES, _COMPUTE_SECONDS = 32_000_000, 8, 0.2


class LinkTimes:
    """Every rank makes one and calls the same methods in the same order; each answers on all."""

    def __init__(self, device: torch.device, *, repeats: int, say: Callable[[str], None]):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._device, self._repeats, self._say = device, repeats, say
        # As the executor: messages of either direction in groups of their own.
        self._forth, self._back = self._group(self.world), self._group(self.world)
        self._groups = {n: self._group(n) for n in range(2, self.world + 1)}

    @staticmethod
    def _group(ranks: int) -> dist.ProcessGroup:
        return cast(dist.ProcessGroup, dist.new_group(list(range(ranks))))

    def measure(self, compute: Callable[[], object]) -> tuple[Links, dict[str, Any]]:
        """The links, and how they were found: fits by pair of neighbours.  ``compute``: a unit of
        what a rank computes, that messages may slow down."""
        fits = {}
        for pair in pairwise(range(self.world)):
            self._say(f"messages between ranks {pair[0]} and {pair[1]}")
            fits[pair] = fit_line(self.message_seconds(pair))
        self._say("all-reduces")
        curves = {n: self.all_reduce_seconds(n) for n in self._groups}
        self._say("computation beside messages")
        stolen = self.stolen_seconds_per_byte(compute)
        links = Links(
            ranks=self.world,
            latency_seconds=median(fit.latency_seconds for fit in fits.values()),
            bandwidth_bytes_per_s=median(fit.bandwidth_bytes_per_s for fit in fits.values()),
            all_reduce_seconds=curves,
            stolen_seconds_per_byte=max(0.0, median(stolen.values())),
        )
        return links, {
            "pairs": [_fit_document(pair, fit) for pair, fit in fits.items()],
            "all_reduce": f"{_TENSORS} tensors flattened, reduced, copied back",
            "stolen_seconds_per_byte": stolen,
        }

    # -- messages --------------------------------------------------------------------------

    def message_seconds(self, pair: tuple[int, int]) -> dict[int, float]:
        """By bytes: half of the time there and back, median of all trips, sizes in turn."""
        buffers = {size: self._buffer(size) for size in MESSAGE_BYTES}
        found: dict[int, list[float]] = {size: [] for size in MESSAGE_BYTES}
        for number in range(self._repeats + 1):
            for size, (out, into) in buffers.items():
                dist.barrier()
                if self.rank in pair:
                    trips = self._there_and_back(pair, out, into)
                    if number:  # The first opens the connection.
                        found[size] += [seconds / 2 for seconds in trips]
        shared: dict[int, float] = self._of(
            pair[0], {size: median(times) for size, times in found.items() if times}
        )
        return shared

    def _there_and_back(self, pair: tuple[int, int], out: Tensor, into: Tensor) -> list[float]:
        """Seconds of each trip; as in a run, receives are posted ahead."""
        first = self.rank == pair[0]
        other = pair[1] if first else pair[0]
        there, back = (self._forth, self._back) if first else (self._back, self._forth)
        received = [dist.irecv(into, src=other, group=back) for _ in range(_TRIPS)]
        seconds = []
        for work in received:
            begin = perf_counter()
            if first:
                sent = dist.isend(out, dst=other, group=there)
                self._wait(work)
            else:
                self._wait(work)
                sent = dist.isend(out, dst=other, group=there)
            seconds.append(perf_counter() - begin)
            self._wait(sent)
        return seconds

    def _buffer(self, size: int) -> tuple[Tensor, Tensor]:
        values = torch.ones(size // 4, device=self._device)
        return values, torch.empty_like(values)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        work.wait()
        synchronize(self._device)

    def _of(self, rank: int, value: Any) -> Any:
        """What this rank found, on all."""
        box = [value]
        dist.broadcast_object_list(box, src=rank, device=self._device)
        return box[0]

    # -- reductions ------------------------------------------------------------------------

    def all_reduce_seconds(self, ranks: int) -> dict[int, float]:
        """By bytes, of the first ``ranks`` ranks: from flattening a bucket of gradients to having
        them back in their places; the slowest rank's, median of the repeats."""
        found: dict[int, list[float]] = {size: [] for size in REDUCE_BYTES}
        buckets = {
            size: [torch.ones(size // 4 // _TENSORS, device=self._device) for _ in range(_TENSORS)]
            for size in REDUCE_BYTES
        }
        for number in range(self._repeats + 1):
            for size, tensors in buckets.items():
                dist.barrier()
                if self.rank < ranks:
                    seconds = self._all_reduce(tensors, self._groups[ranks])
                    if number:
                        found[size].append(seconds)
        shares: list[dict[int, list[float]]] = [{}] * self.world
        dist.all_gather_object(shares, found)
        return {
            size: median(map(max, zip(*(share[size] for share in shares[:ranks]), strict=True)))
            for size in REDUCE_BYTES
        }

    def _all_reduce(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> float:
        synchronize(self._device)
        begin = perf_counter()
        flat = _flatten_dense_tensors(tensors)
        self._wait(dist.all_reduce(flat, group=group, async_op=True))
        torch._foreach_copy_(list(tensors), list(_unflatten_dense_tensors(flat, tensors)))
        synchronize(self._device)
        seconds = perf_counter() - begin
        for tensor in tensors:
            tensor.fill_(1)  # Sums of sums would overflow.
        return seconds

    # -- computing meanwhile ---------------------------------------------------------------

    def stolen_seconds_per_byte(self, compute: Callable[[], object]) -> dict[str, float]:
        """Of rank 0 beside rank 1, for what it sends and for what it receives: the median of how
        much longer the same computation took with messages under way than without, by turns."""
        units = self._of(0, self._units(compute) if self.rank == 0 else None)
        values = torch.ones(_STOLEN_BYTES // _PIECES // 4, device=self._device)
        found = {}
        for what, sender in (("sent", 0), ("received", 1)):
            extra = []
            for number in range(self._repeats + 1):
                alone = self._beside(compute, units, None, values)
                beside = self._beside(compute, units, sender, values)
                if number:
                    extra.append((beside - alone) / _STOLEN_BYTES)
            found[what] = self._of(0, median(extra))
        return found

    def _units(self, compute: Callable[[], object]) -> int:
        compute()
        synchronize(self._device)
        begin = perf_counter()
        compute()
        synchronize(self._device)
        return max(1, round(_COMPUTE_SECONDS / (perf_counter() - begin)))

    def _beside(
        self, compute: Callable[[], object], units: int, sender: int | None, values: Tensor
    ) -> float:
        """Seconds that rank 0 computes, while ``sender`` (0 or 1), if any, sends to the other."""
        dist.barrier()
        if self.rank > 1:
            return 0.0
        begin = perf_counter()
        works = []
        if sender is not None:
            for _ in range(_PIECES):
                if self.rank == sender:
                    works.append(dist.isend(values, dst=1 - sender, group=self._forth))
                else:
                    into = torch.empty_like(values)
                    works.append(dist.irecv(into, src=sender, group=self._forth))
        if self.rank == 0:
            for _ in range(units):
                compute()
            synchronize(self._device)
        seconds = perf_counter() - begin
        for work in works:
            self._wait(work)
        return seconds


def _fit_document(pair: tuple[int, int], fit: LineFit) -> Mapping[str, Any]:
    return {
        "ranks": list(pair),
        "latency_seconds": fit.latency_seconds,
        "bandwidth_bytes_per_s": fit.bandwidth_bytes_per_s,
        "relative_error_by_bytes": dict(fit.errors),
        "largest_relative_error": fit.largest_error,
    }
