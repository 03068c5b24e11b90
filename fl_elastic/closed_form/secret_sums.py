"""Head sums as integers, so that secure aggregation gives their exact total.

Flower's SecAgg+ adds numbers of ``quantization_range`` steps modulo a power of two. Each number is split into
digits of that size, which are sent separately; its only error is the rounding to `_STEP`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.closed_form.folds import Fold
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.errors import UpdateError

_Floats = NDArray[np.float64]
# Bits of all digits of a number together: numbers up to 2**28, in steps of 2**-27.
_BITS, _STEP = 56, 2.0**-27
_LEAST_BITS = 8
_CANCELLED = 1e-12


@dataclass(frozen=True)
class FixedPoint:
    """Fixed-point format of numbers, given by the settings of a secure aggregation workflow.

    Attributes
    ----------
    steps : int
        The workflow's ``quantization_range``.
    clip : float
        The workflow's ``clipping_range``.
    weight : float
        The workflow's ``max_weight``; each client gives itself a weight of 1.
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
        """Number of bits of a digit."""
        return self.steps.bit_length() - 1

    @property
    def digits(self) -> int:
        """Number of digits of a number."""
        return -(-_BITS // self.bits)

    @property
    def share(self) -> float:
        """Factor by which the workflow multiplies the numbers of a client of weight 1."""
        return round(self.steps / self.weight) / self.steps

    def write(self, numbers: _Floats) -> _Floats:
        """Return the digits of numbers, as the workflow takes them, shape (digits, N).

        Raises
        ------
        UpdateError
            If a number is too large.
        """
        most = 2.0 ** (_BITS - 1) * _STEP
        if not (np.abs(numbers) < most).all():
            raise UpdateError(
                f"sums up to {np.abs(numbers).max():.3g} do not fit secure aggregation, which takes numbers below "
                f"{most:.3g}: scale the features down, for example by a norm before the last layer"
            )
        whole = np.rint(numbers / _STEP).astype(np.int64) + (1 << (_BITS - 1))
        digits = [
            (whole >> (self.bits * place)) & ((1 << self.bits) - 1) for place in range(self.digits)
        ]
        return (np.array(digits) - self.steps / 2) * (2 * self.clip / self.steps) / self.share

    def read(self, means: _Floats, clients: int) -> _Floats:
        """Return the sum of the numbers that ``clients`` clients wrote, from the mean that the workflow gives."""
        digits = np.rint(
            means * (clients * self.share * self.steps / (2 * self.clip)) + clients * self.steps / 2
        ).astype(np.int64)
        # Python integers until the last step: a double would lose the last bits beside the offsets of all clients.
        total = np.zeros(digits.shape[1], dtype=object)
        for place in reversed(range(self.digits)):
            total = total * (1 << self.bits) + digits[place]
        return np.asarray(total - clients * (1 << (_BITS - 1)), dtype=np.float64) * _STEP

    def to_text(self) -> str:
        """Return the settings as text."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> FixedPoint:
        """Read the text of `to_text`; raise UpdateError for any other text."""
        try:
            found = json.loads(text)
            return cls(int(found["steps"]), float(found["clip"]), float(found["weight"]))
        except (ValueError, TypeError, KeyError, RecursionError, ZeroDivisionError) as error:
            raise UpdateError(f"fixed point {text[:40]!r} cannot be read: {error}") from None


def as_vector(sums: HeadSums) -> _Floats:
    """Return sums as one vector that can be added: the lower triangle of products, targets, squares."""
    return np.concatenate(
        [sums.products[np.tril_indices(len(sums.products))], sums.targets.ravel(), sums.squares]
    )


def of_vector(vector: _Floats, weight: str, shape: Sequence[int], classes: bool) -> HeadSums:
    """Return the sums that `as_vector` made into this vector, for a layer with a weight of this shape.

    Raises
    ------
    UpdateError
        If the vector has another length, or a number is not finite.
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
    """Return the total with one fold of held-out examples, given the sums of the held-out ones.

    The rows of the fold are a factor of its products. Negative eigenvalues are rounding errors and are dropped.
    """
    # Scaled to a diagonal of ones, so that features with small numbers are not taken for rounding errors.
    size = np.sqrt(np.maximum(np.diag(held.products), 0.0))
    scale = np.where(size > 0, size, 1.0)
    values, vectors = np.linalg.eigh(held.products / np.outer(scale, scale))
    some = values > _CANCELLED * max(float(values[-1]), 0.0)
    if not some.any():
        return total
    axes, lengths = vectors[:, some].T, np.sqrt(values[some])[:, None]
    rows = lengths * axes * scale
    targets = axes @ (held.targets / scale[:, None]) / lengths
    return total.with_folds([Fold(rows, targets, held.squares)])
