"""Head sums as integers, so that secure aggregation gives their exact total and nothing else.

Flower's SecAgg+ adds numbers of `range` steps modulo a power of two. A number is cut into digits of that size, each
sent for itself, so that nothing but its rounding to `_STEP` is lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update.folds import Fold
from fl_elastic.update.head_sums import HeadSums

__all__ = ["FixedPoint", "as_vector", "of_vector", "with_held_out"]

_Floats = NDArray[np.float64]
# Digits hold so many bits together: numbers up to 2**28, in steps of 2**-27.
_BITS, _STEP = 56, 2.0**-27
_LEAST_BITS = 8
_CANCELLED = 1e-12


@dataclass(frozen=True)
class FixedPoint:
    """How numbers are written for a workflow of secure aggregation.

    Attributes
    ----------
    steps : int
        What the workflow calls ``quantization_range``.
    clip : float
        Its ``clipping_range``.
    weight : float
        Its ``max_weight``; clients give themselves a weight of 1.
    """

    steps: int
    clip: float
    weight: float

    def __post_init__(self) -> None:
        if self.bits < _LEAST_BITS or not self.clip > 0 or not self.share > 0:
            raise UpdateError(
                f"secure aggregation in {self.steps} steps of weights up to {self.weight} is too coarse"
            )

    @property
    def bits(self) -> int:
        """Bits of a digit."""
        return self.steps.bit_length() - 1

    @property
    def digits(self) -> int:
        """Digits of a number."""
        return -(-_BITS // self.bits)

    @property
    def share(self) -> float:
        """By what the workflow multiplies the numbers of a client of weight 1."""
        return round(self.steps / self.weight) / self.steps

    def write(self, numbers: _Floats) -> _Floats:
        """Return numbers as what the workflow makes whole numbers of, shape (digits, N).

        Raises
        ------
        UpdateError
            If a number is too large.
        """
        most = 2.0 ** (_BITS - 1) * _STEP
        if not (np.abs(numbers) < most).all():
            raise UpdateError(
                f"sums up to {np.abs(numbers).max():.3g} do not fit secure aggregation, which takes them up to "
                f"{most:.3g}: scale the features down, as by a norm before the last layer"
            )
        whole = np.rint(numbers / _STEP).astype(np.int64) + (1 << (_BITS - 1))
        digits = [
            (whole >> (self.bits * place)) & ((1 << self.bits) - 1) for place in range(self.digits)
        ]
        return (np.array(digits) - self.steps / 2) * (2 * self.clip / self.steps) / self.share

    def read(self, means: _Floats, clients: int) -> _Floats:
        """Return the sums of what so many clients wrote, from the mean that the workflow gives."""
        digits = np.rint(
            means * (clients * self.share * self.steps / (2 * self.clip)) + clients * self.steps / 2
        ).astype(np.int64)
        # Whole numbers to the end: beside the offset of all clients a double would lose the last bits.
        total = np.zeros(digits.shape[1], dtype=object)
        for place in reversed(range(self.digits)):
            total = total * (1 << self.bits) + digits[place]
        return np.asarray(total - clients * (1 << (_BITS - 1)), dtype=np.float64) * _STEP

    def to_text(self) -> str:
        """Return it for a message."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> FixedPoint:
        """Read what `to_text` gave; UpdateError if it is something else."""
        try:
            found = json.loads(text)
            return cls(int(found["steps"]), float(found["clip"]), float(found["weight"]))
        except (ValueError, TypeError, KeyError, RecursionError, ZeroDivisionError) as error:
            raise UpdateError(f"fixed point {text[:40]!r} cannot be read: {error}") from None


def as_vector(sums: HeadSums) -> _Floats:
    """Return sums as numbers that add up: the lower triangle of products, targets, squares."""
    return np.concatenate(
        [sums.products[np.tril_indices(len(sums.products))], sums.targets.ravel(), sums.squares]
    )


def of_vector(vector: _Floats, weight: str, shape: Sequence[int], classes: bool) -> HeadSums:
    """Return the sums that `as_vector` made numbers of, of a layer with a weight of this shape.

    Raises
    ------
    UpdateError
        If there are not as many numbers, or one is not finite.
    """
    outputs, features = shape[0], shape[1]
    rows, columns = np.tril_indices(features + 1)
    ends = np.cumsum([len(rows), (features + 1) * outputs])
    if vector.shape != (ends[-1] + outputs,) or not np.isfinite(vector).all():
        raise UpdateError(f"{vector.size} numbers are no sums for a layer of shape {tuple(shape)}")
    triangle, targets, squares = np.split(vector, ends)
    products = np.zeros((features + 1, features + 1))
    products[rows, columns] = products[columns, rows] = triangle
    return HeadSums(weight, products, targets.reshape(-1, outputs), squares, classes)


def with_held_out(total: HeadSums, held: HeadSums) -> HeadSums:
    """Return sums of which some can be left out, given what these are themselves.

    The rows of the fold are a factor of its products. Eigenvalues that are negative were rounded so.
    """
    values, vectors = np.linalg.eigh(held.products)
    some = values > _CANCELLED * max(float(values[-1]), 0.0)
    if not some.any():
        return total
    rows = vectors[:, some].T * np.sqrt(values[some])[:, None]
    targets = (vectors[:, some].T @ held.targets) / np.sqrt(values[some])[:, None]
    fold = Fold(rows, targets, held.squares)
    return HeadSums(
        total.weight, total.products, total.targets, total.squares, total.classes, (fold,)
    )
