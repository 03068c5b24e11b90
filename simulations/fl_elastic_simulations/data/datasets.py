"""The datasets that a simulated federation can train on, as normalised arrays.

Files are looked for under a data root: the argument, or else the environment variable
``FL_ELASTIC_DATA_ROOT``, or else the user's cache folder (``$XDG_CACHE_HOME/fl_elastic`` or
``~/.cache/fl_elastic``). What can be downloaded is downloaded into that folder when it is missing.
"""

from __future__ import annotations

import gzip
import importlib.util
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fl_elastic.errors import DatasetError, RegistryError
from fl_elastic.registry import Registry, first_line, from_module, or_own
from fl_elastic_simulations.data.files import (
    cache_folder,
    decode_jpegs,
    decoded_jpegs,
    idx_split,
    npz_arrays,
    torchvision_split,
)

__all__ = [
    "DATASETS",
    "DATA_ROOT_VARIABLE",
    "Dataset",
    "DatasetKind",
    "check_dataset_name",
    "data_root_folder",
    "load_dataset",
]

DATA_ROOT_VARIABLE = "FL_ELASTIC_DATA_ROOT"

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Dataset:
    """A dataset in memory; shared by everyone in the process, so never write into its arrays.

    Parameters
    ----------
    name : str
        Its registered name.
    train_x, test_x : array of float32
        Normalised inputs, examples first and channels second; of text characters, int64.
    train_y, test_y : array of int64
        Class of each example; of text those of each place in it.
    classes : int
        Number of classes.
    input_shape : tuple of int
        Shape of one input.
    owners : array of int64, optional
        Who or what each training example was recorded from, for a natural partition.
    """

    name: str
    train_x: FloatArray
    train_y: IntArray
    test_x: FloatArray
    test_y: IntArray
    classes: int
    input_shape: tuple[int, ...]
    owners: IntArray | None = None

    @property
    def labels(self) -> IntArray:
        """One class per training example, by which it is dealt to clients; the first one of a text."""
        return self.train_y if self.train_y.ndim == 1 else self.train_y[:, 0]


@dataclass(frozen=True)
class DatasetKind:
    """How a registered dataset is read, and who naturally owns its examples.

    Parameters
    ----------
    read : callable
        Takes the data root and returns the :class:`Dataset`.
    owner : str, optional
        What an owner is ("person"); ``None`` where a natural partition is not possible.
    """

    read: Callable[[Path], Dataset]
    owner: str | None = None


DATASETS: Registry[DatasetKind] = Registry("dataset", "fl_elastic.datasets")
"""Data sets by name; those of other packages by their entry points."""


def data_root_folder(data_root: str | Path | None = None) -> Path:
    """Return the folder in which datasets are looked for.

    Parameters
    ----------
    data_root : path, optional
        Wins over ``FL_ELASTIC_DATA_ROOT``, which wins over the user's cache folder.
    """
    chosen = data_root or os.environ.get(DATA_ROOT_VARIABLE)
    return Path(chosen).expanduser().resolve() if chosen else cache_folder()


def load_dataset(
    name: str, data_root: str | Path | None = None, image_size: int | None = None
) -> Dataset:
    """Return a dataset; each one is read once per process.

    Parameters
    ----------
    name : str
        A registered name (``digits``, ``fashion_mnist``, ``cifar10``, ``cifar10_jpegq75``, ``cifar100``, ``cub50``,
        ``femnist``, ``gtsrb``, ``har``, ``plays``, ``shakespeare`` or ``tinyshakespeare``), or ``module:callable``:
        a function that returns a `Dataset`, of the data root or of nothing.
    data_root : path, optional
        Where its files are; see :func:`data_root_folder`. ``digits`` needs none.
    image_size : int, optional
        Height and width to which images are resized (bilinear): the size that a pretrained model expects.

    Raises
    ------
    DatasetError
        If the name is unknown, the files are missing or damaged, a function of one's own fails or returns
        something else, or what is to be resized are no images.

    Examples
    --------
    >>> load_dataset("digits").input_shape
    (1, 8, 8)
    >>> load_dataset("digits", image_size=16).input_shape
    (1, 16, 16)
    """
    return _load(name, data_root_folder(data_root), image_size)


def check_dataset_name(name: str) -> None:
    """Raise RegistryError unless ``name`` is registered, or ``module:callable``, which is not imported."""
    module, colon, attribute = name.partition(":")
    if colon and module and attribute:
        return
    try:
        DATASETS.check(name)
    except RegistryError as error:
        raise RegistryError(f"{error}{or_own(name)}") from None


@cache
def _load(name: str, root: Path, image_size: int | None) -> Dataset:
    if image_size is not None:
        return _resized(_load(name, root, None), image_size)
    try:
        check_dataset_name(name)
        own = None if name in DATASETS else from_module("dataset", name)
    except RegistryError as error:
        raise DatasetError(str(error)) from error
    return DATASETS.get(name).read(root) if own is None else _own(name, own, root)


def _resized(data: Dataset, size: int) -> Dataset:
    """Return a dataset with images of this height and width."""
    if len(data.input_shape) != 3:
        raise DatasetError(
            f"{data.name}: inputs of shape {data.input_shape} are no images to be resized to {size}"
        )

    def resized(images: FloatArray) -> FloatArray:
        found = nn.functional.interpolate(
            torch.from_numpy(images), (size, size), mode="bilinear", antialias=True
        )
        return np.asarray(found.numpy(), np.float32)

    shape = (data.input_shape[0], size, size)
    return replace(
        data, train_x=resized(data.train_x), test_x=resized(data.test_x), input_shape=shape
    )


def _own(name: str, make: Any, root: Path) -> Dataset:
    """Return what somebody's own function returns, if that can be trained on."""
    if not callable(make):
        raise DatasetError(f"dataset {name!r} is a {type(make).__name__}, not a function")
    try:
        parameters = inspect.signature(make).parameters.values()
        takes_root = any(each.default is each.empty for each in parameters)
        found = make(root) if takes_root else make()
    except (Exception, SystemExit) as error:
        raise DatasetError(f"dataset {name!r}: calling it failed: {first_line(error)}") from error
    if not isinstance(found, Dataset):
        raise DatasetError(f"dataset {name!r} returned a {type(found).__name__}, not a Dataset")
    for part, x, y in (
        ("train", found.train_x, found.train_y),
        ("test", found.test_x, found.test_y),
    ):
        problem = _misfit(found, np.asarray(x), np.asarray(y))
        if problem:
            raise DatasetError(f"dataset {name!r}: {part}: {problem}")
    if found.owners is not None and len(found.owners) != len(found.train_y):
        raise DatasetError(
            f"dataset {name!r} has {len(found.owners)} owners for {len(found.train_y)} training examples"
        )
    return found


def _misfit(data: Dataset, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> str:
    """Return what is wrong with inputs and classes of one's own, if anything is."""
    if len(x) == 0 or x.shape[1:] != tuple(data.input_shape) or y.shape != x.shape[:1]:
        return f"inputs of shape {x.shape} and classes of shape {y.shape} do not fit input_shape {data.input_shape}"
    if x.dtype != np.float32 or not np.issubdtype(y.dtype, np.integer):
        return f"inputs are {x.dtype} and classes {y.dtype}: give float32 and whole numbers"
    if not np.isfinite(x).all():
        return "an input is not finite"
    if y.min() < 0 or y.max() >= data.classes:
        return f"classes go from {y.min()} to {y.max()}, not from 0 to {data.classes - 1}"
    return ""


def _images(images: npt.NDArray[np.uint8], mean: list[float], std: list[float]) -> FloatArray:
    """Scale (n, height, width, channels) bytes to [0, 1], standardise, and put channels second."""
    # In place and channel by channel: the whole of CIFAR-10 is 740 MB in this form already.
    scaled = np.ascontiguousarray(np.moveaxis(images, -1, 1)).astype(np.float32)
    for channel, (centre, spread) in enumerate(zip(mean, std, strict=True)):
        scaled[:, channel] -= np.float32(255 * centre)
        scaled[:, channel] /= np.float32(255 * spread)
    return scaled


def _digits(_: Path) -> Dataset:
    """scikit-learn's 1,797 digits of 8x8 pixels, the test set a fixed stratified 30 %.

    Pixels lie in 0..16; 4.88 and 6.02 are their mean and standard deviation over all images.
    """
    # Its file alone: importing scikit-learn takes longer than a round of a small device.
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise DatasetError(
            "digits: scikit-learn, which brings the images, is not installed: "
            "pip install scikit-learn"
        )
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(path, "rt") as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.float64)
        images = table[:, :-1].reshape(-1, 8, 8)
    except (OSError, ValueError, EOFError) as error:
        raise DatasetError(f"digits: {path.name} of scikit-learn cannot be read: {error}") from None
    x = ((images[:, None] - 4.88) / 6.02).astype(np.float32)
    y = table[:, -1].astype(np.int64)
    rng = np.random.default_rng(2024)  # fixed: the split is a part of the dataset
    shuffled = [rng.permutation(np.flatnonzero(y == label)) for label in range(10)]
    test = np.sort(np.concatenate([own[: round(0.3 * len(own))] for own in shuffled]))
    train = np.setdiff1d(np.arange(len(y)), test)
    return Dataset("digits", x[train], y[train], x[test], y[test], 10, (1, 8, 8))


def _fashion_mnist(root: Path) -> Dataset:
    """Fashion-MNIST: its original four gz files where present, or else downloaded.

    0.2860 and 0.3530 are the mean and standard deviation of the training pixels.
    """
    raw = root / "FashionMNIST" / "raw"
    splits = []
    for train, prefix in ((True, "train"), (False, "t10k")):
        images, labels = idx_split(raw, prefix) or torchvision_split("FashionMNIST", root, train)
        splits.append((_images(images[..., None], [0.2860], [0.3530]), labels))
    return _image_dataset("fashion_mnist", splits, classes=10)


# Mean and standard deviation of the training pixels of CIFAR-10, as usually given.
_CIFAR_MEAN = [0.4914, 0.4822, 0.4465]
_CIFAR_STD = [0.2470, 0.2435, 0.2616]


def _cifar10(root: Path) -> Dataset:
    """CIFAR-10 in its published form, downloaded by torchvision where missing."""
    splits = []
    for train in (True, False):
        images, labels = torchvision_split("CIFAR10", root, train)
        splits.append((_images(images, _CIFAR_MEAN, _CIFAR_STD), labels))
    return _image_dataset("cifar10", splits, classes=10)


def _cifar100(root: Path) -> Dataset:
    """CIFAR-100 with its hundred fine classes, downloaded by torchvision where missing."""
    splits = []
    for train in (True, False):
        images, labels = torchvision_split("CIFAR100", root, train)
        splits.append((_images(images, [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]), labels))
    return _image_dataset("cifar100", splits, classes=100)


def _by_owner(name: str) -> Callable[[Path], Dataset]:
    """Return the reader of a data set of many owners, whose module is imported when it is read."""

    def read(root: Path) -> Dataset:
        from fl_elastic_simulations.data import leaf

        found: Dataset = getattr(leaf, name)(root)
        return found

    return read


def _cifar10_jpegq75(root: Path) -> Dataset:
    """CIFAR-10 recompressed as JPEG of quality 75: lossy, not to compare with published figures."""
    path = root / "cifar10_jpegq75" / "cifar10_jpegq75.npz"
    images = decoded_jpegs("cifar10_jpegq75", path, (32, 32, 3))
    splits = [
        (
            _images(images[f"x_{split}"], _CIFAR_MEAN, _CIFAR_STD),
            images[f"y_{split}"].astype(np.int64),
        )
        for split in ("train", "test")
    ]
    return _image_dataset("cifar10_jpegq75", splits, classes=10)


def _gtsrb(root: Path) -> Dataset:
    """German traffic signs at 32x32; the owner of a training image is the physical sign it shows.

    Tracks are numbered within a class, so the owner is class and track together. Mean and standard
    deviation are those of the 5,160 training images.
    """
    arrays = npz_arrays(
        "gtsrb",
        root / "gtsrb32" / "gtsrb32_sub.npz",
        ("x_train", "y_train", "track_train", "x_test", "y_test"),
    )
    mean, std = [0.3376, 0.3137, 0.3245], [0.2692, 0.2608, 0.2696]
    splits = [
        (_images(arrays[f"x_{split}"], mean, std), arrays[f"y_{split}"].astype(np.int64))
        for split in ("train", "test")
    ]
    owners = splits[0][1] * 1000 + arrays["track_train"].astype(np.int64)
    return _image_dataset("gtsrb", splits, classes=43, owners=owners)


# Mean and standard deviation of ImageNet: what weights trained on it expect.
_IMAGENET_MEAN = [0.485, 0.456, 0.406]
_IMAGENET_STD = [0.229, 0.224, 0.225]


def _cub50(root: Path) -> Dataset:
    """Fifty bird species of CUB-200-2011 at 128x128, in its official split, normalised as ImageNet."""
    path = root / "cub50_128" / "cub50_128.npz"
    pack = npz_arrays("cub50", path, ("jpeg", "off", "y", "is_train"))
    images = decode_jpegs("cub50", path, pack["jpeg"], pack["off"], (128, 128, 3))
    if not len(images) == len(pack["y"]) == len(pack["is_train"]):
        raise DatasetError(f"cub50: {path} is damaged (its arrays differ in length)")
    labels, train = pack["y"].astype(np.int64), pack["is_train"].astype(bool)
    splits = [
        (_images(images[part], _IMAGENET_MEAN, _IMAGENET_STD), labels[part])
        for part in (train, ~train)
    ]
    return _image_dataset("cub50", splits, classes=50)


def _har(root: Path) -> Dataset:
    """Human activity from phone and watch, as windows of 128 samples at 50 Hz; owner: the person.

    See :func:`~fl_elastic_simulations.data.activity_windows.activity_windows`. Mean and standard
    deviation of each channel are those of the training windows.
    """
    arrays = npz_arrays(
        "har",
        root / "har_phone_watch" / "har_raw_100hz.npz",
        ("x", "t_ms", "label", "off", "subject", "execution", "labels"),
    )
    from fl_elastic_simulations.data.activity_windows import activity_windows

    windows = activity_windows(arrays)
    mean = np.array([-5.10, -1.45, 0.16, -0.01, 0.02, 0.03], dtype=np.float32)[:, None]
    std = np.array([5.33, 6.53, 3.75, 1.41, 1.25, 1.04], dtype=np.float32)[:, None]
    x = (windows.x - mean) / std
    train, test = ~windows.late, windows.late
    return Dataset(
        "har",
        x[train],
        windows.y[train],
        x[test],
        windows.y[test],
        classes=len(arrays["labels"]),
        input_shape=(6, 128),
        owners=windows.subject[train],
    )


def _plays(root: Path) -> Dataset:
    """Characters of Shakespeare's plays in windows of 64, each with the one after it; owner: the role.

    See :func:`~fl_elastic_simulations.data.plays.role_windows`. The last tenth of what each role says is the test.
    """
    from fl_elastic_simulations.data.plays import CHARACTERS, LENGTH, role_windows

    windows = role_windows(root / "tinyshakespeare" / "input.txt")
    train, test = ~windows.late, windows.late
    return Dataset(
        "plays",
        windows.x[train],  # type: ignore[arg-type]
        windows.y[train],
        windows.x[test],  # type: ignore[arg-type]
        windows.y[test],
        classes=CHARACTERS,
        input_shape=(LENGTH,),
        owners=windows.role[train],
    )


def _image_dataset(
    name: str,
    splits: list[tuple[FloatArray, IntArray]],
    *,
    classes: int,
    owners: IntArray | None = None,
) -> Dataset:
    (train_x, train_y), (test_x, test_y) = splits
    for part, x, y in (("training", train_x, train_y), ("test", test_x, test_y)):
        if len(x) != len(y) or len(y) == 0 or y.min() < 0 or y.max() >= classes:
            raise DatasetError(
                f"{name}: {len(x)} {part} images and {len(y)} labels for {classes} classes do not "
                "fit together: the files are damaged, fetch them again"
            )
    return Dataset(name, train_x, train_y, test_x, test_y, classes, train_x.shape[1:], owners)


DATASETS.register("digits")(DatasetKind(_digits))
DATASETS.register("fashion_mnist")(DatasetKind(_fashion_mnist))
DATASETS.register("cifar10")(DatasetKind(_cifar10))
DATASETS.register("cifar10_jpegq75")(DatasetKind(_cifar10_jpegq75))
DATASETS.register("cifar100")(DatasetKind(_cifar100))
DATASETS.register("cub50")(DatasetKind(_cub50))
DATASETS.register("gtsrb")(DatasetKind(_gtsrb, owner="physical sign"))
DATASETS.register("har")(DatasetKind(_har, owner="person"))
DATASETS.register("femnist")(DatasetKind(_by_owner("femnist"), owner="writer"))
DATASETS.register("shakespeare")(DatasetKind(_by_owner("shakespeare"), owner="role"))
DATASETS.register("tinyshakespeare")(DatasetKind(_by_owner("tinyshakespeare"), owner="role"))
DATASETS.register("plays")(DatasetKind(_plays, owner="role"))
