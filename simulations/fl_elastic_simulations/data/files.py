"""Read datasets from files; every failure is one line that says what to do."""

from __future__ import annotations

import gzip
import io
import os
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_elastic.errors import DatasetError
from fl_elastic.registry import first_line

Arrays = dict[str, npt.NDArray[Any]]
Split = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)


def cache_folder() -> Path:
    """Return the folder for files that can be fetched or computed again; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return folder / "fl_elastic"


def npz_arrays(name: str, path: Path, keys: tuple[str, ...]) -> Arrays:
    """Read the arrays ``keys`` of one npz file.

    Parameters
    ----------
    name : str
        Name of the dataset, for the error message.
    path : Path
        The file.
    keys : tuple of str
        Names of the required arrays.

    Raises
    ------
    DatasetError
        If the file is missing or damaged, or lacks an array.
    """
    if not path.is_file():
        raise DatasetError(
            f"{name}: no file {path}: give the folder that holds {path.parent.name}/{path.name} "
            "with --data-root or FL_ELASTIC_DATA_ROOT"
        )
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in keys}
    except _UNREADABLE as error:
        raise _damaged(name, path, error) from None


def idx_split(folder: Path, prefix: str) -> Split | None:
    """Read the images and labels of one split in the idx format of MNIST.

    Parameters
    ----------
    folder : Path
        Folder of ``<prefix>-images-idx3-ubyte.gz`` and ``<prefix>-labels-idx1-ubyte.gz``.
    prefix : str
        ``train`` or ``t10k``.

    Returns
    -------
    tuple of arrays, or None
        ``None`` if one of the files is missing.

    Raises
    ------
    DatasetError
        If a file is damaged.
    """
    images = folder / f"{prefix}-images-idx3-ubyte.gz"
    labels = folder / f"{prefix}-labels-idx1-ubyte.gz"
    if not (images.is_file() and labels.is_file()):
        return None
    return _idx(images, 3), _idx(labels, 1).astype(np.int64)


def _idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    try:
        content = gzip.decompress(path.read_bytes())
        header = 4 + 4 * dimensions
        if content[:4] != bytes([0, 0, 8, dimensions]):  # unsigned bytes, so many dimensions
            raise ValueError(f"its first bytes {content[:4].hex()} are not those of an idx file")
        shape = np.frombuffer(content[4:header], dtype=">u4")
        return np.frombuffer(content, np.uint8, offset=header).reshape([int(n) for n in shape])
    except _UNREADABLE as error:
        raise _damaged(path.name, path, error) from None


def torchvision_split(kind: str, root: Path, train: bool) -> Split:
    """Read one split through torchvision, which downloads missing files to ``root``.

    Parameters
    ----------
    kind : str
        ``FashionMNIST`` or ``CIFAR10``.
    root : Path
        Folder of torchvision's files.
    train : bool
        Whether to read the training split instead of the test split.

    Raises
    ------
    DatasetError
        If torchvision is not installed, or the files are missing and cannot be downloaded.
    """
    try:
        from torchvision import datasets
    except ImportError:
        raise DatasetError(
            f"{kind}: torchvision, which fetches it, is not installed: pip install torchvision"
        ) from None
    try:
        # Any failure of the network, of the disk or of the archive's checksum ends up here.
        split = getattr(datasets, kind)(root=str(root), train=train, download=True)
    except Exception as error:
        raise DatasetError(
            f"{kind}: looked for its files under {root} and could not download them "
            f"({first_line(error)}): give the folder that holds them with --data-root or "
            "FL_ELASTIC_DATA_ROOT, or a network"
        ) from None
    return np.asarray(split.data, np.uint8), np.asarray(split.targets, np.int64)


def decode_jpegs(
    name: str,
    path: Path,
    packed: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    shape: tuple[int, int, int],
) -> npt.NDArray[np.uint8]:
    """Return the images of one pack, channels last; ``name`` and ``path`` are used in the error message.

    Raises
    ------
    DatasetError
        If an image is damaged or has another shape.
    """
    from PIL import Image

    content = packed.tobytes()
    images = np.empty((len(offsets) - 1, *shape), dtype=np.uint8)
    try:
        for number, (start, stop) in enumerate(pairwise(offsets)):
            image = np.asarray(Image.open(io.BytesIO(content[start:stop])))
            if image.shape != shape:
                raise ValueError(f"image {number} has shape {image.shape}, not {shape}")
            images[number] = image
    except _UNREADABLE as error:  # Pillow's own error is an OSError
        raise _damaged(name, path, error) from None
    return images


def _damaged(name: str, path: Path, error: Exception) -> DatasetError:
    return DatasetError(f"{name}: {path} is damaged ({first_line(error)}): fetch it again")
