"""The feed: which samples each update has, that none is lost, and the values of the images."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtimes.execution.engine import Feed
from runtimes.execution.feed import ArrayFeed
from runtimes.job import Augmentation

META = {"mean": [0.25, 0.5], "std": [0.5, 0.125], "classes": 4}
EVERYTHING = Augmentation(cutout=3, crop_padding=1, flip=True)
Opened = Callable[..., ArrayFeed]


def write(directory: Path, samples: int = 23) -> Path:
    """``samples`` images of 2 × 5 × 5, the first pixel of each giving its index."""
    directory.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(1).integers(0, 256, (samples, 2, 5, 5), np.uint8)
    images[:, 0, 0, 0] = np.arange(samples)
    np.save(directory / "images.npy", images)
    np.save(directory / "labels.npy", np.arange(samples, dtype=np.int64) % 4)
    (directory / "meta.json").write_text(json.dumps(META))
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def opened(directory: Path) -> Opened:
    def open_feed(**changes: Any) -> ArrayFeed:
        return ArrayFeed(directory, **{"batch_size": 6, "seed": 3, "epochs": 4, **changes})

    return open_feed


def epoch_of(feed: ArrayFeed, epoch: int) -> list[np.ndarray]:
    first = epoch * feed.steps_per_epoch
    return [feed.indices(first + batch) for batch in range(feed.steps_per_epoch)]


def test_it_is_a_feed_with_its_metadata(opened: Opened) -> None:
    feed: Feed = opened()
    assert feed.batch_sizes() == (6, 6, 6, 5)
    assert (opened().samples, opened().classes, opened().image_shape) == (23, 4, (2, 5, 5))


@pytest.mark.parametrize("batch_size", [1, 5, 6, 22, 23, 24, 100])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_holds_each_sample_once(opened: Opened, batch_size: int, shuffle: bool) -> None:
    feed = opened(batch_size=batch_size, shuffle=shuffle)
    for epoch in (0, 1, 2):
        batches = epoch_of(feed, epoch)
        assert tuple(map(len, batches)) == feed.batch_sizes()
        assert sorted(np.concatenate(batches)) == list(range(23))
        assert all(batch.dtype == np.int64 for batch in batches)


def test_the_order_is_a_function_of_seed_and_epoch_alone(opened: Opened) -> None:
    feed = opened()
    forwards = [feed.indices(step).tolist() for step in range(12)]
    other = opened(batch_size=6, epochs=99, augmentation=EVERYTHING)
    backwards = [other.indices(step).tolist() for step in reversed(range(12))]
    assert forwards == backwards[::-1], "neither what was asked before nor other options count"
    orders = {tuple(np.concatenate(epoch_of(opened(seed=s), e))) for s in (0, 1) for e in (0, 1)}
    assert len(orders) == 4, "no two seeds or epochs share an order"


def test_the_order_does_not_depend_on_the_batch_size(opened: Opened) -> None:
    for epoch in (0, 2):
        wide = np.concatenate(epoch_of(opened(batch_size=23), epoch))
        narrow = np.concatenate(epoch_of(opened(batch_size=4), epoch))
        np.testing.assert_array_equal(wide, narrow)


def test_another_process_has_the_same_batches(opened: Opened, directory: Path) -> None:
    code = (
        "import sys, numpy\n"
        "from runtimes.execution.feed import ArrayFeed\n"
        "feed = ArrayFeed(sys.argv[1], batch_size=6, seed=3, epochs=4)\n"
        "print(*numpy.concatenate([feed.indices(step) for step in (9, 2)]))\n"
    )
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", code, str(directory)]
    printed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    here = np.concatenate([opened().indices(step) for step in (9, 2)])
    assert [int(word) for word in printed.split()] == here.tolist()


def test_without_shuffling_the_order_is_that_of_the_file(opened: Opened) -> None:
    feed = opened(shuffle=False)
    assert np.concatenate(epoch_of(feed, 3)).tolist() == list(range(23))


def test_images_are_normalised_by_the_meta_data(opened: Opened, directory: Path) -> None:
    feed = opened(dtype=torch.float64)
    indices = feed.indices(2)
    raw = np.load(directory / "images.npy")[indices] / 255
    mean, std = (np.array(META[key]).reshape(2, 1, 1) for key in ("mean", "std"))
    seen = feed.images(indices, 2)
    assert seen.dtype == torch.float64
    np.testing.assert_allclose(seen.numpy(), (raw - mean) / std, rtol=1e-12)
    assert opened(dtype=torch.bfloat16).images(indices, 2).dtype == torch.bfloat16


def test_labels_belong_to_their_images(opened: Opened) -> None:
    feed = opened(dtype=torch.float64)
    for step in range(5):
        indices = feed.indices(step)
        first_pixel = feed.images(indices, step)[:, 0, 0, 0] * META["std"][0] + META["mean"][0]
        np.testing.assert_allclose((first_pixel * 255).numpy(), indices)
        labels = feed.labels(indices)
        assert labels.dtype == torch.int64
        assert labels.tolist() == [index % 4 for index in indices]


@given(step=st.integers(0, 15), low=st.integers(0, 6), high=st.integers(0, 6))
def test_a_part_of_a_batch_equals_that_part_of_the_whole(
    opened: Opened, step: int, low: int, high: int
) -> None:
    feed = opened(augmentation=EVERYTHING)
    indices = feed.indices(step)
    whole = feed.images(indices, step)
    part = feed.images(indices[low:high], step)
    assert torch.equal(part, whole[low:high])


def test_a_sample_is_augmented_by_epoch_not_by_step(opened: Opened) -> None:
    feed = opened(augmentation=EVERYTHING, epochs=4)
    sample = np.arange(23)
    assert torch.equal(feed.images(sample, 4), feed.images(sample, 7)), "both in epoch 1"
    assert not torch.equal(feed.images(sample, 4), feed.images(sample, 8))
    other_seed = opened(augmentation=EVERYTHING, seed=4)
    assert not torch.equal(feed.images(sample, 4), other_seed.images(sample, 4))


def test_cut_out_is_zero_after_normalisation(opened: Opened) -> None:
    feed = opened(augmentation=Augmentation(cutout=3), epochs=1)
    plain = opened(epochs=1)
    sample = np.arange(23)
    after_the_last_epoch = feed.steps_per_epoch
    changed = feed.images(sample, after_the_last_epoch) != plain.images(sample, 0)
    assert changed.any(dim=3).any(dim=2).all()
    assert (feed.images(sample, after_the_last_epoch)[changed] == 0).all()


def test_the_files_stay_as_they_are(opened: Opened, directory: Path) -> None:
    before = (directory / "images.npy").read_bytes()
    feed = opened(augmentation=EVERYTHING)
    feed.images(feed.indices(5), 5).zero_()
    assert (directory / "images.npy").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("images.npy", None),
        ("images.npy", b""),
        ("images.npy", b"junk" * 10),
        ("images.npy", "truncated"),
        ("labels.npy", "truncated"),
        ("images.npy", np.zeros((23, 2, 5, 5), np.float32)),
        ("labels.npy", np.zeros((23, 1), np.int64)),
        ("labels.npy", np.full(23, 4, np.int64)),
        ("meta.json", b'{"mean": [0.5'),
        ("meta.json", b'{"mean": [0.5, 0.5], "classes": 4}'),
        ("meta.json", b'{"mean": [0.5], "std": [1.0], "classes": 4}'),
        ("meta.json", b'{"mean": [0.5, 0.5], "std": [1.0, 0.0], "classes": 4}'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: object) -> None:
    file = write(tmp_path) / name
    if content is None:
        file.unlink()
    elif isinstance(content, str):
        file.write_bytes(file.read_bytes()[:-3])
    elif isinstance(content, np.ndarray):
        np.save(file, content)
    else:
        assert isinstance(content, bytes)
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} .*prepare the data set anew"):
        ArrayFeed(tmp_path, batch_size=4)


def test_images_and_labels_must_be_as_many(tmp_path: Path) -> None:
    np.save(write(tmp_path) / "labels.npy", np.zeros(22, np.int64))
    with pytest.raises(ValueError, match="23 images and 22 labels"):
        ArrayFeed(tmp_path, batch_size=4)


@pytest.mark.parametrize("changes", [{"batch_size": 0}, {"epochs": 0}, {"seed": -1}])
def test_a_value_out_of_range_is_named(opened: Opened, changes: dict[str, int]) -> None:
    (what, value), *_ = changes.items()
    with pytest.raises(ValueError, match=f"{what} is {value}, but must be at least"):
        opened(**changes)
