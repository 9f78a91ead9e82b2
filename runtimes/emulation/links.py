"""Links that only delay: a message is there when a cluster would have delivered it.

B  real bytes of a message       t  the sender's virtual time     f  when a port is free
β  bandwidth, λ latency of its link                               d  when the message is all there

    leaves at max(t, f_out), for B / β      is at the receiver's port λ later
    passes it at max(that, f_in), for B / β, and is all there at d

The message carries d, and its receiver waits until then, or goes on as of then if it really came
later: all ranks read one clock, so they are on one host.  Every port is in a table that the ranks
share (``runtimes.emulation.ports``), the one that the devices of a node share too.  Places in a
queue are taken in the order of the sends.

A reduction begins when the last rank has joined it and the one before it in the group (which is of
one pipeline) is over, and takes ``Cluster.all_reduce_seconds``; it neither slows down messages nor
is slowed down by them, or by another pipeline's.  ``Cluster.action_seconds`` are what the real
runtime takes here by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from runtimes.emulation.device import Device
from runtimes.emulation.limits import check_cluster
from runtimes.emulation.ports import Ports
from runtimes.plan import Plan
from runtimes.planning.profile import Profile
from runtimes.schedule.action import Action, Op
from runtimes.simulation.cluster import Cluster

__all__ = ["Delays", "Joined"]

_HEADER_BYTES = 8


@dataclass
class Joined:
    """A reduction under way: the latest of the times at which ranks joined it, and its cost;
    ``end``: when it is over, once that is known."""

    work: dist.Work
    latest: Tensor
    group: dist.ProcessGroup
    nanoseconds: int
    end: int | None = None


class Delays:
    """Those of one rank.  ``profile``: it tells real bytes, those of the tensors being fewer;
    None: the tensors have them."""

    def __init__(
        self, cluster: Cluster, plan: Plan, rank: int, device: Device, profile: Profile | None
    ):
        check_cluster(cluster, plan.world_size)
        self._cluster, self._plan, self._rank = cluster, plan, rank
        self._device, self._profile = device, profile
        self._ports = Ports(cluster, plan.world_size)
        #: By group: when its last reduction is over.
        self._over: dict[dist.ProcessGroup, int] = {}

    # -- messages --------------------------------------------------------------------------

    def now(self) -> int:
        return self._device.now()

    def open(self) -> None:
        """A program begins."""
        self._device.resume()

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """For a message to be received into."""
        return torch.empty(
            prod(shape) + _HEADER_BYTES // dtype.itemsize, dtype=dtype, device=device
        )

    def sealed(self, action: Action, receiver: int, tensor: Tensor) -> tuple[Tensor, int]:
        """What is sent, and when it will be there."""
        size = self._message_bytes(action, tensor)
        due = self._pass(size, self._rank, receiver)
        message = self.buffer(tensor.shape, tensor.dtype, tensor.device)
        header = _HEADER_BYTES // tensor.dtype.itemsize
        message[:header].view(torch.int64)[0] = due
        message[header:].view(tensor.shape).copy_(tensor)
        return message, due

    def _pass(self, size: float, sender: int, receiver: int) -> int:
        link = self._cluster.link(sender, receiver)
        hold = round(size / link.bandwidth_bytes_per_s * 1e9)
        ports = self._cluster.ports(sender, receiver)
        latency = round(link.latency_seconds * 1e9)
        return self._ports.pass_through(ports, self._device.now(), hold, latency)[1]

    def _transfer(self, size: float, sender: int, receiver: int) -> int:
        return round(self._cluster.link(sender, receiver).seconds(size) * 1e9)

    def taken(self, due: int, action: Action, receiver: int, tensor: Tensor) -> None:
        """A send that ends when it is transferred, whose receiver took it just now: wait for it."""
        size, now = self._message_bytes(action, tensor), self._device.met()
        self._device.sleep_until(max(due, now + self._transfer(size, self._rank, receiver)), now)

    def due(self, message: Tensor) -> int:
        """When what was received is there."""
        return int(message[: _HEADER_BYTES // message.dtype.itemsize].view(torch.int64))

    def opened(
        self,
        action: Action,
        sender: int,
        message: Tensor,
        shape: Sequence[int],
        since: int,
        posted: int | None,
    ) -> Tensor:
        """The message's tensor, when it is there.  ``since``: when the rank began to wait for it.
        ``posted``: a transfer does not begin before its receive was posted then."""
        due = self.due(message)
        tensor = message[_HEADER_BYTES // message.dtype.itemsize :].view(*shape)
        if posted is not None:
            size = self._message_bytes(action, tensor)
            due = max(due, posted + self._transfer(size, sender, self._rank))
        self._device.sleep_until(due, since)
        return tensor

    def _message_bytes(self, action: Action, tensor: Tensor) -> int:
        if self._profile is None:
            return tensor.nbytes
        stage = self._plan.stages[action.stage]
        before = action.op in (Op.RECV_ACT, Op.SEND_GRAD)
        return self._profile.boundaries[stage.first if before else stage.last] * len(tensor)

    def rest(self, arrival: Callable[[float], bool], seconds: float, due: int | None) -> None:
        """As of :meth:`Device.rest`."""
        self._device.rest(arrival, seconds, due)

    def rested(self, due: int, since: int) -> None:
        """What was waited for from ``since`` on was there when it was due, however late it came."""
        self._device.sleep_until(due, since)

    # -- reductions ------------------------------------------------------------------------

    def join(
        self, group: dist.ProcessGroup, ranks: Sequence[int], size: float, calls: int = 1
    ) -> Joined:
        """Join a reduction of so many real bytes in ``calls`` pieces: a collective of its group."""
        latest = torch.tensor(self._device.now(), dtype=torch.int64)
        work = dist.all_reduce(latest, dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        seconds = self._cluster.all_reduce_seconds(ranks, size, calls)
        return Joined(work, latest, group, round(seconds * 1e9))

    def over(self, joined: Joined, since: int) -> None:
        """Wait for the end of a reduction, as of :meth:`end`.  ``since``: when the rank began to
        wait for it."""
        self._device.sleep_until(self.end(joined), since)

    def end(self, joined: Joined) -> int:
        """When a reduction is over; its work is done, and the end of those before it known."""
        if joined.end is None:
            begin = max(int(joined.latest), self._over.get(joined.group, 0))
            self._over[joined.group] = joined.end = begin + joined.nanoseconds
        return joined.end

    def part_bytes(self, action: Action, tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Real bytes, and number of real tensors, of each of the ``tensors`` that an action
        reduces: gradients of its stage's or part's layers, from the last to the first."""
        if self._profile is None:
            return [(tensor.nbytes, 1) for tensor in tensors]
        stage = self._plan.stages[action.stage]
        first, last = (stage.first, stage.last) if action.part is None else stage.parts[action.part]
        layers = [layer for layer in self._profile.layers[first:last] if layer.parameter_bytes]
        assert len(layers) == len(tensors)
        return [(layer.parameter_bytes, layer.parameter_tensors) for layer in reversed(layers)]
