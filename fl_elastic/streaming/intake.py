"""Checks of the samples and labels that a stream delivers."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_elastic.errors import StreamError
from fl_elastic.update.manifest import array_of

_NO_LABEL = -1
_KINDS = "biuf"
_LARGEST_LABEL = 2**31
# Most characters of a value in a message.
_SHOWN = 24


class Refused(Exception):
    """Raised for an invalid sample or label; learner and store catch it, so that callers never see it."""


class Unreadable(str):
    """The reason why a source cannot read a sample; the source yields it in place of the sample."""

    __slots__ = ()


class Like(Protocol):
    """Shape and dtype of every sample of a stream."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of its numbers."""


def checked_sample(x: Any, like: Like | None) -> NDArray[Any]:
    """Return a sample as an array of the same shape and type as the others.

    Parameters
    ----------
    x : array-like or Tensor
        The sample as it arrived.
    like : array, Like or None
        Another sample, or anything with its shape and dtype; None for the first sample.

    Raises
    ------
    Refused
        If it has another shape or type, or is not an array of finite numbers.
    """
    if isinstance(x, Unreadable):
        raise Refused(str(x))
    if np.ma.is_masked(x):
        raise Refused("a number is masked")
    try:
        array = array_of(x) if isinstance(x, Tensor) else np.asarray(x)
    except (ValueError, TypeError, RuntimeError):
        raise Refused("the sample is not an array") from None
    if array.dtype.kind not in _KINDS:
        raise Refused(f"type {array.dtype} is not a number")
    # A file may come from a machine with another byte order.
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise Refused("a number is not finite")
    if not array.size:
        raise Refused("the sample has no numbers")
    if like is not None and array.shape != like.shape:
        raise Refused(f"shape {array.shape} instead of {like.shape}")
    if like is None or array.dtype == like.dtype:
        return np.asarray(array, order="C")
    if not np.can_cast(array.dtype, like.dtype, "same_kind"):
        raise Refused(f"type {array.dtype} instead of {like.dtype}")
    with np.errstate(over="ignore"):
        cast = np.asarray(array, like.dtype, order="C")
    # Integers that do not fit the type would become other integers.
    fits = np.isfinite(cast) if cast.dtype.kind == "f" else cast == array
    if not fits.all():
        raise Refused(f"a number is beyond the range of {cast.dtype}")
    return cast


def checked_batch(xs: Any, ys: Any) -> tuple[list[Any], list[Any]]:
    """Return samples and labels as lists of the same length, with None for labels that were not given.

    >>> checked_batch([[1.0], [2.0]], None)
    ([[1.0], [2.0]], [None, None])
    """
    try:
        samples = list(xs)
        labels = [None] * len(samples) if ys is None else list(ys)
    except TypeError:
        raise StreamError("samples and labels of a batch must be sequences") from None
    if len(samples) != len(labels):
        raise StreamError(
            f"{len(samples)} samples and {len(labels)} labels: give as many of each, or no labels"
        )
    return samples, labels


def checked_label(y: Any) -> int | None:
    """Return a label as an integer; None for one that has not arrived yet.

    Raises
    ------
    Refused
        If it is not an integer in the range of class numbers.

    Examples
    --------
    >>> checked_label(np.float32(3.0)), checked_label("-1"), checked_label(np.array([2])), checked_label(None)
    (3, -1, 2, None)
    >>> checked_label("1_0")
    Traceback (most recent call last):
    fl_elastic.streaming.intake.Refused: the label '1_0' is not a class number: number the classes
    """
    if y is None or y is np.ma.masked:
        return None
    if isinstance(y, np.ndarray) and y.size == 1:
        # A row of a table of labels of shape (N, 1).
        y = y.item()
    try:
        # Python reads the text 1_0 as ten.
        value = math.nan if isinstance(y, str) and "_" in y else float(y)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        value = math.nan
    if not value.is_integer():
        raise Refused(f"the label {_shown(y)} is not a class number: number the classes")
    if not -_LARGEST_LABEL <= value < _LARGEST_LABEL:
        raise Refused(f"the label {_shown(y)} is not a class number of 32 bits: number the classes")
    return int(value)


def kept_label(label: int | None) -> int:
    """Return a label's number on disk: -1 for no label, so negative labels are stored one lower.

    >>> [kept_label(each) for each in (None, 3, 0, -1, -2)], [label_of(each) for each in (-1, 3, 0, -2, -3)]
    ([-1, 3, 0, -2, -3], [None, 3, 0, -1, -2])
    """
    if label is None:
        return _NO_LABEL
    return label if label >= 0 else label - 1


def label_of(kept: int) -> int | None:
    """Return the label for a number on disk; see `kept_label`."""
    if kept == _NO_LABEL:
        return None
    return kept if kept >= 0 else kept + 1


def _shown(value: Any) -> str:
    return repr(value.item() if isinstance(value, np.generic) else value)[:_SHOWN]
