"""Sums over examples of what enters a model's last linear layer and what should come out of it.

They add up over clients, and are all that the best linear head in the sense of least squares depends on
(`fl_elastic.update.closed_form`): no client's examples are seen, and how they are spread does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update.frame import Kind, field, index_field, pack, unpack
from fl_elastic.update.manifest import Manifest
from fl_elastic.update.partial import Limits, check_count

__all__ = ["HeadSums", "decode_head_sums", "encode_head_sums", "few_rows"]

_Floats = NDArray[np.float64]
# What sums lose when they are written as fp32, and the largest that can still be squared and added up.
_ROUNDED, _MOST = 1e-5, 1e100
# Of each feature's own square, what may be left over once products are written as few rows.
_LEFT_OVER = 1e-7


@dataclass(frozen=True, eq=False)
class HeadSums:
    """Sums of one or more clients.

    Attributes
    ----------
    weight : str
        Name of the layer's weight, of shape (C, D).
    products : array, shape (D + 1, D + 1)
        Sum of the outer products of each example's features with themselves, a constant 1 last.
    targets : array, shape (D + 1, C)
        Sum of the outer products of features and targets: a one at an example's class, or what is to be predicted.
    squares : array, shape (C,)
        Sum of squared targets.
    classes : bool
        Whether the targets are classes.
    """

    weight: str
    products: _Floats
    targets: _Floats
    squares: _Floats
    classes: bool

    @property
    def num_examples(self) -> int:
        """Examples that were summed."""
        return round(float(self.products[-1, -1]))

    def __add__(self, other: HeadSums) -> HeadSums:
        """Return the sums of both; UpdateError if they are not of the same layer and kind of target."""
        if (self.weight, self.classes) != (other.weight, other.classes):
            raise UpdateError(
                f"sums of {other.weight!r} for {_kind(other)} do not add to those of {self.weight!r} "
                f"for {_kind(self)}"
            )
        return HeadSums(
            self.weight,
            self.products + other.products,
            self.targets + other.targets,
            self.squares + other.squares,
            self.classes,
        )


def encode_head_sums(sums: HeadSums, manifest: Manifest) -> bytes:
    """Return sums as one buffer.

    Means are written as fp64 and products of what deviates from them as fp32: features far from zero lose nothing.
    Of products the lower triangle is written, or, where examples are at most half as many as features, as many
    rows as there are examples whose products they are: no more than the products themselves tell.

    Raises
    ------
    UpdateError
        If the manifest has no such weight, or they do not fit it or each other.
    """
    if sums.weight not in manifest.index:
        raise UpdateError(f"the model has no tensor {sums.weight!r}")
    shapes = _shapes(manifest.shape(sums.weight))
    found = (sums.products.shape, sums.targets.shape, sums.squares.shape)
    if found != shapes:
        raise UpdateError(f"sums have shapes {found}, those of {sums.weight!r} have {shapes}")
    header = {
        "manifest": manifest.hash,
        "indices": [manifest.index[sums.weight]],
        "classes": int(sums.classes),
        "num_examples": sums.num_examples,
    }
    mean = sums.products[-1, :-1] / sums.num_examples
    products = sums.products[:-1, :-1] - sums.num_examples * np.outer(mean, mean)
    targets = sums.targets[:-1] - np.outer(mean, sums.targets[-1])
    exact = np.concatenate([mean, sums.targets[-1], sums.squares])
    rows = few_rows(products, sums.num_examples) if 2 * sums.num_examples <= len(mean) else None
    if rows is not None:
        header["rows"] = len(rows)
    written = products[np.tril_indices(len(products))] if rows is None else rows.ravel()
    rounded = np.concatenate([written, targets.ravel()])
    payload = [exact.astype("<f8").tobytes(), rounded.astype("<f4").tobytes()]
    return pack(Kind.HEAD_SUMS, header, payload)


def decode_head_sums(
    data: bytes | memoryview, manifest: Manifest, limits: Limits | None = None
) -> HeadSums:
    """Return the sums in ``data``.

    Raises
    ------
    UpdateError
        If the bytes are damaged or of another model, or the numbers are no sums over examples.
    """
    _, header, payload = unpack(data, manifest, Kind.HEAD_SUMS)
    indices = index_field(header, "indices", manifest)
    if len(indices) != 1 or len(manifest.shapes[indices[0]]) != 2:
        raise UpdateError("sums are of one weight of a linear layer")
    examples = field(header, "num_examples", int)
    check_count("num_examples", examples, 1, (limits or Limits()).max_examples)
    outputs, features = manifest.shapes[indices[0]]
    rows = field(header, "rows", int) if "rows" in header else None
    if rows is not None:
        check_count("rows", rows, 0, features // 2)
    written = features * (features + 1) // 2 if rows is None else rows * features
    few, many = features + 2 * outputs, written + features * outputs
    if len(payload) != 8 * few + 4 * many:
        expected = 8 * few + 4 * many
        raise UpdateError(f"payload has {len(payload)} bytes, sums need {expected}")
    mean, sum_of_targets, squares = np.split(
        np.frombuffer(payload[: 8 * few], "<f8"), [features, features + outputs]
    )
    rounded = np.frombuffer(payload[8 * few :], "<f4").astype(np.float64)
    centred = (
        _from_triangle(rounded[:written], features)
        if rows is None
        else _from_rows(rounded[:written].reshape(rows, features))
    )
    moved = rounded[written:].reshape(features, outputs)
    classes = bool(field(header, "classes", int))
    _check(examples, mean, centred, moved, sum_of_targets, squares, classes)
    products, targets = np.zeros((features + 1,) * 2), np.zeros((features + 1, outputs))
    products[:-1, :-1] = centred + examples * np.outer(mean, mean)
    products[-1, :-1] = products[:-1, -1] = examples * mean
    products[-1, -1] = examples
    targets[:-1], targets[-1] = moved + np.outer(mean, sum_of_targets), sum_of_targets
    return HeadSums(manifest.names[indices[0]], products, targets, squares.copy(), classes)


def few_rows(products: _Floats, most: int) -> _Floats | None:
    """Return rows whose products with each other, summed, are a matrix; None if that takes too many.

    The matrix is that of sums of squares and products of at most as many examples. The rows are not these examples,
    but what any examples with the same products could be turned into (a Cholesky factor, largest pivot first).

    Parameters
    ----------
    products : array, shape (D, D)
        Symmetric, without negative eigenvalues.
    most : int
        Rows at most.

    Examples
    --------
    >>> x = np.array([[1.0, 2.0, 3.0]])
    >>> rows = few_rows(x.T @ x, 1)
    >>> np.round(np.abs(rows), 6).tolist()
    [[1.0, 2.0, 3.0]]
    """
    own = np.diag(products)
    left, rows = own.copy(), np.zeros((most, len(own)))
    allowed = _LEFT_OVER * own
    for count in range(most):
        pivot = int(np.argmax(np.where(left > allowed, left / np.maximum(own, 1e-300), 0.0)))
        if left[pivot] <= allowed[pivot]:
            return rows[:count]
        above = rows[:count]
        rows[count] = (products[pivot] - above[:, pivot] @ above) / np.sqrt(left[pivot])
        left -= rows[count] ** 2
    return rows if (left <= allowed).all() else None


def _from_triangle(triangle: _Floats, features: int) -> _Floats:
    found = np.zeros((features, features))
    rows, columns = np.tril_indices(features)
    found[rows, columns] = found[columns, rows] = triangle
    return found


def _from_rows(rows: _Floats) -> _Floats:
    if not np.isfinite(rows).all():
        raise UpdateError("sums hold numbers that are not finite, or beyond any use")
    return rows.T @ rows


def _shapes(weight: tuple[int, ...]) -> Any:
    outputs, features = weight
    return (features + 1, features + 1), (features + 1, outputs), (outputs,)


def _check(
    examples: int,
    mean: _Floats,
    centred: _Floats,
    moved: _Floats,
    sum_of_targets: _Floats,
    squares: _Floats,
    classes: bool,
) -> None:
    """Raise UpdateError unless these can be sums over examples (Cauchy and Schwarz bound every product)."""
    for part in (mean, centred, moved, sum_of_targets, squares):
        if not np.isfinite(part).all() or np.abs(part).max(initial=0.0) > _MOST:
            raise UpdateError("sums hold numbers that are not finite, or beyond any use")
    own = np.diag(centred)
    spread = squares - sum_of_targets**2 / examples
    tiny = _ROUNDED * (squares + 1)
    if own.min(initial=0.0) < 0 or (spread < -tiny).any():
        raise UpdateError("sums of squares are less than their means allow")
    slack = 1 + _ROUNDED
    if (centred**2 > slack * np.outer(own, own)).any():
        raise UpdateError("products of features are larger than their squares allow")
    if (moved**2 > slack * np.outer(own, np.maximum(spread, 0.0) + tiny)).any():
        raise UpdateError("products of features and targets are larger than their squares allow")
    if classes and (
        abs(squares.sum() - examples) > _ROUNDED * examples
        or np.abs(squares - sum_of_targets).max() > _ROUNDED * examples
    ):
        raise UpdateError(f"sums over {examples} examples do not count each in one class")


def _kind(sums: HeadSums) -> str:
    return "classes" if sums.classes else "numbers"
