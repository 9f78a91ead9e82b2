"""Dropout whose masks are a function of (seed, update, sample, layer), not of a generator's state.

All integers are unsigned and 32 bits wide.  With mix() the finaliser of MurmurHash3, L a hash of
the layer's name in the whole model and i the flat index within one sample's tensor:

    K[b]    = mix(mix(mix(mix(seed) ^ step) ^ sample[b]) ^ L)
    u[b, i] = mix((i * 0x9E3779B1) ^ K[b])        kept when u >= floor(p * 2^32)

A mask therefore does not depend on how a batch is cut into units and replicas, nor a model into
stages, and recomputation draws it again without any state to restore.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtimes.model.mixing import Words, mix, mix_

__all__ = ["KeyedDropPath", "KeyedDropout", "RandomKey"]

_RAMP = 0x9E3779B1
_MODULUS = 1 << 32


class RandomKey:
    """What the masks of the batch now computed depend on; shared by the layers of one stage.

    ``seed`` of the run, ``step`` the index of the update the batch belongs to (the whole run's,
    from 0), ``samples`` the (n,) indices in the data set of the samples now computed.  Set it
    before each forward, and again before a recomputation.  Belongs to one thread.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step: int | None = None
        self.samples: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self._rows: dict[str, int] = {}
        self._layers: list[int] = []
        self._keys: dict[torch.device, Tensor] = {}
        self._ramps: dict[tuple[int, torch.device], Tensor] = {}

    def set(self, step: int, samples: Tensor | np.ndarray[Any, Any]) -> None:
        """Compute samples ``samples`` ((n,) integers) of update ``step`` from now on."""
        indices = np.asarray(samples.cpu() if isinstance(samples, Tensor) else samples)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise ValueError(
                "sample indices must be integers of shape (n,), "
                f"not {indices.dtype} of shape {indices.shape}"
            )
        self.step = step
        self.samples = indices.astype(np.int64)
        self._keys.clear()

    def register(self, layer: str) -> int:
        """The row that :meth:`sample_keys` is asked for, of the layer of this qualified name."""
        if layer not in self._rows:
            digest = hashlib.sha256(layer.encode()).digest()
            self._rows[layer] = len(self._layers)
            self._layers.append(int.from_bytes(digest[:4], "little"))
            self._keys.clear()
        return self._rows[layer]

    def sample_keys(self, row: int, device: torch.device) -> Tensor:
        """(n,) int32: K of every sample in one layer."""
        keys = self._keys.get(device)
        if keys is None:
            # Of all layers at once: one small computation and one copy to the device a set().
            keys = torch.from_numpy(self._all_keys().view(np.int32)).to(device)
            self._keys[device] = keys
        return keys[row]

    def ramp(self, elements: int, device: torch.device) -> Tensor:
        """(elements,) int32: i * 0x9E3779B1, cached."""
        ramp = self._ramps.get((elements, device))
        if ramp is None:
            words = np.arange(elements).astype(np.uint32) * np.uint32(_RAMP)
            ramp = torch.from_numpy(words.view(np.int32)).to(device)
            self._ramps[elements, device] = ramp
        return ramp

    def _all_keys(self) -> Words:
        if self.step is None or self.samples is None:
            raise ValueError(
                "a random layer was run in training mode before its key was set: call "
                "stage.random.set(step, samples) before the forward, or stage.eval()"
            )
        words = np.array([self.seed % _MODULUS, self.step % _MODULUS], dtype=np.uint32)
        update = mix(mix(words[:1]) ^ words[1:])
        samples = mix(update ^ self.samples.astype(np.uint32))
        layers = np.array(self._layers, dtype=np.uint32)
        return mix(samples[None, :] ^ layers[:, None])


class _Keyed(nn.Module):
    """A random layer called ``name`` in the whole model, dropping with ``probability``.

    The probability is deliberately not called ``p``: attention that hands ``drop.p`` to a fused
    kernel, which would draw masks of its own, must fail instead.
    """

    def __init__(self, probability: float, name: str, random: RandomKey) -> None:
        super().__init__()
        if not 0 < probability <= 1:
            raise ValueError(f"{name}: the probability to drop is {probability}, not in (0, 1]")
        self.probability = probability
        self.name = name
        self.random = random
        self._row = random.register(name)

    def extra_repr(self) -> str:
        return f"probability={self.probability}, name={self.name!r}"

    @torch.no_grad()
    def dropped(self, x: Tensor, elements: int) -> Tensor:
        """(n, elements) bool for ``x`` of n samples: u < floor(p * 2^32)."""
        keys = self.random.sample_keys(self._row, x.device)
        samples = x.shape[0] if x.ndim else 0
        if samples != keys.shape[0]:
            raise ValueError(
                f"{self.name}: a tensor of shape {tuple(x.shape)} came in, but the key was set "
                f"for {keys.shape[0]} samples: the first dimension must be the sample"
            )
        words = mix_(self.random.ramp(elements, x.device) ^ keys[:, None])
        if self.probability == 1:
            return torch.ones_like(words, dtype=torch.bool)
        # Flipping the sign bit of both sides turns the unsigned comparison into the signed one.
        threshold = int(self.probability * _MODULUS) - _MODULUS // 2
        return words.bitwise_xor_(-_MODULUS // 2) < threshold

    @property
    def scale(self) -> float:
        """1/(1-p), what kept elements are multiplied by."""
        return 1 / (1 - self.probability) if self.probability < 1 else 0.0


class KeyedDropout(_Keyed):
    """nn.Dropout with keyed masks.  (n, ...) in and out, first dimension the sample."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        dropped = self.dropped(x, math.prod(x.shape[1:])).view(x.shape)
        # A masked fill keeps one byte an element for the backward, a product by the mask four.
        return (x * self.scale).masked_fill_(dropped, 0)


class KeyedDropPath(_Keyed):
    """timm's DropPath with keyed masks: drops whole samples, by the word u[b, 0]."""

    def __init__(
        self, probability: float, name: str, random: RandomKey, *, scale_by_keep: bool = True
    ) -> None:
        super().__init__(probability, name, random)
        self.scale_by_keep = scale_by_keep

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = self.dropped(x, 1).logical_not().to(x.dtype)
        if self.scale_by_keep:
            kept *= self.scale
        return x * kept.view(-1, *[1] * (x.ndim - 1))
