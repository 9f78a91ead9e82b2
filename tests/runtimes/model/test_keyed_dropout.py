"""Keyed masks: their values, and that nothing but seed, update, sample and layer decides them."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtimes.model import keyed
from runtimes.model.keyed import KeyedDropout, KeyedDropPath, RandomKey

WORD = 0xFFFFFFFF


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B & WORD
    x ^= x >> 13
    x = x * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def keeps(seed: int, step: int, sample: int, layer: str, element: int, p: float) -> bool:
    """One element by Python's integers, straight from the equations."""
    name = int.from_bytes(hashlib.sha256(layer.encode()).digest()[:4], "little")
    key = mix(mix(mix(mix(seed & WORD) ^ step & WORD) ^ sample & WORD) ^ name)
    return mix(element * 0x9E3779B1 & WORD ^ key) >= math.floor(p * 2**32)


def mask(
    shape: tuple[int, ...],
    samples: Sequence[int],
    *,
    seed: int = 5,
    step: int = 3,
    layer: str = "blocks.0.mlp.drop1",
    p: float = 0.3,
    kind: type[KeyedDropout] | type[KeyedDropPath] = KeyedDropout,
) -> Tensor:
    """What the layer makes of ones, (len(samples), *shape)."""
    random = RandomKey(seed)
    module = kind(p, layer, random)
    random.set(step, np.array(samples, dtype=np.int64))
    return module(torch.ones(len(samples), *shape, dtype=torch.float64))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**40 + 7])
def test_masks_are_those_of_the_equations(p: float, seed: int) -> None:
    # 5 x 7 elements: more than a vector register holds, and a remainder.
    samples, step, layer = [0, 3, 2**31 + 5, 2**32 + 1], 2**32 - 2, "blocks.3.attn.proj_drop"
    found = mask((5, 7), samples, seed=seed, step=step, layer=layer, p=p)
    for row, sample in zip(found.flatten(1).tolist(), samples, strict=True):
        kept = [keeps(seed, step, sample, layer, i, p) for i in range(35)]
        assert row == [1 / (1 - p) if keep else 0.0 for keep in kept]


def test_drop_path_uses_the_first_element_of_each_sample() -> None:
    samples = list(range(40))
    found = mask((2, 3), samples, layer="blocks.0.drop_path1", kind=KeyedDropPath, p=0.4)
    for row, sample in zip(found.flatten(1).tolist(), samples, strict=True):
        kept = keeps(5, 3, sample, "blocks.0.drop_path1", 0, 0.4)
        assert row == [1 / 0.6 if kept else 0.0] * 6
    assert 0 < found.count_nonzero() < found.numel()


CUTS = [[8], [1] * 8, [3, 5], [2, 0, 2, 2, 2], [7, 1]]


def assert_cuts_do_not_matter(kind: type[KeyedDropout] | type[KeyedDropPath]) -> None:
    samples = [17, 4, 900, 3, 55, 12, 8, 31]
    whole = mask((3, 5), samples, kind=kind)
    for cut in CUTS:
        bounds = np.cumsum([0, *cut]).tolist()
        pieces = [
            mask((3, 5), samples[low:high], kind=kind) for low, high in itertools.pairwise(bounds)
        ]
        assert torch.equal(torch.cat(pieces), whole), cut
    backwards = mask((3, 5), samples[::-1], kind=kind)
    assert torch.equal(backwards.flip(0), whole)


@pytest.mark.parametrize("kind", [KeyedDropout, KeyedDropPath])
def test_masks_do_not_depend_on_how_a_batch_is_cut(
    kind: type[KeyedDropout] | type[KeyedDropPath],
) -> None:
    assert_cuts_do_not_matter(kind)


def test_masks_differ_between_seeds_updates_samples_and_layers() -> None:
    def distinct() -> int:
        rows = mask((64,), [1, 2])
        others = [
            mask((64,), [1], seed=6),
            mask((64,), [1], step=4),
            mask((64,), [1], layer="blocks.1.mlp.drop1"),
        ]
        return len({tuple(row.tolist()) for row in [*rows, *[other[0] for other in others]]})

    assert distinct() == 5


def set_by_position(self: RandomKey, step: int, samples: Any) -> None:
    ORIGINAL_SET(self, step, np.arange(len(samples)))


def set_without_step(self: RandomKey, step: int, samples: Any) -> None:
    ORIGINAL_SET(self, 0, samples)


def mix_with_signed_shifts(x: Tensor) -> Tensor:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        x ^= x >> shift
        if factor is not None:
            x *= factor - 2**32
    return x


def register_alike(self: RandomKey, layer: str) -> int:
    return ORIGINAL_REGISTER(self, "dropout")


ORIGINAL_SET, ORIGINAL_REGISTER = RandomKey.set, RandomKey.register


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "check"),
    [
        (RandomKey, "set", set_by_position, lambda: assert_cuts_do_not_matter(KeyedDropout)),
        (
            RandomKey,
            "set",
            set_without_step,
            test_masks_differ_between_seeds_updates_samples_and_layers,
        ),
        (
            RandomKey,
            "register",
            register_alike,
            test_masks_differ_between_seeds_updates_samples_and_layers,
        ),
        (
            keyed,
            "mix_",
            mix_with_signed_shifts,
            lambda: test_masks_are_those_of_the_equations(0.5, 0),
        ),
        (keyed, "_RAMP", 1, lambda: test_masks_are_those_of_the_equations(0.5, 0)),
    ],
    ids=["position in the batch", "no step", "no layer", "signed shifts", "ramp"],
)
def test_mutants_are_caught(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mutant: Any, check: Callable[[], None]
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("p", [0.05, 0.3, 0.75])
def test_the_kept_share_is_right(p: float) -> None:
    found = mask((50, 40), range(100), p=p)
    n = found.numel()
    limit = 5 * math.sqrt(p * (1 - p) / n)
    assert abs((found != 0).double().mean() - (1 - p)) < limit
    # No element and no sample is favoured: shares over samples and over elements spread as
    # independent draws do.
    for axis, size in ((0, 100), (1, 2000)):
        shares = (found.flatten(1) != 0).double().mean(dim=axis)
        assert shares.std() == pytest.approx(math.sqrt(p * (1 - p) / size), rel=0.35)
    paths = mask((1,), range(4000), p=p, kind=KeyedDropPath)
    assert abs((paths != 0).double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / 4000)


@pytest.mark.parametrize("kind", [KeyedDropout, KeyedDropPath])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_pass_the_same_mask(
    kind: type[KeyedDropout] | type[KeyedDropPath], dtype: torch.dtype
) -> None:
    random = RandomKey(1)
    module = kind(0.5, "drop", random)
    random.set(0, torch.arange(6))
    x = torch.randn(6, 9, dtype=dtype, requires_grad=True)
    y = module(x)
    y.sum().backward()
    assert x.grad is not None
    assert y.dtype == dtype
    assert set(x.grad.flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(y, x.detach() * x.grad)


def test_a_transposed_tensor_counts_its_elements_in_logical_order() -> None:
    random = RandomKey(1)
    module = KeyedDropout(0.5, "drop", random)
    random.set(0, np.arange(4))
    x = torch.randn(4, 5, 6).transpose(1, 2)
    assert torch.equal(module(x), module(x.contiguous()))


@pytest.mark.parametrize("kind", [KeyedDropout, KeyedDropPath])
def test_probability_one_drops_everything(kind: type[KeyedDropout] | type[KeyedDropPath]) -> None:
    assert mask((3,), [0, 1], p=1.0, kind=kind).count_nonzero() == 0


@pytest.mark.parametrize("kind", [KeyedDropout, KeyedDropPath])
def test_evaluation_is_the_identity_and_needs_no_key(
    kind: type[KeyedDropout] | type[KeyedDropPath],
) -> None:
    x = torch.randn(3, 2)
    assert kind(0.5, "drop", RandomKey(0)).eval()(x) is x


def test_a_layer_registered_after_the_key_was_set_has_its_own_masks() -> None:
    random = RandomKey(5)
    first = KeyedDropout(0.3, "a", random)
    random.set(3, np.array([1, 2]))
    first(torch.ones(2, 8))
    second = KeyedDropout(0.3, "b", random)
    found = second(torch.ones(2, 64, dtype=torch.float64))
    assert torch.equal(found, mask((64,), [1, 2], layer="b"))


def test_a_wrong_key_is_refused() -> None:
    random = RandomKey(0)
    module = KeyedDropout(0.5, "blocks.2.attn.proj_drop", random)
    with pytest.raises(ValueError, match=r"before its key was set: call stage.random.set"):
        module(torch.ones(2, 3))
    random.set(0, np.arange(4))
    with pytest.raises(ValueError, match=r"blocks.2.attn.proj_drop.*\(2, 3\).*for 4 samples"):
        module(torch.ones(2, 3))
    with pytest.raises(ValueError, match="for 4 samples"):
        module(torch.ones(()))
    with pytest.raises(ValueError, match="integers of shape"):
        random.set(0, np.zeros(4))
    with pytest.raises(ValueError, match="integers of shape"):
        random.set(0, np.zeros((4, 1), dtype=np.int64))


def test_masks_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    mask((4,), [0, 1])
    assert torch.equal(torch.get_rng_state(), state)
