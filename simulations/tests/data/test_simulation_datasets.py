"""Datasets: read from the documented files, normalised, split for good, and clear when missing."""

from __future__ import annotations

import gzip
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fl_elastic.errors import DatasetError
from fl_elastic_simulations.data import datasets
from fl_elastic_simulations.data.datasets import DATASETS, Dataset, data_root_folder, load_dataset

RNG = np.random.default_rng(7)


def _check(dataset: Dataset) -> None:
    """Assert what every dataset promises."""
    for x, y in ((dataset.train_x, dataset.train_y), (dataset.test_x, dataset.test_y)):
        assert (x.dtype.name, y.dtype.name) == ("float32", "int64")
        assert x.shape == (len(y), *dataset.input_shape)
        assert np.isfinite(x).all()
        assert set(np.unique(y)) <= set(range(dataset.classes))
    if dataset.owners is not None:
        assert dataset.owners.shape == dataset.train_y.shape


def _one_line(error: pytest.ExceptionInfo[DatasetError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_digits_are_standardised_and_split_the_same_way_each_time() -> None:
    dataset = load_dataset("digits")
    _check(dataset)
    assert (dataset.input_shape, dataset.classes, dataset.owners) == ((1, 8, 8), 10, None)
    assert (len(dataset.train_y), len(dataset.test_y)) == (1258, 539)
    everything = np.concatenate([dataset.train_x, dataset.test_x])
    assert abs(everything.mean()) < 0.01
    assert abs(everything.std() - 1) < 0.01
    again = load_dataset("digits", "/nowhere/at/all")
    assert np.array_equal(again.test_x, dataset.test_x)


def test_images_are_resized_and_all_else_stays() -> None:
    small, large = load_dataset("digits"), load_dataset("digits", image_size=16)
    images = large.train_x[:]
    assert large.input_shape == (1, 16, 16) and large.test_x.shape[1:] == (1, 16, 16)
    assert images.dtype == np.float32 and images.shape == large.train_x.shape
    np.testing.assert_array_equal(large.train_y, small.train_y)
    # Averages of two by two pixels are the small image again, nearly: bilinear weights reach over edges.
    means = images.reshape(len(images), 1, 8, 2, 8, 2).mean(axis=(3, 5))
    assert np.corrcoef(means.ravel(), small.train_x.ravel())[0, 1] > 0.95
    assert load_dataset("digits", image_size=16) is large
    assert small is load_dataset("digits") and small.input_shape == (1, 8, 8)


def test_images_are_resized_as_they_are_read() -> None:
    rows = np.array([7, 3, 3])
    each, whole = (load_dataset("digits", image_size=16).train_x for _ in range(2))
    np.testing.assert_array_equal(each[rows], np.asarray(whole)[rows])
    # All of them would take 120 GB.
    assert load_dataset("digits", image_size=4096).train_x[:1].shape == (1, 1, 4096, 4096)


def test_what_is_no_image_is_not_resized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Dataset(
        "rows", np.zeros((4, 3), np.float32), np.zeros(4, np.int64), np.zeros((2, 3), np.float32),
        np.zeros(2, np.int64), 2, (3,),
    )  # fmt: skip
    module = types.ModuleType("my_rows")
    module.rows = lambda: rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_rows", module)
    assert load_dataset("my_rows:rows", tmp_path).input_shape == (3,)
    with pytest.raises(DatasetError, match="no images to be resized to 8"):
        load_dataset("my_rows:rows", tmp_path, 8)


def test_the_split_of_the_digits_is_stratified() -> None:
    dataset = load_dataset("digits")
    test = np.bincount(dataset.test_y)
    shares = test / (test + np.bincount(dataset.train_y))
    assert np.allclose(shares, 0.3, atol=0.005)


def test_train_and_test_digits_are_all_the_digits_once() -> None:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    dataset = load_dataset("digits")
    ours = np.concatenate([dataset.train_x, dataset.test_x]).reshape(-1, 64) * 6.02 + 4.88
    theirs = load_digits().data
    assert np.array_equal(
        np.sort(np.rint(ours) @ np.arange(1, 65)), np.sort(theirs @ np.arange(1, 65))
    )


def test_a_dataset_is_read_once_per_process() -> None:
    assert load_dataset("digits") is load_dataset("digits")


def test_an_unknown_dataset_is_answered_with_the_nearest() -> None:
    with pytest.raises(DatasetError, match=r"unknown dataset 'digit' \(did you mean 'digits'\?\)"):
        load_dataset("digit")


# One's own: ``module:callable``.

OWN = """
import numpy as np
from fl_elastic_simulations.data.datasets import Dataset

X = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
Y = (X[:, 0] > X[:, 1]).astype(np.int64)


def read():
    return Dataset("readings", X[:40], Y[:40], X[40:], Y[40:], classes=2, input_shape=(6,))


def read_from(root):
    assert root.is_dir()
    return read()


def read_some(rows=40):
    assert isinstance(rows, int)
    return read()


class Here:
    read = staticmethod(read)


def changed(**fields):
    from dataclasses import replace
    return lambda: replace(read(), **fields)


def fails():
    raise KeyError("readings.csv")


nothing, number = (lambda: None), 3
wide = changed(train_x=X[:40].astype(np.float64))
ragged = changed(test_x=X[41:])
other_shape = changed(input_shape=(2, 3))
three = changed(test_y=Y[40:] + 2)
below = changed(train_y=Y[:40] - 1)
empty = changed(train_x=X[:0], train_y=Y[:0])
one_hot = changed(train_y=np.eye(2)[Y[:40]])
texts = changed(train_y=np.where(Y[:40] > 0, "yes", "yes"))
unknown = changed(train_x=np.where(np.arange(40)[:, None] == 7, np.nan, X[:40]).astype(np.float32))
bytes_ = changed(train_y=Y[:40].astype(np.uint8), test_y=Y[40:].astype(np.int32))


def images():
    import torch
    x, y = torch.rand(60, 1, 4, 4), torch.from_numpy(Y)
    return Dataset("images", x[:40], y[:40], x[40:], y[40:], classes=2, input_shape=(1, 4, 4))


few_owners = changed(owners=np.arange(3))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_readings.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_readings"
    sys.modules.pop("own_readings", None)
    datasets._load.cache_clear()


@pytest.mark.parametrize("name", ["read", "read_from", "read_some", "Here.read"])
def test_a_function_of_ones_own_gives_a_dataset(own: str, tmp_path: Path, name: str) -> None:
    found = load_dataset(f"{own}:{name}", tmp_path)
    assert (found.name, len(found.train_y), found.input_shape) == ("readings", 40, (6,))
    assert load_dataset(f"{own}:{name}", tmp_path) is found


def test_whole_numbers_of_any_width_are_classes(own: str) -> None:
    found = load_dataset(f"{own}:bytes_")
    assert found.train_y.dtype == found.test_y.dtype == np.int64
    assert (found.train_y == load_dataset(f"{own}:read").train_y).all()


def test_tensors_are_taken_as_arrays(own: str) -> None:
    found = load_dataset(f"{own}:images", image_size=8)
    images = found.train_x[:]
    assert isinstance(images, np.ndarray) and images.shape == (40, 1, 8, 8)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody", "has no 'nobody'"),
        ("number", "is a int, not a function"),
        ("nothing", "returned a NoneType, not a Dataset"),
        ("fails", "calling it failed: KeyError: 'readings.csv'"),
        ("wide", "inputs are float64: give normalised numbers as float32"),
        (
            "ragged",
            r"test: classes of shape \(20,\) do not fit inputs of shape \(19, 6\): give one",
        ),
        (
            "one_hot",
            r"train: classes of shape \(40, 2\) do not fit inputs of shape \(40, 6\): give one",
        ),
        ("texts", "train: classes such as 'yes' are no whole numbers: number them from 0"),
        ("other_shape", r"do not fit input_shape \(2, 3\)"),
        ("three", "test: classes go from 2 to 3, not from 0 to 1"),
        ("below", "train: classes go from -1 to 0"),
        ("empty", "train: there is no example"),
        ("unknown", "input 7 is not finite"),
        ("few_owners", "has 3 owners for 40 training examples"),
    ],
)
def test_what_is_wrong_with_ones_own_is_said(own: str, name: str, said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        load_dataset(f"{own}:{name}")


def test_a_module_that_is_not_there_is_said() -> None:
    with pytest.raises(DatasetError, match="cannot import no_such_module"):
        load_dataset("no_such_module:read")


def test_the_argument_wins_over_the_environment_which_wins_over_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.delenv("FL_ELASTIC_DATA_ROOT", raising=False)
    assert data_root_folder() == own_cache
    monkeypatch.setenv("FL_ELASTIC_DATA_ROOT", str(tmp_path / "env"))
    assert data_root_folder() == tmp_path / "env"
    assert data_root_folder(tmp_path / "own") == tmp_path / "own"


def test_a_relative_cache_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FL_ELASTIC_DATA_ROOT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert data_root_folder() == Path.home() / ".cache" / "fl_elastic"


# Fashion-MNIST


def _write_idx(path: Path, array: npt.NDArray[np.uint8]) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + array.tobytes()))


def _write_fashion(root: Path) -> dict[str, npt.NDArray[np.uint8]]:
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    written = {}
    for prefix, count in (("train", 12), ("t10k", 5)):
        written[prefix] = RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        _write_idx(raw / f"{prefix}-images-idx3-ubyte.gz", written[prefix])
        _write_idx(raw / f"{prefix}-labels-idx1-ubyte.gz", (np.arange(count) % 10).astype(np.uint8))
    return written


def test_fashion_mnist_is_read_from_its_own_files_without_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = _write_fashion(tmp_path)
    monkeypatch.setitem(sys.modules, "torchvision", None)  # an import would fail
    dataset = load_dataset("fashion_mnist", tmp_path)
    _check(dataset)
    assert dataset.input_shape == (1, 28, 28)
    expected = (written["train"][:, None] / 255 - 0.2860) / 0.3530
    assert np.allclose(dataset.train_x, expected, atol=1e-5)
    assert dataset.test_y.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"not a gz file",
        lambda content: gzip.compress(b"\x00\x00\x0d\x03" + bytes(100)),
        lambda content: gzip.compress(gzip.decompress(content)[:-1]),
    ],
)
def test_a_damaged_file_of_fashion_mnist_is_named(tmp_path: Path, damage: Any) -> None:
    _write_fashion(tmp_path)
    path = tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DatasetError) as caught:
        load_dataset("fashion_mnist", tmp_path)
    message = _one_line(caught)
    assert str(path) in message
    assert "is damaged" in message


def test_images_and_labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _write_fashion(tmp_path)
    raw = tmp_path / "FashionMNIST" / "raw"
    _write_idx(raw / "train-labels-idx1-ubyte.gz", np.zeros(3, np.uint8))
    with pytest.raises(DatasetError, match="12 training images and 3 labels"):
        load_dataset("fashion_mnist", tmp_path)


class _FakeTorchvision:
    """Stands in for a dataset class of torchvision and notes how it was called."""

    calls: list[dict[str, Any]]

    def __init__(self, root: str, train: bool, download: bool) -> None:
        type(self).calls.append({"root": root, "train": train, "download": download})
        self.data = np.full((4, 32, 32, 3), 255 if train else 0, np.uint8)
        self.targets = [0, 1, 2, 9]


def test_cifar10_is_downloaded_into_the_data_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets  # type: ignore[import-untyped]

    _FakeTorchvision.calls = []
    monkeypatch.setattr(datasets, "CIFAR10", _FakeTorchvision)
    dataset = load_dataset("cifar10", tmp_path)
    _check(dataset)
    assert _FakeTorchvision.calls == [
        {"root": str(tmp_path), "train": train, "download": True} for train in (True, False)
    ]
    white = (1 - np.array([0.4914, 0.4822, 0.4465])) / np.array([0.2470, 0.2435, 0.2616])
    assert np.allclose(dataset.train_x[0, :, 5, 5], white, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind"), [("cifar10", "CIFAR10"), ("fashion_mnist", "FashionMNIST")]
)
def test_a_failed_download_says_where_it_looked_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    from torchvision import datasets

    def offline(**_: object) -> None:
        raise OSError("no route\nto host")

    monkeypatch.setattr(datasets, kind, offline)
    with pytest.raises(DatasetError) as caught:
        load_dataset(name, tmp_path)
    message = _one_line(caught)
    for part in (str(tmp_path), "no route", "--data-root", "network"):
        assert part in message


def test_a_failure_is_not_remembered(tmp_path: Path) -> None:
    with pytest.raises(DatasetError):
        load_dataset("gtsrb", tmp_path)
    _write_gtsrb(tmp_path)
    assert load_dataset("gtsrb", tmp_path).classes == 43


# Traffic signs


def _write_gtsrb(root: Path, **changes: npt.NDArray[Any]) -> None:
    (root / "gtsrb32").mkdir(parents=True, exist_ok=True)
    arrays: dict[str, npt.NDArray[Any]] = {
        "x_train": RNG.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8),
        "y_train": np.array([0, 0, 1, 1, 42, 42], np.uint8),
        "track_train": np.array([0, 1, 0, 0, 0, 74], np.uint16),
        "x_test": RNG.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8),
        "y_test": np.array([3, 4], np.uint8),
    }
    np.savez(root / "gtsrb32" / "gtsrb32_sub.npz", **(arrays | changes))  # type: ignore[arg-type]


def test_the_owner_of_a_traffic_sign_is_the_physical_sign(tmp_path: Path) -> None:
    _write_gtsrb(tmp_path)
    dataset = load_dataset("gtsrb", tmp_path)
    _check(dataset)
    assert dataset.owners is not None
    # Tracks are numbered within a class: track 0 of two classes is two signs.
    assert len(set(dataset.owners.tolist())) == 5
    assert dataset.owners[2] == dataset.owners[3]


@pytest.mark.parametrize("name", ["cifar10_jpegq75", "gtsrb", "har"])
def test_missing_files_are_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(DatasetError) as caught:
        load_dataset(name, tmp_path)
    message = _one_line(caught)
    assert f"{name}: no file {tmp_path}" in message
    assert "--data-root or FL_ELASTIC_DATA_ROOT" in message


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 but not a whole archive", b"\x93NUMPY"])
def test_a_damaged_archive_is_named(tmp_path: Path, content: bytes) -> None:
    _write_gtsrb(tmp_path)
    path = tmp_path / "gtsrb32" / "gtsrb32_sub.npz"
    path.write_bytes(content)
    with pytest.raises(DatasetError) as caught:
        load_dataset("gtsrb", tmp_path)
    assert f"gtsrb: {path} is damaged" in _one_line(caught)


def test_an_archive_without_an_array_is_damaged(tmp_path: Path) -> None:
    _write_gtsrb(tmp_path)
    path = tmp_path / "gtsrb32" / "gtsrb32_sub.npz"
    np.savez(path, x_train=np.zeros(3))
    with pytest.raises(DatasetError) as caught:
        load_dataset("gtsrb", tmp_path)
    assert "y_train" in _one_line(caught)


def test_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    _write_gtsrb(tmp_path, y_test=np.array([3, 43], np.uint8))
    with pytest.raises(DatasetError, match="2 test images and 2 labels for 43 classes"):
        load_dataset("gtsrb", tmp_path)


# The real files


@pytest.mark.parametrize(
    ("name", "train", "test", "owners"),
    [
        ("fashion_mnist", 60_000, 10_000, None),
        ("gtsrb", 5_160, 1_720, 1_185),
        ("har", 2_260, 1_002, 23),
    ],
)
def test_the_real_files_have_the_documented_sizes_and_are_standardised(
    data_root: Path, name: str, train: int, test: int, owners: int | None
) -> None:
    dataset = load_dataset(name, data_root)
    _check(dataset)
    assert (len(dataset.train_y), len(dataset.test_y)) == (train, test)
    assert set(dataset.train_y.tolist()) == set(range(dataset.classes))
    axes = (0, *range(2, dataset.train_x.ndim))
    assert np.abs(dataset.train_x.mean(axis=axes)).max() < 0.01
    assert np.abs(dataset.train_x.std(axis=axes) - 1).max() < 0.01
    found = None if dataset.owners is None else len(np.unique(dataset.owners))
    assert found == owners
    assert (DATASETS.get(name).owner is None) == (owners is None)
