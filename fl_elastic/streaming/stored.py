"""What a sample store takes in and hands out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_elastic.streaming.encoding import Encoding

__all__ = [
    "UNLABELLED",
    "Change",
    "Offer",
    "Placed",
    "Relabelled",
    "Samples",
    "Withdrawn",
    "samples_of",
]

UNLABELLED = -1
"""Stands for a label that has not come yet."""


@dataclass(frozen=True, eq=False, slots=True)
class Offer:
    """A sample that is offered to a store; nothing of it is checked yet.

    Parameters
    ----------
    x : array
        Input or features.
    y : int or None
        Label; None or `UNLABELLED` if it is not known yet.
    t : float or None
        When it was observed; None for now.
    outputs : array or None
        What the model says of it now.
    number : int or None
        Its id, which no other sample has; None for the one after the last.
    """

    x: ArrayLike
    y: Any = None
    t: Any = None
    outputs: ArrayLike | None = None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Relabelled:
    """A label that came late; it costs nothing if the sample is not here."""

    number: int
    y: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A sample that leaves, because somebody else keeps it from now on."""

    number: int


Change: TypeAlias = Offer | Relabelled | Withdrawn
"""What is done to a store, in the order of the stream."""


class Placed(NamedTuple):
    """What became of an offer.

    Parameters
    ----------
    number : int or None
        Its id: how many samples that make sense have been offered; None if it makes none or could not be written.
    kept : bool
        Whether it has a place.
    """

    number: int | None
    kept: bool


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


def samples_of(rows: Sequence[Any], form: Encoding | None) -> Samples:
    """Return samples, from rows of id, label, time, outputs and sample as they lie in the file."""
    if form is None or not rows:
        shape, dtype = ((), np.dtype(np.float32)) if form is None else (form.shape, form.dtype)
        x = np.zeros((0, *shape), dtype)
    else:
        x = form.decode([row[4] for row in rows])
    outputs = None
    if rows and all(row[3] is not None for row in rows):
        told = [np.frombuffer(row[3], np.float32) for row in rows]
        # A head that grew says more of later samples.
        if len({len(each) for each in told}) == 1:
            outputs = np.stack(told)
    return Samples(
        ids=np.array([row[0] for row in rows], np.int64),
        x=x,
        y=np.array([row[1] for row in rows], np.int64),
        t=np.array([row[2] for row in rows], np.float64),
        outputs=outputs,
    )
