"""Keyed augmentation: what it does to one sample, and that no other sample has a say in it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtimes.execution.augmentation import Augmenter, words
from runtimes.job import Augmentation


def one_word(seed: int, epoch: int, sample: int, draw: str) -> int:
    """The definition, on Python's integers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    domain = hashlib.sha256(f"augmentation.{draw}".encode()).digest()
    x = mix(seed % 2**32) ^ epoch
    x = mix(x) ^ sample
    return mix(mix(x) ^ int.from_bytes(domain[:4], "little"))


@given(
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 10_000),
    samples=st.lists(st.integers(0, 2**31), min_size=1, max_size=9),
    draw=st.sampled_from(["flip", "crop.row", "cutout"]),
)
def test_words_are_the_defined_ones_sample_by_sample(
    seed: int, epoch: int, samples: list[int], draw: str
) -> None:
    seen = words(seed, epoch, np.array(samples), draw)
    assert seen.tolist() == [one_word(seed, epoch, sample, draw) for sample in samples]


def test_words_are_uniform_and_draws_are_independent() -> None:
    samples = np.arange(4096)
    flip = words(0, 3, samples, "flip") / 2**32
    assert abs(flip.mean() - 0.5) < 0.02
    counts, _ = np.histogram(flip, bins=16, range=(0, 1))
    assert (((counts - 256) ** 2) / 256).sum() < 45, "chi-square, 15 degrees of freedom"
    for other in (words(0, 3, samples, "cutout"), words(0, 4, samples, "flip")):
        assert abs(np.corrcoef(flip, other)[0, 1]) < 0.06


def augmenter(epochs: int = 10, size: int = 8, **changes: object) -> Augmenter:
    return Augmenter(Augmentation(**changes), seed=5, epochs=epochs, height=size, width=size)  # type: ignore[arg-type]


def test_a_flip_mirrors_about_half_of_the_samples() -> None:
    images = np.random.default_rng(0).integers(0, 256, (400, 2, 8, 8), np.uint8)
    moved = augmenter(flip=True).move(images, np.arange(400), epoch=2)
    mirrored = (moved == images[..., ::-1]).all(axis=(1, 2, 3))
    same = (moved == images).all(axis=(1, 2, 3))
    assert (mirrored ^ same).all()
    assert 150 < mirrored.sum() < 250


def test_a_crop_is_a_window_of_the_padded_image_at_every_offset() -> None:
    images = np.random.default_rng(0).integers(1, 256, (500, 2, 8, 8), np.uint8)
    moved = augmenter(crop_padding=2).move(images, np.arange(500), epoch=2)
    padded = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)))
    offsets = []
    for sample, image in enumerate(moved):
        found = [
            (row, column)
            for row in range(5)
            for column in range(5)
            if np.array_equal(image, padded[sample, :, row : row + 8, column : column + 8])
        ]
        assert len(found) == 1
        offsets += found
    counts = np.unique(offsets, axis=0, return_counts=True)[1]
    assert len(counts) == 25
    assert counts.min() > 5


def test_crop_then_flip_mirrors_the_window() -> None:
    images = np.random.default_rng(0).integers(1, 256, (50, 1, 8, 8), np.uint8)
    samples = np.arange(50)
    cropped = augmenter(crop_padding=2).move(images, samples, epoch=0)
    both = augmenter(crop_padding=2, flip=True).move(images, samples, epoch=0)
    for one, other in zip(cropped, both, strict=True):
        assert np.array_equal(one, other) or np.array_equal(one[..., ::-1], other)


@pytest.mark.parametrize("side", [1, 3, 4, 8])
def test_cut_out_zeroes_a_square_and_nothing_else(side: int) -> None:
    images = torch.ones(1000, 2, 8, 8)
    cut = augmenter(cutout=side, epochs=1).cut(images, np.arange(1000), epoch=1)
    assert set(cut.unique().tolist()) <= {0.0, 1.0}
    seen = set()
    for image in cut:
        assert torch.equal(image[0], image[1]), "all channels are cut alike"
        rows, columns = np.nonzero(image[0].numpy() == 0)
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert len(rows) == height * width, "a rectangle"
        at_an_edge = {0, 7} & {rows.min(), rows.max(), columns.min(), columns.max()}
        assert max(height, width) <= side
        assert at_an_edge or height == width == side
        seen.add((rows.min(), rows.max(), columns.min(), columns.max()))
    assert len(seen) == 64, "one square for each pixel as its centre"
    # Of the 8 rows that the centre may be in, those whose square covers a given row.
    covering = [
        sum(0 <= row - centre + side // 2 < side for centre in range(8)) for row in range(8)
    ]
    touched = (cut[:, 0] == 0).any(dim=2).float().mean(dim=0)
    np.testing.assert_allclose(touched, np.array(covering) / 8, atol=0.06)


def test_the_share_of_cut_samples_is_the_share_of_epochs_passed() -> None:
    ones = torch.ones(2000, 1, 4, 4)
    augment = augmenter(cutout=2, size=4, epochs=10)
    shares = []
    for epoch in (0, 3, 9, 10):
        cut = augment.cut(ones.clone(), np.arange(2000), epoch)
        shares.append(float((cut == 0).any(dim=(1, 2, 3)).float().mean()))
    assert shares[0] == 0
    assert shares[3] == 1
    np.testing.assert_allclose(shares[1:3], [0.3, 0.9], atol=0.04)


@given(
    batch=st.lists(st.integers(0, 99), min_size=1, max_size=12),
    epoch=st.integers(0, 10),
    first=st.integers(0, 11),
    order=st.randoms(use_true_random=False),
)
def test_a_sample_does_not_depend_on_its_batch(
    batch: list[int], epoch: int, first: int, order: object
) -> None:
    """Any interval, any order, any neighbours: each sample equals the one computed alone."""
    pixels = np.random.default_rng(0).integers(0, 256, (100, 3, 6, 6), np.uint8)
    augment = augmenter(cutout=3, crop_padding=2, flip=True, size=6)

    def seen(samples: list[int]) -> torch.Tensor:
        indices = np.array(samples, np.int64)
        moved = augment.move(pixels[indices], indices, epoch)
        return augment.cut(torch.from_numpy(moved).float() + 1, indices, epoch)

    alone = {sample: seen([sample])[0] for sample in set(batch)}
    order.shuffle(batch)  # type: ignore[attr-defined]
    for interval in (batch, batch[first:], batch[: first + 1]):
        if interval:
            expected = torch.stack([alone[sample] for sample in interval])
            assert torch.equal(seen(interval), expected)


def test_off_leaves_the_images_alone() -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 1, 8, 8), np.uint8)
    assert augmenter().move(images, np.arange(5), 3) is images
    tensor = torch.rand(5, 1, 8, 8)
    assert torch.equal(augmenter(epochs=1).cut(tensor.clone(), np.arange(5), 1), tensor)


@pytest.mark.parametrize("changes", [{"cutout": 9}, {"cutout": -1}, {"crop_padding": 9}])
def test_what_does_not_fit_the_images_is_refused(changes: dict[str, int]) -> None:
    (what, value), *_ = changes.items()
    with pytest.raises(ValueError, match=f"{what} is {value} pixels, but .* 8 × 8: use 0"):
        augmenter(**changes)
