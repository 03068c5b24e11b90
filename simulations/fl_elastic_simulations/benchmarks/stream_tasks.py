"""Streams that change: new classes, rotated pictures, one person after another, markets, weather, birds."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from fl_elastic.errors import DatasetError
from fl_elastic.named_models import build_model
from fl_elastic.streaming.body import as_floats
from fl_elastic_simulations.benchmarks.transfer import WEIGHTS
from fl_elastic_simulations.data.activity_windows import activity_windows
from fl_elastic_simulations.data.datasets import load_dataset
from fl_elastic_simulations.data.files import npz_arrays
from fl_elastic_simulations.models.pretrained import load_pretrained


@dataclass(frozen=True, eq=False)
class Labelled:
    """Samples and their labels."""

    x: NDArray[np.generic]
    y: NDArray[np.int64]

    def __getitem__(self, rows: NDArray[np.intp] | slice) -> Labelled:
        return Labelled(self.x[rows], self.y[rows])

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Stream:
    """A stream, and the data that the device was trained on before it.

    Parameters
    ----------
    before : Labelled
        Data that the model is trained on at home, before it is deployed.
    samples : Labelled
        Samples in the order in which they arrive.
    starts : tuple of int
        First sample of each task; the first is 0, the others are the known changes.
    tests : tuple of Labelled
        Test data of each task; empty if only the accuracy along the stream is measured.
    """

    before: Labelled
    samples: Labelled
    starts: tuple[int, ...]
    tests: tuple[Labelled, ...] = ()


@dataclass(frozen=True)
class StreamTask:
    """A stream with its model, and the limits of the device.

    Parameters
    ----------
    title : str
        Title of the stream in tables.
    read : callable
        ``read(data_root, seed)`` returns the stream.
    build : callable
        ``build(data_root, outputs, seed)`` returns the untrained model.
    latent : int
        Number of groups above the frozen part, for latent replay.
    capacity : int
        Bytes of the store of inputs; a store of features gets a tenth.
    every, steps : int
        Number of labelled samples between adaptations, and training steps of each adaptation.
    latent_steps : int
        Training steps of each adaptation with latent replay, whose cheaper steps allow more of them.
    together : int
        Number of samples that arrive at once.
    remember : float, optional
        Setting ``remember`` of a head in closed form, for streams whose classes themselves change.
    stored, latent_stored : float
        Share of stored samples in each batch, with experience replay and with latent replay, which sees each new
        sample in more steps. Both were chosen on the first seed.
    rate : float
        Learning rate of Adam on the device.
    prepare : callable
        Converts a batch of samples as they arrive to the model's input.
    epochs : int
        Number of epochs of training at home.
    """

    title: str
    read: Callable[[Path, int], Stream]
    build: Callable[[Path, int, int], nn.Module]
    latent: int
    capacity: int
    every: int
    steps: int
    latent_steps: int
    stored: float = 0.7
    latent_stored: float = 0.8
    rate: float = 1e-3
    prepare: Callable[[Tensor], Tensor] = as_floats
    epochs: int = 4
    together: int = 25
    remember: float | None = None

    def has(self, read: str) -> bool:
        """Return whether the task's model has the places of this name for a head."""
        return "features." not in read or self.build is _mobilenet


# Pixels are stored as bytes, as a camera delivers them. Mean and deviation are those of the dataset.
_GREY = (0.2860, 0.3530)
_COLOUR = (torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225]))

_SIGNS = (torch.tensor([0.3376, 0.3137, 0.3245]), torch.tensor([0.2692, 0.2608, 0.2696]))


def _grey(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - _GREY[0]) / _GREY[1]


def _colours(of: tuple[Tensor, Tensor], pixels: Tensor) -> Tensor:
    mean, spread = (each.to(pixels.device)[:, None, None] for each in of)
    return (pixels.float() / 255 - mean) / spread


def _bytes(scaled: NDArray[np.floating]) -> NDArray[np.uint8]:
    return np.asarray(np.rint(np.clip(scaled, 0, 1) * 255), np.uint8)


def _fashion(root: Path) -> tuple[Labelled, Labelled]:
    found = load_dataset("fashion_mnist", root)
    return (
        Labelled(_bytes(found.train_x[:] * _GREY[1] + _GREY[0]), found.train_y),
        Labelled(_bytes(found.test_x[:] * _GREY[1] + _GREY[0]), found.test_y),
    )


def _new_classes(root: Path, seed: int) -> Stream:
    """Return a stream with four classes known at home, then two new classes at a time without any old ones."""
    train, test = _fashion(root)
    draw = np.random.default_rng(seed)
    order = draw.permutation(10)
    sets = [order[:4], order[4:6], order[6:8], order[8:]]
    rows = [draw.permutation(np.flatnonzero(np.isin(train.y, each))) for each in sets]
    before, rows[0] = rows[0][:3000], rows[0][3000:4000]
    parts = [train[own[:1500]] for own in rows]
    tests = tuple(_some(test, np.isin(test.y, each), 200 * len(each), draw) for each in sets)
    return _in_turn(train[before], parts, tests)


def _people(root: Path, seed: int) -> Stream:
    """Return human activity: eight people at home, then fifteen others one after another, each in time order.

    Channels are standardised by mean and deviation over all windows.
    """
    arrays = npz_arrays(
        "har", root / "har_phone_watch" / "har_raw_100hz.npz",
        ("x", "t_ms", "label", "off", "subject", "execution", "labels"),
    )  # fmt: skip
    windows = activity_windows(arrays)
    order = np.random.default_rng(seed).permutation(np.unique(windows.subject))
    mean = windows.x.mean((0, 2), keepdims=True)
    x = ((windows.x - mean) / windows.x.std((0, 2), keepdims=True)).astype(np.float32)
    everything = Labelled(x, windows.y)

    def of(people: NDArray[np.int64], *, late: bool) -> Labelled:
        return everything[np.flatnonzero(np.isin(windows.subject, people) & (windows.late == late))]

    parts = [of(order[[person]], late=False) for person in range(8, len(order))]
    tests = tuple(of(order[[person]], late=True) for person in range(8, len(order)))
    return _in_turn(of(order[:8], late=False), parts, tests)


def _electricity(root: Path, seed: int) -> Stream:
    """Return rows in time order, with a target of 0 or 1 in the last column; home knows the first rows."""
    path, known = root / "drift_streams" / "elec.csv.gz", 2000
    try:
        with gzip.open(path, "rt") as lines:
            rows = np.loadtxt(lines, delimiter=",", skiprows=1)
    except (OSError, ValueError, EOFError) as error:
        raise DatasetError(f"electricity: {path} cannot be read: {error}") from None
    x, y = rows[:, :-1], rows[:, -1].astype(np.int64)
    spread = x[:known].std(0)
    x = ((x - x[:known].mean(0)) / np.where(spread > 1e-6, spread, 1)).astype(np.float32)
    everything = Labelled(x, y)
    return Stream(everything[slice(known)], everything[slice(known, None)], (0,))


def _birds(root: Path, seed: int) -> Stream:
    """Return a stream with ten species known at home, then ten new ones at a time."""
    found = load_dataset("cub50", root)
    draw = np.random.default_rng(seed)

    def small(x: NDArray[np.float32]) -> NDArray[np.uint8]:
        mean, spread = (each.numpy()[:, None, None] for each in _COLOUR)
        return _bytes(avg_pool2d(torch.from_numpy(x * spread + mean), 2).numpy())

    train = Labelled(small(found.train_x[:]), found.train_y)
    test = Labelled(small(found.test_x[:]), found.test_y)
    sets = np.split(draw.permutation(50), 5)
    rows = [draw.permutation(np.flatnonzero(np.isin(train.y, each))) for each in sets]
    # A hundred pictures of the first ten species come again in the stream, so that forgetting them matters.
    before, rows[0] = rows[0][100:], rows[0][:100]
    tests = tuple(_some(test, np.isin(test.y, each), 100, draw) for each in sets)
    return _in_turn(train[before], [train[own] for own in rows], tests)


def _signs(root: Path, seed: int) -> Stream:
    """Return a stream with eleven signs known at home, then eight new ones at a time, 40 pictures of each."""
    found = load_dataset("gtsrb", root)
    draw = np.random.default_rng(seed)
    mean, spread = (each.numpy()[:, None, None] for each in _SIGNS)

    def large(x: NDArray[np.float32]) -> NDArray[np.uint8]:
        return _bytes(np.repeat(np.repeat(x * spread + mean, 2, axis=2), 2, axis=3))

    train, test = (
        Labelled(large(found.train_x[:]), found.train_y),
        Labelled(large(found.test_x[:]), found.test_y),
    )
    sets = np.split(draw.permutation(43), [11, 19, 27, 35])
    rows = [
        draw.permutation(
            np.concatenate(
                [draw.permutation(np.flatnonzero(train.y == one))[:most] for one in each]
            )
        )
        for each, most in zip(sets, (80, 40, 40, 40, 40), strict=True)
    ]
    before, rows[0] = rows[0][320:], rows[0][:320]
    tests = tuple(_some(test, np.isin(test.y, each), 320, draw) for each in sets)
    return _in_turn(train[before], [train[own] for own in rows], tests)


def _some(
    source: Labelled, among: NDArray[np.bool_], size: int, draw: np.random.Generator
) -> Labelled:
    return source[draw.permutation(np.flatnonzero(among))[:size]]


def _in_turn(before: Labelled, parts: list[Labelled], tests: tuple[Labelled, ...]) -> Stream:
    ends = np.cumsum([0, *map(len, parts)])
    samples = Labelled(np.concatenate([p.x for p in parts]), np.concatenate([p.y for p in parts]))
    return Stream(before, samples, tuple(int(start) for start, _ in pairwise(ends)), tests)


def _pictures(_: Path, outputs: int, seed: int) -> nn.Module:
    """Return four 2-d convolutions; a waist of 64 maps of 2x2 makes stored features small."""

    def block(inputs: int, maps: int, pool: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, maps, 3, padding=1, bias=False)
        return [conv, nn.GroupNorm(8, maps), nn.ReLU(), nn.MaxPool2d(pool)]

    widths = ((48, 2), (80, 2), (64, 3), (160, 1))
    return _stacked(block, 1, widths, nn.AdaptiveAvgPool2d(1), outputs, seed)


def _motions(_: Path, outputs: int, seed: int) -> nn.Module:
    """Return four convolutions along time."""

    def block(inputs: int, series: int, kernel: int, pool: int) -> list[nn.Module]:
        conv = nn.Conv1d(inputs, series, kernel, padding=kernel // 2, bias=False)
        return [conv, nn.GroupNorm(8, series), nn.ReLU(), nn.MaxPool1d(pool)]

    widths = ((160, 9, 2), (24, 9, 8), (128, 3, 1), (128, 3, 1))
    return _stacked(block, 6, widths, nn.AdaptiveAvgPool1d(1), outputs, seed)


def _stacked(
    block: Callable[..., list[nn.Module]], inputs: int, widths: Sequence[tuple[int, ...]],
    pool: nn.Module, outputs: int, seed: int,
) -> nn.Module:  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        layers: list[nn.Module] = []
        for width in widths:
            layers += block(inputs, *width)
            inputs = width[0]
        return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(inputs, outputs))


def _dense(_: Path, outputs: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
        )


def _mobilenet(root: Path, outputs: int, seed: int) -> nn.Module:
    model = build_model("mobilenet_v2", (3, 64, 64), outputs, seed)
    load_pretrained(model, root / WEIGHTS)
    return model


TASKS: dict[str, StreamTask] = {
    # New classes change little below a high cut. Other people's motions need a low cut.
    "fashion-classes": StreamTask(
        "Fashion-MNIST, two new classes at a time", _new_classes,
        _pictures, latent=3, capacity=4 * 2**20,
        every=100, steps=20, latent_steps=72, prepare=_grey,
    ),
    "activity": StreamTask(
        "Human activity, fifteen people in turn", _people,
        _motions, latent=5, capacity=5 * 2**20,
        every=50, steps=20, latent_steps=22, latent_stored=0.7,
    ),
    "electricity": StreamTask(
        "Electricity prices", _electricity, _dense, latent=2, capacity=2 * 2**20,
        every=200, steps=20, latent_steps=20, latent_stored=0.5, together=100, remember=2000,
    ),
    "birds": StreamTask(
        "CUB-50, ten new species at a time, pretrained MobileNetV2 at 64 pixels", _birds,
        _mobilenet, latent=15, capacity=8 * 2**20, every=100, steps=20, latent_steps=28,
        prepare=partial(_colours, _COLOUR),
    ),
    "signs": StreamTask(
        "Traffic signs, eight new ones at a time, pretrained MobileNetV2 at 64 pixels", _signs,
        _mobilenet, latent=15, capacity=8 * 2**20, every=100, steps=20, latent_steps=28,
        prepare=partial(_colours, _SIGNS),
    ),
}  # fmt: skip
