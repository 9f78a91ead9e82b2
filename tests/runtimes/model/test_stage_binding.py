"""Binding weights: another set for the next forward, none changed for the graphs before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runtimes.model.stack import LayerStack


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).tanh()) + self.shift
        return result


def weights_of(stack: LayerStack, seed: int) -> dict[str, Tensor]:
    tensors = stack.initial_weights(0, len(stack), seed, dtype=torch.float64)
    return {
        name: tensor if name.endswith("shift") else nn.Parameter(tensor)
        for name, tensor in tensors.items()
    }


def test_each_graph_keeps_the_weights_it_was_made_with() -> None:
    stack = LayerStack.from_module(nn.Sequential(Tied(), nn.Linear(3, 2)))
    stage = stack.stage(0, 2)
    x = torch.randn(4, 3, dtype=torch.float64)
    one, other = weights_of(stack, 1), weights_of(stack, 2)
    stage.bind(one)
    first = stage(x).square().sum()
    stage.bind(other)
    second = stage(x).square().sum()
    first.backward()
    assert all(w.grad is not None for w in one.values() if w.requires_grad)
    assert all(w.grad is None for w in other.values())
    second.backward()
    for weights in (one, other):
        a, b, c = (weights[name] for name in ("0.first.weight", "1.weight", "1.bias"))
        plain = [t.detach().requires_grad_() for t in (a, b, c)]
        hidden = (x @ plain[0].T).tanh() @ plain[0].T + 1
        (hidden @ plain[1].T + plain[2]).square().sum().backward()
        for bound, alone in zip((a, b, c), plain, strict=True):
            torch.testing.assert_close(bound.grad, alone.grad, rtol=1e-12, atol=1e-13)


def test_parts_share_what_is_bound() -> None:
    stack = LayerStack.from_module(nn.Sequential(Tied(), nn.Linear(3, 2)))
    stage = stack.stage(0, 2)
    part = stage.part(1, 2)
    weights = weights_of(stack, 1)
    stage.bind(weights)
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = x @ weights["1.weight"].T + weights["1.bias"]
    assert torch.equal(part(x), nn.functional.linear(x, weights["1.weight"], weights["1.bias"]))
    torch.testing.assert_close(part(x), expected)
