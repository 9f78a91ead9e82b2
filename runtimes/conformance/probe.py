"""Layers whose weights count the updates and the samples in them, and which say what they see.

A probe's only parameter is its *ledger* w, which begins as (0, number of the probe, 0, …, 0).  With
g_b the weight of sample i_b of a unit in the loss (1 / samples of the global batch),

    ∂/∂w_version = −Σ_b g_b        ∂/∂w_number = 0        ∂/∂w_taken[i] = −Σ_{b: i_b = i} g_b

so that under plain SGD at rate 1 w_version *is* the number of the weights' version, if and only if
every update took in a whole batch with weight 1, and what an update added to w_taken is the samples
that it took in, each with its weight.  Nothing else can tell: no counter of the runtime is read.

An activation is a row (0, i, v_0, v_1, …) a sample: its index in the data set and its *trail*, the
version read at each probe that it crossed.  Its gradient is (g, i, 0, 0, …).  What crosses stages
thus carries its identity, both ways.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runtimes.conformance.recorder import NUMBER, SAMPLES, VERSION, Kind, Recorder

__all__ = ["Probe", "Readout", "activations", "probed_model"]

#: Columns of an activation and of its gradient; probe p writes column TRAIL + p.
WEIGHT, SAMPLE, TRAIL = 0, 1, 2


def activations(ids: Tensor, probes: int) -> Tensor:
    """(n, 2 + probes): the model's input for samples ``ids`` (n,)."""
    rows = torch.zeros(len(ids), TRAIL + probes, dtype=torch.float64)
    rows[:, SAMPLE] = ids
    return rows


def probed_model(probes: int, recorder: Recorder) -> nn.Sequential:
    """``probes`` probes and a readout: one layer more than probes."""
    layers = [Probe(number, recorder) for number in range(probes)]
    return nn.Sequential(*layers, Readout(recorder))


class _Cross(torch.autograd.Function):
    """Stamps the ledger's version on every row; the gradient of a row goes on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ledger: Tensor, probe: Probe) -> Tensor:
        ctx.probe = probe
        ctx.save_for_backward(ledger)
        stamped = x.clone()
        stamped[:, TRAIL + int(ledger[NUMBER])] = ledger[VERSION]
        return stamped

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        # The version is read from the tensor that autograd kept for this graph.
        (ledger,) = ctx.saved_tensors
        weights, ids = gradient[:, WEIGHT], gradient[:, SAMPLE].long()
        ctx.probe.recorder.crossing("backward", id(ctx.probe), ids, ledger)
        ctx.probe.kept.discard(tuple(ids.tolist()))
        shares = torch.zeros_like(ledger)
        shares[VERSION] = -weights.sum()
        shares.index_add_(0, SAMPLES + ids, -weights)
        return gradient, shares, None


class Probe(nn.Module):
    """(n, 2 + probes) in and out.  ``kept``: units whose forward kept no graph, and who are to be
    computed again before their backward."""

    def __init__(self, number: int, recorder: Recorder) -> None:
        super().__init__()
        self.number, self.recorder = number, recorder
        self.kept: set[tuple[int, ...]] = set()
        self.ledger = nn.Parameter(torch.empty(SAMPLES + recorder.samples))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.ledger.zero_()
            self.ledger[NUMBER] = self.number

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return x.clone()
        self.recorder.used(id(self), self.ledger, x[:, SAMPLE].long(), training=self.training)
        if self.training:
            self._record(x[:, SAMPLE].long())
        stamped: Tensor = _Cross.apply(x, self.ledger, self)
        return stamped

    def _record(self, ids: Tensor) -> None:
        unit = tuple(ids.tolist())
        again = torch.is_grad_enabled() and unit in self.kept
        if not torch.is_grad_enabled():
            self.kept.add(unit)
        kind: Kind = "recomputation" if again else "forward"
        self.recorder.crossing(kind, id(self), ids, self.ledger)


class _Read(torch.autograd.Function):
    """Two equal logits, whose cross entropy has a gradient of ∓ 1/2, whatever the label, times the
    weight of the sample in the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_zeros(len(x), 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        rows = torch.zeros_like(x)
        rows[:, WEIGHT] = gradient.abs().sum(1)
        rows[:, SAMPLE] = x[:, SAMPLE]
        return rows


class Readout(nn.Module):
    """(n, 2 + probes) → (n, 2) logits for the criterion, the same for every sample."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            self.recorder.arrival(self.training, x[:, SAMPLE], x[:, TRAIL:].detach())
        logits: Tensor = _Read.apply(x)
        return logits
