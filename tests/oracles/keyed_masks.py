"""Keyed dropout as a reference: numpy on whole arrays, written from the equations alone.

    mix     the finaliser of MurmurHash3 on 32-bit words (mod 2^32 throughout)
    L       first 4 bytes, little endian, of SHA-256 of the layer's qualified name
    K[b]    mix(mix(mix(mix(seed) ^ step) ^ sample index) ^ L)
    u[b,i]  mix((i * 0x9E3779B1) ^ K[b]),  i the flat index within one sample's tensor

An element is kept when u >= floor(p * 2^32), and then scaled by 1 / (1 - p).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from timm.layers import DropPath
from torch import Tensor, nn

__all__ = ["Keys", "keep", "layer_key", "mix", "replace_random_layers"]

Words = np.ndarray[Any, np.dtype[np.uint32]]


def mix(words: Words) -> Words:
    """Element by element; an array, because numpy's scalars warn where arrays wrap."""
    x = np.array(words, dtype=np.uint32, copy=True)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


def layer_key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:4], "little")


def keep(
    seed: int, step: int, samples: Sequence[int], layer: str, elements: int, probability: float
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """(len(samples), elements): which elements of which sample stay."""
    word = mix(np.array([seed % 2**32], dtype=np.uint32))
    word = mix(word ^ np.uint32(step % 2**32))
    indices = (np.asarray(samples, dtype=np.int64) % 2**32).astype(np.uint32)
    keys = mix(mix(word ^ indices) ^ np.uint32(layer_key(layer)))
    places = np.arange(elements, dtype=np.uint32) * np.uint32(0x9E3779B1)
    words = mix(places[None, :] ^ keys[:, None])
    kept: np.ndarray[Any, np.dtype[np.bool_]] = words >= np.uint32(math.floor(probability * 2**32))
    return kept


class Keys:
    """What the masks of the present update depend on; the trainer sets it before each forward."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.samples: Sequence[int] = ()


class _Masked(nn.Module):
    def __init__(self, name: str, probability: float, per_sample: bool, keys: Keys) -> None:
        super().__init__()
        self.name, self.probability, self.per_sample, self.keys = (
            name,
            probability,
            per_sample,
            keys,
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return x
        keys, elements = self.keys, 1 if self.per_sample else x[0].numel()
        kept = keep(keys.seed, keys.step, keys.samples, self.name, elements, self.probability)
        shape = (x.shape[0],) + (1,) * (x.ndim - 1) if self.per_sample else x.shape
        return x * torch.from_numpy(kept).reshape(shape).to(x.dtype) / (1.0 - self.probability)


def replace_random_layers(model: nn.Module, keys: Keys) -> None:
    """Put masks where ``model`` has nn.Dropout or DropPath, and switch fused attention off, which
    would bypass the dropout module of the attention map."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        if type(module) is nn.Dropout:
            mask = _Masked(name, module.p, False, keys)
        elif type(module) is DropPath:
            assert module.scale_by_keep
            mask = _Masked(name, module.drop_prob, True, keys)
        else:
            continue
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, mask)
