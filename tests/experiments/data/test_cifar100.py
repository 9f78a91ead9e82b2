"""CIFAR-100 from files in its own pickle format, small ones made here.

torchvision compares the files with the MD5 sums of the published ones; the tests put the sums of
the small files in their place, so that torchvision's check and loader run as they are.
"""

from __future__ import annotations

import hashlib
import pickle
import tarfile
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR100

from experiments.data import prepare

SAMPLES = {"train": 9, "test": 4}


def pixels(part: str) -> np.ndarray:
    """(N, 3, 32, 32): the file holds the red plane first, row by row, then green and blue."""
    generator = np.random.default_rng(SAMPLES[part])
    return generator.integers(0, 256, (SAMPLES[part], 3, 32, 32), np.uint8)


def labels(part: str) -> list[int]:
    return [(17 * i + 99) % 100 for i in range(SAMPLES[part])]


def trust(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchvision expect the MD5 sums that these files have now."""
    sums = {name: hashlib.md5((files / name).read_bytes()).hexdigest() for name in FILES}
    monkeypatch.setattr(CIFAR100, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(CIFAR100, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": sums["meta"]})


FILES = ("train", "test", "meta")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = tmp_path / "root" / "cifar-100-python"
    files.mkdir(parents=True)
    for part in SAMPLES:
        flat = pixels(part).reshape(SAMPLES[part], -1)
        entry = {"data": flat, "fine_labels": labels(part), "coarse_labels": [0] * len(flat)}
        (files / part).write_bytes(pickle.dumps(entry))
    names = {"fine_label_names": [f"class {i}" for i in range(100)]}
    (files / "meta").write_bytes(pickle.dumps(names))
    trust(files, monkeypatch)
    return tmp_path / "root"


def test_the_files_are_read_channel_first(root: Path, tmp_path: Path) -> None:
    spec = prepare("cifar100", image_size=32, root=root, cache=tmp_path / "cache")
    for directory, part in ((spec.train, "train"), (spec.validation, "test")):
        np.testing.assert_array_equal(np.load(Path(directory) / "images.npy"), pixels(part))
        np.testing.assert_array_equal(np.load(Path(directory) / "labels.npy"), labels(part))


def test_images_are_resized_to_the_models_input(root: Path, tmp_path: Path) -> None:
    spec = prepare("cifar100", image_size=48, root=root, cache=tmp_path / "cache")
    assert np.load(Path(spec.train) / "images.npy").shape == (SAMPLES["train"], 3, 48, 48)


@pytest.mark.parametrize("given", [True, False])
def test_missing_files_name_the_way_out(tmp_path: Path, given: bool) -> None:
    where = tmp_path / "nowhere" if given else None
    with pytest.raises(ValueError, match=r"no CIFAR-100 in .*--data-root.*download=true"):
        prepare("cifar100", image_size=32, root=where, cache=tmp_path / "cache")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(root: Path, tmp_path: Path, name: str) -> None:
    file = root / "cifar-100-python" / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{file} is truncated or damaged"):
        prepare("cifar100", image_size=32, root=root, cache=tmp_path / "cache")


def test_a_file_that_is_no_pickle_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = root / "cifar-100-python" / "test"
    file.write_bytes(b"not a pickle")
    trust(file.parent, monkeypatch)
    with pytest.raises(ValueError, match=f"{file} cannot be read"):
        prepare("cifar100", image_size=32, root=root, cache=tmp_path / "cache")


def copied(url: str, filename: str) -> None:
    """In place of torchvision's retrieval, which needs a server's Content-Length."""
    with urllib.request.urlopen(url) as source:
        Path(filename).write_bytes(source.read())


def test_a_download_happens_only_when_asked(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(root / "cifar-100-python", "cifar-100-python")
    monkeypatch.setattr(CIFAR100, "url", archive.as_uri())
    monkeypatch.setattr(CIFAR100, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", copied)
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match="no CIFAR-100"):
        prepare("cifar100", image_size=32, cache=cache)
    spec = prepare("cifar100", image_size=32, cache=cache, download=True)
    assert spec == prepare("cifar100", image_size=32, cache=cache), "found without a download"
    assert spec == prepare("cifar100", image_size=32, root=root, cache=cache), "the same data"
    monkeypatch.setattr(CIFAR100, "url", (tmp_path / "gone.tar.gz").as_uri())
    with pytest.raises(ValueError, match="cannot download CIFAR-100"):
        prepare("cifar100", image_size=32, root=tmp_path / "no", cache=cache, download=True)
