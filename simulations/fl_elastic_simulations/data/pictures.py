"""Datasets of pictures, as normalised arrays: handwritten digits, clothes, small photographs, signs, birds."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fl_elastic.errors import DatasetError
from fl_elastic_simulations.data.datasets import Dataset, FloatArray, IntArray
from fl_elastic_simulations.data.files import (
    decode_jpegs,
    idx_split,
    npz_arrays,
    torchvision_split,
)


def digits(_: Path) -> Dataset:
    """Return scikit-learn's 1,797 digits of 8x8 pixels; the test set is a fixed stratified 30 %.

    Pixels are in 0..16; 4.88 and 6.02 are their mean and standard deviation over all images.
    """
    # Read only its file: importing scikit-learn takes longer than a round of a small device.
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


def fashion_mnist(root: Path) -> Dataset:
    """Return Fashion-MNIST from its four original gz files, which are downloaded if they are missing.

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


def cifar10(root: Path) -> Dataset:
    """Return CIFAR-10 in its published form, downloaded by torchvision if missing."""
    splits = []
    for train in (True, False):
        images, labels = torchvision_split("CIFAR10", root, train)
        splits.append((_images(images, _CIFAR_MEAN, _CIFAR_STD), labels))
    return _image_dataset("cifar10", splits, classes=10)


def cifar10_jpegq75(root: Path) -> Dataset:
    """Return CIFAR-10 recompressed as JPEG of quality 75: lossy, not comparable with published figures."""
    path = root / "cifar10_jpegq75" / "cifar10_jpegq75.npz"
    keys = [f"{kind}_{split}" for split in ("train", "test") for kind in ("jpeg", "off", "y")]
    pack = npz_arrays("cifar10_jpegq75", path, tuple(keys))
    splits = []
    for split in ("train", "test"):
        images = decode_jpegs(
            "cifar10_jpegq75", path, pack[f"jpeg_{split}"], pack[f"off_{split}"], (32, 32, 3)
        )
        splits.append(
            (_images(images, _CIFAR_MEAN, _CIFAR_STD), pack[f"y_{split}"].astype(np.int64))
        )
    return _image_dataset("cifar10_jpegq75", splits, classes=10)


def gtsrb(root: Path) -> Dataset:
    """Return German traffic signs at 32x32; the owner of a training image is the physical sign that it shows.

    Tracks are numbered within a class, so the owner is class and track together. Mean and standard deviation are
    those of the 5,160 training images.
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


# Mean and standard deviation of ImageNet, which weights trained on it expect.
_IMAGENET_MEAN = [0.485, 0.456, 0.406]
_IMAGENET_STD = [0.229, 0.224, 0.225]


def cub50(root: Path) -> Dataset:
    """Return fifty bird species of CUB-200-2011 at 128x128, in its official split, normalised as ImageNet."""
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


def _images(images: npt.NDArray[np.uint8], mean: list[float], std: list[float]) -> FloatArray:
    """Scale (n, height, width, channels) bytes to [0, 1], standardise, and put channels second."""
    # In place and channel by channel, since all of CIFAR-10 already takes 740 MB in this form.
    scaled = np.ascontiguousarray(np.moveaxis(images, -1, 1)).astype(np.float32)
    for channel, (centre, spread) in enumerate(zip(mean, std, strict=True)):
        scaled[:, channel] -= np.float32(255 * centre)
        scaled[:, channel] /= np.float32(255 * spread)
    return scaled


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
