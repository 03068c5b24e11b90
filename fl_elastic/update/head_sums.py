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

__all__ = ["HeadSums", "decode_head_sums", "encode_head_sums"]

_Floats = NDArray[np.float64]
# What sums lose when they are written as fp32, and the largest that can still be squared and added up.
_ROUNDED, _MOST = 1e-5, 1e100


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

    Means are written as fp64 and products of what deviates from them as fp32, the lower triangle: features far from
    zero lose nothing.

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
    rounded = np.concatenate([products[np.tril_indices(len(products))], targets.ravel()])
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
    triangle = features * (features + 1) // 2
    few, many = features + 2 * outputs, triangle + features * outputs
    if len(payload) != 8 * few + 4 * many:
        expected = 8 * few + 4 * many
        raise UpdateError(f"payload has {len(payload)} bytes, sums need {expected}")
    mean, sum_of_targets, squares = np.split(
        np.frombuffer(payload[: 8 * few], "<f8"), [features, features + outputs]
    )
    rounded = np.frombuffer(payload[8 * few :], "<f4").astype(np.float64)
    centred = np.zeros((features, features))
    rows, columns = np.tril_indices(features)
    centred[rows, columns] = centred[columns, rows] = rounded[:triangle]
    moved = rounded[triangle:].reshape(features, outputs)
    classes = bool(field(header, "classes", int))
    _check(examples, mean, centred, moved, sum_of_targets, squares, classes)
    products, targets = np.zeros((features + 1,) * 2), np.zeros((features + 1, outputs))
    products[:-1, :-1] = centred + examples * np.outer(mean, mean)
    products[-1, :-1] = products[:-1, -1] = examples * mean
    products[-1, -1] = examples
    targets[:-1], targets[-1] = moved + np.outer(mean, sum_of_targets), sum_of_targets
    return HeadSums(manifest.names[indices[0]], products, targets, squares.copy(), classes)


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
