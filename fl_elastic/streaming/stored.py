"""What a sample store hands out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["UNLABELLED", "Samples"]

UNLABELLED = -1
"""Stands for a label that has not come yet."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Some samples of a store; unpacks into inputs and labels.

    Attributes
    ----------
    ids : array of int, shape (N,)
        By which they are labelled or deleted; bigger is newer.
    x : array, shape (N, ...)
        Inputs, or features where the store holds those.
    y : array of int, shape (N,)
        Labels; `UNLABELLED` for none.
    t : array of float, shape (N,)
        When they were observed, in the stream's own seconds.
    outputs : array of float or None, shape (N, classes)
        What the model said of them when they were stored, if that was kept for all of them.
    """

    ids: NDArray[np.int64]
    x: NDArray[Any]
    y: NDArray[np.int64]
    t: NDArray[np.float64]
    outputs: NDArray[np.float32] | None = None

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return iter((self.x, self.y))

    def __len__(self) -> int:
        return len(self.ids)
