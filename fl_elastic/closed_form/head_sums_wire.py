"""Wire format of head sums, and checks that decoded numbers can be sums over examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_elastic.closed_form.folds import FOLDS, Fold
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.errors import UpdateError
from fl_elastic.update.checks import Limits, check_count
from fl_elastic.update.frame import MessageKind, field, index_field, pack, unpack
from fl_elastic.update.manifest import Manifest

_Floats = NDArray[np.float64]
# Relative error of sums written as fp32, and the largest number that can still be squared and added up.
_ROUNDED, _MOST = 1e-5, 1e100
# Error of each correlation in fp32, and the amount by which a target's explained share may exceed 1 because of it.
_LOST, _EXPLAINED = 4e-7, 1e-3
# Relative error of fp64 when a squared mean is subtracted from a mean square.
_CANCELLED = 1e-13


def encode_head_sums(sums: HeadSums, manifest: Manifest) -> bytes:
    """Return sums as one buffer.

    Means are written as fp64 and products of deviations from them as fp32, so that features far from zero keep
    their precision. A fold is written as its few rows, and the products of all other examples as their lower
    triangle.
    """
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
        products = rest.products[:-1, :-1] - np.outer(rest.num_examples * mean, mean)
        still = np.abs(np.diag(products)) <= _CANCELLED * sums.diagonal[:-1]
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
    return pack(MessageKind.HEAD_SUMS, header, payload)


def decode_head_sums(
    data: bytes | memoryview, manifest: Manifest, limits: Limits | None = None
) -> HeadSums:
    """Return the sums in ``data``.

    Raises
    ------
    UpdateError
        If the bytes are damaged or of another model, or the numbers cannot be sums over examples.
    """
    _, header, payload = unpack(data, manifest, MessageKind.HEAD_SUMS)
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
    if not isinstance(found, list) or len(found) > FOLDS:
        raise UpdateError(f"header's folds must be a list of at most {FOLDS}")
    for array in found:
        if not isinstance(array, list) or [type(number) for number in array] != [int, int]:
            raise UpdateError("header's folds must be pairs of whole numbers")
        count, rows = array
        check_count("num_examples of a fold", count, 1, examples)
        check_count("rows of a fold", rows, 0, min(count, features))
        counts.append((count, rows))
    if sum(count for count, _ in counts) > examples:
        raise UpdateError("folds have more examples than the sums")
    return counts


def _pieces(payload: memoryview, kind: str, sizes: list[int]) -> list[_Floats]:
    numbers = np.frombuffer(payload, kind).astype(np.float64)
    if not np.isfinite(numbers).all() or np.abs(numbers).max(initial=0.0) > _MOST:
        raise UpdateError(f"sums hold numbers that are not finite, or larger than {_MOST:g}")
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
    """Return the sums with these centred parts; raise UpdateError if no examples can have them."""
    _check_targets(examples, goals, squares, classes)
    own = np.diag(centred)
    if own.min(initial=0.0) < 0:
        raise UpdateError("sums of squares are less than their means allow")
    # A feature whose sum of squares is too small for fp32 counts as constant.
    moves = own > 0
    if not moves.all():
        centred, moved = centred * np.outer(moves, moves), moved * moves[:, None]
    size = np.sqrt(np.where(moves, own, 1.0))
    # Rounding, by fp32 or because of a large mean, may make small eigenvalues negative.
    lost = _LOST + _CANCELLED * examples * mean**2 / np.where(moves, own, np.inf)
    correlations = centred / size[:, None]
    correlations /= size
    correlations[np.diag_indices(len(own))] += ~moves + np.sqrt(len(own)) * lost
    factor = _cholesky(correlations)
    if factor is None:
        raise UpdateError(
            "products of features are larger than their squares allow, taken together"
        )
    shares = torch.from_numpy(moved / size[:, None])
    explained = torch.linalg.solve_triangular(factor, shares, upper=False).numpy()
    _refuse_too_much(explained.T @ explained, examples, goals, squares, classes)
    features, outputs = moved.shape
    products, targets = np.zeros((features + 1,) * 2), np.zeros((features + 1, outputs))
    np.add(centred, np.outer(examples * mean, mean), out=products[:-1, :-1])
    products[-1, :-1] = products[:-1, -1] = examples * mean
    products[-1, -1] = examples
    targets[:-1], targets[-1] = moved + np.outer(mean, goals), goals
    return HeadSums(weight, products, targets, squares.copy(), classes)


def _from_triangle(triangle: _Floats, features: int) -> _Floats:
    found, end = np.empty((features, features)), 0
    for row in range(features):
        end += row
        own = triangle[end : end + row + 1]
        found[row, : row + 1] = found[: row + 1, row] = own
    return found


def layer_shape(weight: tuple[int, ...]) -> tuple[int, int]:
    """Return the numbers of outputs and features of a linear layer; raise UpdateError for any other layer."""
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
    """Raise UpdateError if features explain more of targets, or of a combination of classes, than their squares.

    For any set of examples, the matrix of all products of features and targets has no negative eigenvalue.
    Combinations are checked only for classes: otherwise the products of different targets with each other are
    unknown.
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


def _cholesky(matrix: _Floats) -> Tensor | None:
    factor, wrong = torch.linalg.cholesky_ex(torch.from_numpy(matrix))
    return None if int(wrong) else factor
