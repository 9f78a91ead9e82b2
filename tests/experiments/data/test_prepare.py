"""Prepared directories: what is in them, that they are written once and whole, and their key."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.data import DATA_SETS, prepare, store
from experiments.data.arrays import Part, resize
from runtimes.job import DataSpec


def arrays(directory: str) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    folder = Path(directory)
    meta = json.loads((folder / "meta.json").read_text())
    return np.load(folder / "images.npy"), np.load(folder / "labels.npy"), meta


def random_images(cache: Path, **changes: Any) -> DataSpec:
    given = {"image_size": 6, "train_samples": 20, "validation_samples": 8, **changes}
    return prepare("random", cache=cache, **given)


def test_digits_are_the_whole_set_split_by_class(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    spec = prepare("digits", image_size=8, cache=tmp_path)
    images, labels, meta = arrays(spec.train)
    held_out, held_labels, held_meta = arrays(spec.validation)

    assert images.shape == (1437, 1, 8, 8)
    assert images.dtype == np.uint8
    assert held_out.shape == (360, 1, 8, 8)
    assert labels.dtype == held_labels.dtype == np.int64
    together = np.concatenate([images, held_out])[:, 0]
    original = load_digits().images
    as_counts = np.rint(together / (255 / 16))
    assert sorted(map(bytes, as_counts.astype(np.uint8))) == sorted(
        map(bytes, original.astype(np.uint8))
    )
    everyone = np.bincount(np.concatenate([labels, held_labels]))
    shares = np.bincount(held_labels) - everyone * 360 / 1797
    assert np.abs(shares).max() <= 1, "each class has its share of the validation part"
    assert not meta["synthetic"]
    assert meta["classes"] == 10
    assert held_meta["mean"] == meta["mean"], "both parts are normalised by the training part's"


def test_the_moments_are_those_of_the_training_part(tmp_path: Path) -> None:
    spec = random_images(tmp_path, channels=3)
    images, _, meta = arrays(spec.train)
    scaled = images.astype(np.float64) / 255
    np.testing.assert_allclose(meta["mean"], scaled.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(meta["std"], scaled.std(axis=(0, 2, 3)), rtol=1e-12)


def test_a_constant_channel_stays_divisible(tmp_path: Path) -> None:
    part = Part(np.full((3, 1, 2, 2), 7, np.uint8), np.zeros(3, np.int64))
    meta = store.write_part(tmp_path / "train", part, 2, {})
    assert meta["std"] == [1.0]


def test_the_digests_are_those_of_the_files(tmp_path: Path) -> None:
    spec = random_images(tmp_path)
    for directory in (spec.train, spec.validation):
        _, _, meta = arrays(directory)
        for name, digest in meta["sha256"].items():
            content = (Path(directory) / name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == digest


def test_random_images_say_that_they_are_synthetic(tmp_path: Path) -> None:
    spec = random_images(tmp_path, classes=7, channels=2, image_size=5)
    images, labels, meta = arrays(spec.train)
    assert images.shape == (20, 2, 5, 5)
    assert set(labels) <= set(range(7))
    assert meta["synthetic"]
    assert "no real data" in meta["source"]
    assert [name for name, data_set in DATA_SETS.items() if not data_set.real] == ["random"]
    held_out, _, _ = arrays(spec.validation)
    assert not np.array_equal(images[:8], held_out)


def test_a_subset_is_the_head_of_a_seeded_shuffle(tmp_path: Path) -> None:
    def subset(seed: int, samples: int) -> list[bytes]:
        spec = prepare(
            "digits",
            image_size=8,
            cache=tmp_path,
            train_samples=samples,
            validation_samples=5,
            seed=seed,
        )
        assert len(arrays(spec.validation)[1]) == 5
        return list(map(bytes, arrays(spec.train)[0]))

    assert subset(0, 30)[:10] == subset(0, 10)
    assert subset(0, 10) != subset(1, 10)
    whole = prepare("digits", image_size=8, cache=tmp_path)
    assert len(arrays(whole.train)[1]) == 1437


def digits(cache: Path, **changes: Any) -> tuple[list[bytes], list[bytes]]:
    """The images of the two parts."""
    spec = prepare("digits", image_size=8, cache=cache, **changes)
    train, validation = (
        list(map(bytes, arrays(part)[0])) for part in (spec.train, spec.validation)
    )
    return train, validation


def test_what_is_held_out_is_of_the_training_part_and_not_trained_on(tmp_path: Path) -> None:
    everyone, test = digits(tmp_path)
    for samples in (None, 100, 1387):
        train, held_out = digits(tmp_path, train_samples=samples, held_out=50)
        assert (len(train), len(held_out)) == (samples or 1387, 50)
        assert set(train) | set(held_out) <= set(everyone)
        # Multisets, as some digits are the same image.
        rest = list(everyone)
        for image in (*train, *held_out):
            rest.remove(image)
        assert not set(held_out) & set(test)
    assert held_out == digits(tmp_path, train_samples=100, held_out=50)[1]
    assert held_out != digits(tmp_path, train_samples=100, held_out=50, seed=1)[1]


def test_holding_out_changes_nothing_of_what_is_trained_on(tmp_path: Path) -> None:
    with_test, _ = digits(tmp_path, train_samples=100)
    with_held_out, _ = digits(tmp_path, train_samples=100, held_out=50)
    assert with_test == with_held_out


def test_the_same_parameters_are_the_same_directory_and_others_are_not(tmp_path: Path) -> None:
    first = random_images(tmp_path)
    before = (Path(first.train) / "images.npy").stat().st_mtime_ns
    again = random_images(tmp_path)
    assert again.train == first.train
    assert (Path(first.train) / "images.npy").stat().st_mtime_ns == before
    changes = ({"image_size": 7}, {"seed": 1}, {"train_samples": 21}, {"classes": 3})
    others = {random_images(tmp_path, **change).train for change in changes}
    assert len(others | {first.train}) == 5


def test_bilinear_resizing_keeps_size_constants_and_gradients() -> None:
    flat = np.full((2, 3, 8, 8), 130, np.uint8)
    assert (resize(flat, 20) == 130).all()
    assert resize(flat, 8) is flat
    ramp = np.broadcast_to(np.arange(0, 160, 20, dtype=np.uint8), (1, 1, 8, 8))
    doubled = resize(ramp, 16)[0, 0]
    # Half-pixel centres: new column j lies at (j + 1/2) / 2 − 1/2 of the old ones.
    np.testing.assert_array_equal(doubled[3, 1:-1], np.arange(1, 15) * 10 - 5)


def build_in_child(cache: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    spec = random_images(cache, image_size=64, train_samples=300)
    results.put((spec.train, hashlib.sha256(Path(spec.train, "images.npy").read_bytes()).digest()))


def test_two_processes_at_once_end_with_one_whole_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.SimpleQueue()
    children = [
        context.Process(target=build_in_child, args=(tmp_path, barrier, results)) for _ in range(2)
    ]
    for child in children:
        child.start()
    seen = {results.get() for _ in children}
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert len(seen) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [
        Path(seen.pop()[0]).parent.name
    ]


def die_while_writing(cache: Path) -> None:
    store._moments = lambda counts: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    random_images(cache)


def test_what_a_killed_process_left_is_not_taken_for_data(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=die_while_writing, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert any(path.suffix == ".partial" for path in tmp_path.iterdir())

    spec = random_images(tmp_path)
    assert len(arrays(spec.train)[1]) == 20
    assert not any(path.suffix == ".partial" for path in tmp_path.iterdir())


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_write_array", full)
    with pytest.raises(ValueError, match=r"No space left on device.*free some space"):
        random_images(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_cache_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ValueError, match="cache/random"):
        random_images(tmp_path / "cache")


@pytest.mark.parametrize("damage", ["truncated", "missing", "garbage"])
def test_prepared_data_damaged_since_are_named(tmp_path: Path, damage: str) -> None:
    file = Path(random_images(tmp_path).train) / "images.npy"
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(ValueError, match=f"{file} is missing or damaged.*delete"):
        random_images(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("digit", {}, "unknown data set 'digit'; did you mean 'digits'"),
        ("digits", {"image_size": 0}, "image_size is 0, but must be at least 1"),
        ("digits", {"train_samples": 1438}, "train_samples is 1438.* 1437 such.*use 1 … 1437"),
        ("digits", {"validation_samples": 0}, "validation_samples is 0.*use 1 … 360"),
        ("digits", {"held_out": 0}, "held_out is 0, but must be at least 1"),
        ("digits", {"held_out": 1437}, "held_out is 1437, but of 1437.*hold out 1 … 1436"),
        (
            "digits",
            {"train_samples": 1400, "held_out": 38},
            "held_out is 38, but of 1437 training images 1400 are trained on: hold out 1 … 37",
        ),
        (
            "digits",
            {"train_samples": 1437, "held_out": 1},
            "1437 are trained on: train on fewer .data.sizes.train",
        ),
        ("digits", {"channels": 3}, "channels is 3, but scikit-learn digits has 1"),
        ("digits", {"seed": -1}, "seed is -1"),
        ("random", {"classes": 0}, "classes is 0"),
        ("random", {"train_samples": 0}, "train_samples is 0"),
    ],
)
def test_what_cannot_be_prepared_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        prepare(name, cache=tmp_path, **{"image_size": 8, **changes})
