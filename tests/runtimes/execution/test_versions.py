"""Weight versions: a step never reaches the weights that a unit in flight was made with."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from runtimes.execution.optimizer import build_optimizer
from runtimes.execution.versions import WeightVersions
from runtimes.job import OptimizerSpec

SGD = OptimizerSpec("sgd", lr=0.1, momentum=0.9, weight_decay=0.01)
ADAMW = OptimizerSpec("adamw", lr=0.1, weight_decay=0.01)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)]
    return torch.nn.Sequential(*layers).double()


def versions_of(net: torch.nn.Module, spec: OptimizerSpec, retain: int = 0) -> WeightVersions:
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    return WeightVersions(weights, partial(build_optimizer, spec=spec), retain=retain)


def batch(k: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(k), dtype=torch.float64)


def delayed_reference(spec: OptimizerSpec, updates: int, delay: int) -> list[Tensor]:
    """w_{k+1} = Opt(w_k, gradient of unit k at w_{max(0, k - delay)}), plain PyTorch."""
    net = model()
    optimizer = build_optimizer(net.parameters(), spec)
    history = [[p.detach().clone() for p in net.parameters()]]
    for k in range(updates):
        old = model()
        with torch.no_grad():
            for p, value in zip(old.parameters(), history[max(0, k - delay)], strict=True):
                p.copy_(value)
        old(batch(k)).square().sum().backward()
        for p, q in zip(net.parameters(), old.parameters(), strict=True):
            p.grad = q.grad
        optimizer.step()
        history.append([p.detach().clone() for p in net.parameters()])
    return history[-1]


@pytest.mark.parametrize("spec", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_stashed_versions_equal_a_delayed_gradient_reference(
    spec: OptimizerSpec, delay: int
) -> None:
    """Forward of unit k on the latest weights, its backward `delay` updates later."""
    net = model()
    versions = versions_of(net, spec)
    flights: list[tuple[int, Tensor]] = []
    updates = 9

    def backward() -> None:
        version, loss = flights.pop(0)
        loss.backward()
        versions.release(version)
        versions.step(versions.take(version))

    for k in range(updates):
        weights: dict[str, Tensor] = dict(versions.acquire(versions.latest))
        loss = functional_call(net, weights, (batch(k),)).square().sum()
        flights.append((versions.latest, loss))
        if k >= delay:
            backward()
    while flights:
        backward()
    assert versions.most_live == delay + 1
    for ours, theirs in zip(
        versions.current.values(), delayed_reference(spec, updates, delay), strict=True
    ):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-14)


def test_without_units_in_flight_the_step_is_in_place() -> None:
    versions = versions_of(model(), SGD)
    before = list(versions.current.values())
    for parameter in before:
        parameter.grad = torch.ones_like(parameter)
    versions.step(versions.take(0))
    assert all(a is b for a, b in zip(before, versions.current.values(), strict=True))
    assert versions.most_live == 1


def test_a_unit_in_flight_keeps_its_weights() -> None:
    versions = versions_of(model(), SGD)
    held = versions.acquire(0)
    copy = {name: p.detach().clone() for name, p in held.items()}
    for parameter in held.values():
        parameter.grad = torch.ones_like(parameter)
    versions.step(versions.take(0))
    assert all(torch.equal(held[name], copy[name]) for name in held)
    assert not any(torch.equal(versions.current[name], copy[name]) for name in held)
    versions.release(0)
    with pytest.raises(KeyError):
        versions[0]


def test_freed_sets_are_used_again() -> None:
    versions = versions_of(model(), SGD)
    addresses = set()
    for _ in range(12):
        version = versions.latest
        for parameter in versions.acquire(version).values():
            parameter.grad = torch.ones_like(parameter)
        addresses.add(next(iter(versions.current.values())).data_ptr())
        versions.step(versions.take(version))
        versions.release(version)
    assert len(addresses) == 2


def test_retained_versions_stay_for_later_forwards() -> None:
    versions = versions_of(model(), SGD, retain=1)
    for update in range(4):
        for parameter in versions[update].values():
            parameter.grad = torch.ones_like(parameter)
        versions.step(versions.take(update))
        assert versions[update] is not versions[update + 1]
    assert versions.most_live <= 3


@pytest.mark.parametrize("spec", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_state_moves_to_another_set_of_versions(spec: OptimizerSpec) -> None:
    def one_step(versions: WeightVersions, k: int) -> None:
        weights: dict[str, Tensor] = dict(versions.current)
        functional_call(net, weights, (batch(k),)).square().sum().backward()
        versions.step(versions.take(versions.latest))

    net = model()
    one, other = versions_of(net, spec), versions_of(net, spec)
    for k in range(3):
        one_step(one, k)
    other.load(dict(one.current), one.optimizer_state())
    assert other.current["0.weight"].data_ptr() != one.current["0.weight"].data_ptr()
    for versions in (one, other):
        one_step(versions, 3)
    for name, parameter in one.current.items():
        assert torch.equal(parameter, other.current[name])
