"""Streams for a learner beside online learners: made ones that change, digits that turn, real ones."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import DatasetError

__all__ = ["STREAMS", "OnlineStream", "Rows"]

Rows = tuple[NDArray[np.float32], NDArray[np.int64]]
LENGTH = 4000
# Inputs are scaled by what the first rows were like; a device has nothing else to go by.
_FIRST = 200


@dataclass(frozen=True)
class OnlineStream:
    """A stream.

    Parameters
    ----------
    title : str
        As it stands in tables.
    read : callable
        ``read(data_root, seed)`` gives samples and labels in their order.
    seeded : bool
        Whether each seed is another stream; if not, it is another learner on the same one.
    """

    title: str
    read: Callable[[Path, int], Rows]
    seeded: bool = True


def _scaled(x: NDArray[Any], y: NDArray[Any]) -> Rows:
    x = np.asarray(x, np.float64)
    spread = x[:_FIRST].std(0)
    x = (x - x[:_FIRST].mean(0)) / np.where(spread > 1e-6, spread, 1.0)
    return np.ascontiguousarray(x, np.float32), np.asarray(y, np.int64)


def _changed(make: Callable[[Any, int], tuple[Any, Any]]) -> Callable[[Path, int], Rows]:
    """Return a stream that is one thing in its first half, and another one after it."""

    def read(root: Path, seed: int) -> Rows:
        del root
        from river.datasets import synth

        rows = [row for half in make(synth, seed) for row in islice(iter(half), LENGTH // 2)]
        return _scaled(
            np.array([list(x.values()) for x, _ in rows], np.float64),
            np.array([int(y) for _, y in rows]),
        )

    return read


def _sea(synth: Any, seed: int) -> tuple[Any, Any]:
    first, second = (synth.SEA(variant=v, noise=0.1, seed=2 * seed + v // 3) for v in (0, 3))
    return first, second


def _agrawal(synth: Any, seed: int) -> tuple[Any, Any]:
    first, second = (
        synth.Agrawal(classification_function=f, seed=2 * seed + f // 3) for f in (0, 3)
    )
    return first, second


def _led(synth: Any, seed: int) -> tuple[Any, Any]:
    settings = {"noise_percentage": 0.1, "irrelevant_features": True}
    return (
        synth.LED(seed=2 * seed, **settings),
        synth.LEDDrift(seed=2 * seed + 1, n_drift_features=5, **settings),
    )


def _digits(root: Path, seed: int) -> Rows:
    """Return the bundled digits in two halves, the second one turned by 90 degrees."""
    del root
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = images.reshape(-1, 8, 8)[order]
    images[len(order) // 2 :] = np.rot90(images[len(order) // 2 :], axes=(1, 2))
    return _scaled(images.reshape(len(order), 64), labels[order])


def _table(name: str, rows: int) -> Callable[[Path, int], Rows]:
    def read(root: Path, seed: int) -> Rows:
        del seed
        path = root / "drift_streams" / f"{name}.csv.gz"
        try:
            with gzip.open(path, "rt") as lines:
                found = np.loadtxt(lines, delimiter=",", skiprows=1, max_rows=rows)
        except (OSError, ValueError, EOFError) as error:
            raise DatasetError(f"{name}: {path} cannot be read: {error}") from None
        return _scaled(found[:, :-1], found[:, -1])

    return read


STREAMS: dict[str, OnlineStream] = {
    "sea": OnlineStream("SEA, an abrupt change", _changed(_sea)),
    "agrawal": OnlineStream("Agrawal, an abrupt change", _changed(_agrawal)),
    "led": OnlineStream("LED, five attributes swapped", _changed(_led)),
    "digits": OnlineStream("Digits, turned by 90 degrees", _digits),
    "electricity": OnlineStream("Electricity prices", _table("elec", 10_000), seeded=False),
    "weather": OnlineStream("Rain tomorrow", _table("weather", 10_000), seeded=False),
}
"""By name."""
