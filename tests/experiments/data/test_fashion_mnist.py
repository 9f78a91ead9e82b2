"""Fashion-MNIST from files in torchvision's layout and in Debian's, small ones made here."""

from __future__ import annotations

import gzip
import hashlib
import struct
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from experiments.data import fashion_mnist, prepare
from experiments.data.fashion_mnist import read_idx

SAMPLES = {"train": 12, "t10k": 5}


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def contents() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    files = {}
    for part, samples in SAMPLES.items():
        files[f"{part}-images-idx3-ubyte"] = generator.integers(0, 256, (samples, 28, 28), np.uint8)
        files[f"{part}-labels-idx1-ubyte"] = generator.integers(0, 10, samples, np.uint8)
    return files


def write(folder: Path, *, zipped: bool) -> None:
    folder.mkdir(parents=True)
    for name, array in contents().items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))


@pytest.fixture(autouse=True)
def without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Debian's package may or may not be installed where the tests run."""
    place = tmp_path / "debian" / "datasets" / "fashion-mnist"
    monkeypatch.setattr(fashion_mnist, "DEBIAN_DIRECTORY", place)
    return place


@pytest.mark.parametrize(
    ("layout", "zipped"),
    [("FashionMNIST/raw", False), ("FashionMNIST/raw", True), (".", True)],
)
def test_the_files_of_either_layout_are_read(tmp_path: Path, layout: str, zipped: bool) -> None:
    write(tmp_path / "root" / layout, zipped=zipped)
    spec = prepare("fashion-mnist", image_size=28, root=tmp_path / "root", cache=tmp_path / "cache")
    made = contents()
    for directory, part in ((spec.train, "train"), (spec.validation, "t10k")):
        images, labels = (np.load(Path(directory) / f"{kind}.npy") for kind in ("images", "labels"))
        np.testing.assert_array_equal(images[:, 0], made[f"{part}-images-idx3-ubyte"])
        np.testing.assert_array_equal(labels, made[f"{part}-labels-idx1-ubyte"])


def test_the_installed_package_is_found_without_a_root(
    tmp_path: Path, without_the_package: Path
) -> None:
    write(without_the_package, zipped=True)
    spec = prepare("fashion-mnist", image_size=28, cache=tmp_path / "cache")
    assert len(np.load(Path(spec.train) / "labels.npy")) == SAMPLES["train"]


def test_the_unpacked_package_is_a_root(tmp_path: Path, without_the_package: Path) -> None:
    write(tmp_path / "root" / without_the_package.relative_to("/"), zipped=True)
    prepare("fashion-mnist", image_size=28, root=tmp_path / "root", cache=tmp_path / "cache")


@pytest.mark.parametrize("root", [None, "nowhere"])
def test_missing_files_name_both_ways_out(tmp_path: Path, root: str | None) -> None:
    where = None if root is None else tmp_path / root
    with pytest.raises(ValueError, match=r"dataset-fashion-mnist.*--data-root.*download=true"):
        prepare("fashion-mnist", image_size=28, root=where, cache=tmp_path / "cache")


def test_one_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "root", zipped=True)
    (tmp_path / "root" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte.*is missing"):
        prepare("fashion-mnist", image_size=28, root=tmp_path / "root", cache=tmp_path / "cache")


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("keep", [0, 3, 10, -1])
def test_a_truncated_file_is_named(tmp_path: Path, zipped: bool, keep: int) -> None:
    write(tmp_path / "root", zipped=zipped)
    file = tmp_path / "root" / ("train-images-idx3-ubyte" + (".gz" if zipped else ""))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{file} "):
        prepare("fashion-mnist", image_size=28, root=tmp_path / "root", cache=tmp_path / "cache")


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    file = tmp_path / "labels-idx1-ubyte"
    file.write_bytes(idx(np.zeros((2, 3), np.uint8)))
    with pytest.raises(ValueError, match="no IDX file of 1-dimensional"):
        read_idx(file, 1)


def test_images_and_labels_of_different_length_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "root", zipped=False)
    (tmp_path / "root" / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(4, np.uint8)))
    with pytest.raises(ValueError, match="4 labels do not go together"):
        prepare("fashion-mnist", image_size=28, root=tmp_path / "root", cache=tmp_path / "cache")


def test_a_label_beyond_the_classes_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "root", zipped=False)
    (tmp_path / "root" / "t10k-labels-idx1-ubyte").write_bytes(idx(np.full(5, 10, np.uint8)))
    with pytest.raises(ValueError, match="labels 10 … 10, but the data set has classes 0 … 9"):
        prepare("fashion-mnist", image_size=28, root=tmp_path / "root", cache=tmp_path / "cache")


def test_other_files_are_other_prepared_data(tmp_path: Path) -> None:
    write(tmp_path / "root", zipped=False)
    first = prepare(
        "fashion-mnist", image_size=28, root=tmp_path / "root", cache=tmp_path / "cache"
    )
    (tmp_path / "root" / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(5, np.uint8)))
    second = prepare(
        "fashion-mnist", image_size=28, root=tmp_path / "root", cache=tmp_path / "cache"
    )
    assert first.train != second.train


def copied(url: str, filename: str) -> None:
    """In place of torchvision's retrieval, which needs a server's Content-Length."""
    with urllib.request.urlopen(url) as source:
        Path(filename).write_bytes(source.read())


def test_a_download_happens_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import FashionMNIST

    write(tmp_path / "mirror", zipped=True)
    sums = [
        (file.name, hashlib.md5(file.read_bytes()).hexdigest())
        for file in sorted((tmp_path / "mirror").iterdir())
    ]
    monkeypatch.setattr(FashionMNIST, "mirrors", [f"{(tmp_path / 'mirror').as_uri()}/"])
    monkeypatch.setattr(FashionMNIST, "resources", sums)
    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", copied)
    root, cache = tmp_path / "root", tmp_path / "cache"
    with pytest.raises(ValueError, match="no Fashion-MNIST"):
        prepare("fashion-mnist", image_size=28, root=root, cache=cache)
    spec = prepare("fashion-mnist", image_size=28, root=root, cache=cache, download=True)
    assert len(np.load(Path(spec.train) / "labels.npy")) == SAMPLES["train"]
    monkeypatch.setattr(FashionMNIST, "mirrors", ["file:///nonexistent/"])
    assert prepare("fashion-mnist", image_size=28, root=root, cache=cache, download=True) == spec
    with pytest.raises(ValueError, match="cannot download Fashion-MNIST"):
        prepare("fashion-mnist", image_size=28, root=tmp_path / "no", cache=cache, download=True)
