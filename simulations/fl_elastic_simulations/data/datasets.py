"""The datasets for simulated federations, as normalised arrays.

Files are searched under a data root: the argument, or else the environment variable
``FL_ELASTIC_DATA_ROOT``, or else the user's cache folder (``$XDG_CACHE_HOME/fl_elastic`` or
``~/.cache/fl_elastic``). Downloadable files are downloaded into that folder if they are missing.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fl_elastic.errors import DatasetError, RegistryError
from fl_elastic.registry import Registry, first_line, from_module, or_own
from fl_elastic_simulations.data.files import cache_folder
from fl_elastic_simulations.data.resized import ResizedImages

DATA_ROOT_VARIABLE = "FL_ELASTIC_DATA_ROOT"

FloatArray = npt.NDArray[np.float32]
Inputs: TypeAlias = FloatArray | ResizedImages
"""Inputs of all examples of a part of a dataset; indexing gives an array."""
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Dataset:
    """A dataset in memory; it is shared within the process, so its arrays must not be changed.

    Parameters
    ----------
    name : str
        Registered name.
    train_x, test_x : array of float32, or ResizedImages
        Normalised inputs, examples first and channels second; for text, characters as int64.
    train_y, test_y : array of int64
        Class of each example; for text, the class at each position.
    classes : int
        Number of classes.
    input_shape : tuple of int
        Shape of one input.
    owners : array of int64, optional
        Person or thing from which each training example was recorded, for a natural partition.
    """

    name: str
    train_x: Inputs
    train_y: IntArray
    test_x: Inputs
    test_y: IntArray
    classes: int
    input_shape: tuple[int, ...]
    owners: IntArray | None = None

    @property
    def labels(self) -> IntArray:
        """One class per training example for partitioning; for text, that of the first position."""
        return self.train_y if self.train_y.ndim == 1 else self.train_y[:, 0]


@dataclass(frozen=True)
class DatasetKind:
    """A registered dataset: how it is read, and what owns its examples.

    Parameters
    ----------
    read : callable
        Takes the data root and returns the :class:`Dataset`.
    owner : str, optional
        Kind of owner ("person"); ``None`` if a natural partition is not possible.
    """

    read: Callable[[Path], Dataset]
    owner: str | None = None


DATASETS: Registry[DatasetKind] = Registry("dataset", "fl_elastic.datasets")
"""Datasets by name; other packages add theirs by entry points."""


def part_of(inputs: Inputs, rows: IntArray) -> Inputs:
    """Return the inputs of some examples; images to be resized are resized only when they are read."""
    return inputs.part(rows) if isinstance(inputs, ResizedImages) else inputs[rows]


def data_root_folder(data_root: str | Path | None = None) -> Path:
    """Return the folder in which datasets are searched.

    Parameters
    ----------
    data_root : path, optional
        Takes precedence over ``FL_ELASTIC_DATA_ROOT``, which takes precedence over the user's cache folder.
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
        A registered name (``digits``, ``fashion_mnist``, ``cifar10``, ``cifar10_jpegq75``, ``cub50``,
        ``gtsrb`` or ``har``), or ``module:callable``: a function that returns a `Dataset`, with the data
        root as its argument or without any.
    data_root : path, optional
        Folder of the files, see :func:`data_root_folder`. ``digits`` needs none.
    image_size : int, optional
        Height and width to which images are resized (bilinear) as they are read: the size that a pretrained model
        expects.

    Raises
    ------
    DatasetError
        If the name is unknown, the files are missing or damaged, a custom function fails or returns something else,
        or inputs to be resized are not images.

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
    """Return the dataset with its images resized to this height and width."""
    if len(data.input_shape) != 3:
        raise DatasetError(
            f"{data.name}: inputs of shape {data.input_shape} are no images to be resized to {size}"
        )
    shape = (data.input_shape[0], size, size)
    train, test = (ResizedImages(each[:], size) for each in (data.train_x, data.test_x))
    return replace(data, train_x=train, test_x=test, input_shape=shape)


def _own(name: str, make: Any, root: Path) -> Dataset:
    """Return the result of a custom function, after checking that it can be trained on."""
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
    found = replace(
        found,
        train_x=np.asarray(found.train_x), train_y=np.asarray(found.train_y),
        test_x=np.asarray(found.test_x), test_y=np.asarray(found.test_y),
    )  # fmt: skip
    for part, x, y in (
        ("train", found.train_x, found.train_y),
        ("test", found.test_x, found.test_y),
    ):
        problem = _misfit(found, np.asarray(x), y)
        if problem:
            raise DatasetError(f"dataset {name!r}: {part}: {problem}")
    if found.owners is not None and len(found.owners) != len(found.train_y):
        raise DatasetError(
            f"dataset {name!r} has {len(found.owners)} owners for {len(found.train_y)} training examples"
        )
    # Losses of torch take classes as int64.
    return replace(
        found, train_y=found.train_y.astype(np.int64), test_y=found.test_y.astype(np.int64)
    )


def _misfit(data: Dataset, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> str:
    """Return the problem with a custom dataset's inputs and classes; empty if there is none."""
    if len(x) == 0:
        return "there is no example: give at least one"
    if x.shape[1:] != tuple(data.input_shape):
        return f"inputs of shape {x.shape} do not fit input_shape {data.input_shape}"
    if y.shape != x.shape[:1]:
        return f"classes of shape {y.shape} do not fit inputs of shape {x.shape}: give one class for each example"
    if x.dtype != np.float32:
        return f"inputs are {x.dtype}: give normalised numbers as float32"
    if not np.issubdtype(y.dtype, np.integer):
        return f"classes such as {y[0].item()!r} are no whole numbers: number them from 0"
    finite = np.isfinite(x).reshape(len(x), -1).all(axis=1)
    if not finite.all():
        return f"input {int(finite.argmin())} is not finite"
    if y.min() < 0 or y.max() >= data.classes:
        return (
            f"classes go from {y.min()} to {y.max()}, not from 0 to {data.classes - 1}: number them from 0, and "
            "give their number as classes"
        )
    return ""


def _read_by(module: str, name: str) -> Callable[[Path], Dataset]:
    """Return the reader of a dataset, which imports its module when called: a node only needs one of them."""

    def read(root: Path) -> Dataset:
        found: Dataset = getattr(import_module(f"fl_elastic_simulations.data.{module}"), name)(root)
        return found

    return read


for _name in ("digits", "fashion_mnist", "cifar10", "cifar10_jpegq75", "cub50"):
    DATASETS.register(_name)(DatasetKind(_read_by("pictures", _name)))
DATASETS.register("gtsrb")(DatasetKind(_read_by("pictures", "gtsrb"), owner="physical sign"))
DATASETS.register("har")(DatasetKind(_read_by("activity_windows", "har"), owner="person"))
