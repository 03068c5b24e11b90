"""Sums over examples of the inputs and the targets of a model's last linear layer.

They add up over clients, and the best linear head in the sense of least squares depends on nothing else
(`fl_elastic.update.closed_form`): no client's examples are seen, and their distribution over clients does not
matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update.folds import Fold
from fl_elastic.update.frame import Kind, field, index_field, pack, unpack
from fl_elastic.update.manifest import Manifest
from fl_elastic.update.partial import Limits, check_count

__all__ = ["HeadSums", "decode_head_sums", "encode_head_sums", "layer_shape"]

_Floats = NDArray[np.float64]
# Relative error of sums written as fp32, and the largest number that can still be squared and added up.
_ROUNDED, _MOST = 1e-5, 1e100
# Error of each correlation by fp32, and by how much the explained share of a target may exceed 1 because of it.
_LOST, _EXPLAINED = 4e-7, 1e-3
# Relative error of fp64 when a squared mean is subtracted from a mean square.
_CANCELLED = 1e-13
_MOST_FOLDS = 5


@dataclass(frozen=True, eq=False)
class HeadSums:
    """Sums of one or more clients.

    Attributes
    ----------
    weight : str
        Name of the layer's weight, of shape (C, D), or (C, D, 1, 1) of a 1 x 1 convolution.
    products : array, shape (D + 1, D + 1)
        Sum of the outer products of each example's features with themselves, with a constant 1 appended.
    targets : array, shape (D + 1, C)
        Sum of the outer products of features and targets. The target is one-hot for a class, else the values to
        predict.
    squares : array, shape (C,)
        Sum of squared targets.
    classes : bool
        Whether the targets are classes.
    folds : tuple of Fold
        Sums over disjoint sets of some of the examples: leaving one out shows how a head does on examples that it
        was not made from. Without folds, only other clients' folds show it.
    """

    weight: str
    products: _Floats
    targets: _Floats
    squares: _Floats
    classes: bool
    folds: tuple[Fold, ...] = ()

    @classmethod
    def of_folds(
        cls, weight: str, folds: Iterable[Fold], features: int, outputs: int, classes: bool
    ) -> HeadSums:
        """Return the sums over the examples of the folds only."""
        folds = tuple(folds)
        # One product for all folds: products of few rows take longer to add up than to compute.
        rows = np.vstack([np.zeros((0, features + 1)), *(fold.rows for fold in folds)])
        goals = np.vstack([np.zeros((0, outputs)), *(fold.targets for fold in folds)])
        products, targets = rows.T @ rows, rows.T @ goals
        squares = sum((fold.squares for fold in folds), np.zeros(outputs))
        return cls(weight, products, targets, squares, classes, folds)

    @property
    def num_examples(self) -> int:
        """Number of examples that were summed."""
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
            tuple(
                sum(rest, first)
                for first, *rest in (
                    [each for each in pair if each is not None]
                    for pair in zip_longest(self.folds, other.folds)
                )
            ),
        )

    def without_folds(self) -> HeadSums:
        """Return the same sums without folds."""
        return replace(self, folds=())

    def beside_folds(self) -> HeadSums:
        """Return the sums over the examples that are in no fold."""
        features, outputs = self.products.shape[0] - 1, len(self.squares)
        held = HeadSums.of_folds(self.weight, self.folds, features, outputs, self.classes)
        return HeadSums(
            self.weight,
            np.subtract(self.products, held.products, out=held.products),
            self.targets - held.targets,
            self.squares - held.squares,
            self.classes,
        )

    def of_outputs(self, count: int) -> HeadSums:
        """Return the sums for the first ``count`` outputs only."""
        folds = tuple(
            Fold(fold.rows, fold.targets[:, :count], fold.squares[:count]) for fold in self.folds
        )
        return replace(
            self, targets=self.targets[:, :count], squares=self.squares[:count], folds=folds
        )

    def with_outputs(self, count: int) -> HeadSums:
        """Return the sums with at least ``count`` outputs; added ones have no example."""
        more = count - len(self.squares)
        if more <= 0:
            return self
        beside = ((0, 0), (0, more))
        folds = tuple(
            Fold(each.rows, np.pad(each.targets, beside), np.pad(each.squares, (0, more)))
            for each in self.folds
        )
        return replace(
            self,
            targets=np.pad(self.targets, beside),
            squares=np.pad(self.squares, (0, more)),
            folds=folds,
        )

    def times(self, share: float) -> HeadSums:
        """Return the sums with each example weighted by ``share``."""
        if share == 1.0:
            return self
        return HeadSums(
            self.weight,
            share * self.products,
            share * self.targets,
            share * self.squares,
            self.classes,
            tuple(fold.times(share) for fold in self.folds),
        )


def encode_head_sums(sums: HeadSums, manifest: Manifest) -> bytes:
    """Return sums as one buffer.

    Means are written as fp64 and products of deviations from them as fp32: features far from zero lose nothing. Of
    a fold its few rows are written, and of the products of all other examples the lower triangle.

    Raises
    ------
    UpdateError
        If the manifest has no such weight, or the sums do not fit it or each other.
    """
    if sums.weight not in manifest.index:
        raise UpdateError(f"the model has no tensor {sums.weight!r}")
    shapes = _shapes(manifest.shape(sums.weight))
    found = (sums.products.shape, sums.targets.shape, sums.squares.shape)
    if found != shapes:
        raise UpdateError(f"sums have shapes {found}, those of {sums.weight!r} have {shapes}")
    exact: list[_Floats] = []
    rounded: list[_Floats] = []
    counts: list[list[int]] = []
    for fold in sums.folds:
        mean, goal, rows, targets = fold.centred()
        counts.append([round(fold.num_examples), len(rows)])
        exact += [mean, goal * fold.num_examples, fold.squares]
        rounded += [rows, targets]
    rest = sums.beside_folds()
    if rest.num_examples:
        mean = rest.products[-1, :-1] / rest.num_examples
        # This array is not shared, so it may be changed in place.
        products = rest.products[:-1, :-1]
        products -= np.outer(rest.num_examples * mean, mean)
        still = np.abs(np.diag(products)) <= _CANCELLED * np.diag(sums.products)[:-1]
        products[still] = products[:, still] = 0.0
        exact += [mean, rest.targets[-1], rest.squares]
        rounded += [
            np.concatenate([row[: number + 1] for number, row in enumerate(products)]),
            rest.targets[:-1] - np.outer(mean, rest.targets[-1]),
        ]
    header = {
        "manifest": manifest.hash,
        "indices": [manifest.index[sums.weight]],
        "classes": int(sums.classes),
        "num_examples": sums.num_examples,
        "folds": counts,
    }
    payload = [
        each.astype(kind).tobytes()
        for kind, part in (("<f8", exact), ("<f4", rounded))
        for each in part
    ]
    return pack(Kind.HEAD_SUMS, header, payload)


def decode_head_sums(
    data: bytes | memoryview, manifest: Manifest, limits: Limits | None = None
) -> HeadSums:
    """Return the sums in ``data``.

    Raises
    ------
    UpdateError
        If the bytes are damaged or of another model, or the numbers cannot be sums over examples.
    """
    _, header, payload = unpack(data, manifest, Kind.HEAD_SUMS)
    indices = index_field(header, "indices", manifest)
    if len(indices) != 1:
        raise UpdateError("sums are of one weight of a linear layer")
    examples = field(header, "num_examples", int)
    check_count("num_examples", examples, 1, (limits or Limits()).max_examples)
    outputs, features = layer_shape(manifest.shapes[indices[0]])
    counts = _fold_counts(header, examples, features)
    rest = examples - sum(count for count, _ in counts)
    few = [features, outputs, outputs] * (len(counts) + (rest > 0))
    many = [size for _, rows in counts for size in (rows * features, rows * outputs)]
    many += [features * (features + 1) // 2, features * outputs] if rest else []
    if len(payload) != 8 * sum(few) + 4 * sum(many):
        expected = 8 * sum(few) + 4 * sum(many)
        raise UpdateError(f"payload has {len(payload)} bytes, sums need {expected}")
    exact = _pieces(payload[: 8 * sum(few)], "<f8", few)
    rounded = _pieces(payload[8 * sum(few) :], "<f4", many)
    classes = bool(field(header, "classes", int))
    weight, folds = manifest.names[indices[0]], []
    for number, (count, _) in enumerate(counts):
        mean, goals, squares = exact[3 * number : 3 * number + 3]
        rows, targets = (
            rounded[2 * number].reshape(-1, features),
            rounded[2 * number + 1].reshape(-1, outputs),
        )
        _check_targets(count, goals, squares, classes)
        _refuse_too_much(targets.T @ targets, count, goals, squares, classes)
        folds.append(Fold.about_mean(count, mean, goals / count, squares, rows, targets))
    total = HeadSums.of_folds(weight, folds, features, outputs, classes)
    if rest:
        mean, goals, squares = exact[-3:]
        total = total + _uncentred(
            weight, rest, mean, _from_triangle(rounded[-2], features), rounded[-1].reshape(features, outputs),
            goals, squares, classes,
        )  # fmt: skip
    return total


def _fold_counts(header: dict[str, Any], examples: int, features: int) -> list[tuple[int, int]]:
    """Return the numbers of examples and rows of each fold."""
    found, counts = header.get("folds"), []
    if not isinstance(found, list) or len(found) > _MOST_FOLDS:
        raise UpdateError(f"header's folds must be a list of at most {_MOST_FOLDS}")
    for each in found:
        if not isinstance(each, list) or [type(number) for number in each] != [int, int]:
            raise UpdateError("header's folds must be pairs of whole numbers")
        count, rows = each
        check_count("num_examples of a fold", count, 1, examples)
        check_count("rows of a fold", rows, 0, min(count, features))
        counts.append((count, rows))
    if sum(count for count, _ in counts) > examples:
        raise UpdateError("folds have more examples than there are")
    return counts


def _pieces(payload: memoryview, kind: str, sizes: list[int]) -> list[_Floats]:
    numbers = np.frombuffer(payload, kind).astype(np.float64)
    if not np.isfinite(numbers).all() or np.abs(numbers).max(initial=0.0) > _MOST:
        raise UpdateError("sums hold numbers that are not finite, or beyond any use")
    return np.split(numbers, np.cumsum(sizes)[:-1])


def _uncentred(
    weight: str,
    examples: int,
    mean: _Floats,
    centred: _Floats,
    moved: _Floats,
    goals: _Floats,
    squares: _Floats,
    classes: bool,
) -> HeadSums:
    """Return the sums with these centred parts; UpdateError if no examples can have them."""
    _check_targets(examples, goals, squares, classes)
    own = np.diag(centred)
    if own.min(initial=0.0) < 0:
        raise UpdateError("sums of squares are less than their means allow")
    # A feature whose sum of squares is too small for fp32 counts as constant.
    moves = own > 0
    centred, moved = centred * np.outer(moves, moves), moved * moves[:, None]
    size = np.sqrt(np.where(moves, own, 1.0))
    # Rounding, by fp32 or beside a large mean, may make small eigenvalues negative.
    lost = _LOST + _CANCELLED * examples * mean**2 / np.where(moves, own, np.inf)
    correlations = centred / np.outer(size, size) + np.diag(~moves + np.sqrt(len(own)) * lost)
    factor = _cholesky(correlations)
    if factor is None:
        raise UpdateError(
            "products of features are larger than their squares allow, taken together"
        )
    explained = np.linalg.solve(factor, moved / size[:, None])
    _refuse_too_much(explained.T @ explained, examples, goals, squares, classes)
    features, outputs = moved.shape
    products, targets = np.zeros((features + 1,) * 2), np.zeros((features + 1, outputs))
    products[:-1, :-1] = centred + examples * np.outer(mean, mean)
    products[-1, :-1] = products[:-1, -1] = examples * mean
    products[-1, -1] = examples
    targets[:-1], targets[-1] = moved + np.outer(mean, goals), goals
    return HeadSums(weight, products, targets, squares.copy(), classes)


def _from_triangle(triangle: _Floats, features: int) -> _Floats:
    found = np.zeros((features, features))
    rows, columns = np.tril_indices(features)
    found[rows, columns] = found[columns, rows] = triangle
    return found


def layer_shape(weight: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of outputs and features of a linear layer; UpdateError for a weight of another layer."""
    if len(weight) < 2 or any(size != 1 for size in weight[2:]):
        raise UpdateError("sums are of one weight of a linear layer")
    return weight[0], weight[1]


def _shapes(weight: tuple[int, ...]) -> Any:
    outputs, features = layer_shape(weight)
    return (features + 1, features + 1), (features + 1, outputs), (outputs,)


def _check_targets(examples: int, goals: _Floats, squares: _Floats, classes: bool) -> None:
    """Raise UpdateError unless these can be sums of targets and of squared targets."""
    if (squares - goals**2 / examples < -_ROUNDED * (squares + 1)).any():
        raise UpdateError("sums of squares are less than their means allow")
    if classes and (
        abs(squares.sum() - examples) > _ROUNDED * examples
        or np.abs(squares - goals).max() > _ROUNDED * examples
    ):
        raise UpdateError(f"sums over {examples} examples do not count each in one class")


def _refuse_too_much(
    explained: _Floats, examples: int, goals: _Floats, squares: _Floats, classes: bool
) -> None:
    """Raise UpdateError if features explain more of the targets, or of any mixture of classes, than their squares.

    For any set of examples, the matrix of all products of features and targets has no negative eigenvalue. Mixtures
    are checked only for classes: otherwise the products of different targets with each other are unknown.
    """
    slack = _EXPLAINED * (np.abs(squares) + _ROUNDED)
    if classes:
        some = squares > 0
        there = np.diag(squares + slack) - np.outer(goals, goals) / examples
        possible = (
            _cholesky((there - explained)[np.ix_(some, some)]) is not None
            and (np.diag(explained)[~some] <= slack[~some]).all()
        )
    else:
        possible = (np.diag(explained) <= squares - goals**2 / examples + slack).all()
    if not possible:
        raise UpdateError(
            "products of features and targets are larger than their squares allow, taken together"
        )


def _cholesky(matrix: _Floats) -> NDArray[Any] | None:
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return None


def _kind(sums: HeadSums) -> str:
    return "classes" if sums.classes else "numbers"
