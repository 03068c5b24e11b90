"""Projection of features onto the fewer directions in which a fleet's examples vary most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.closed_form.ridge import varies

# Share of the largest value below which another one counts as zero.
_NOTHING = 1e-6
_LARGEST = 127


class Directions:
    """Principal directions of some examples' features, each as 8-bit integers.

    Attributes
    ----------
    exponents : array of int8, shape (D,)
        Exponents of the powers of two that scale features to about unit variance.
    matrix : array of int8, shape (K, D)
        Orthogonal directions of most variance, randomly rotated among each other, so that a penalty that treats all
        projected features alike does not favour some of the directions.
    """

    def __init__(self, exponents: NDArray[np.int8], matrix: NDArray[np.int8]) -> None:
        self.exponents, self.matrix = exponents, matrix

    @classmethod
    def of(
        cls, rows: Sequence[NDArray[np.floating]], constant: NDArray[np.floating], width: int
    ) -> Directions:
        """Return the directions of these rows.

        Parameters
        ----------
        rows : sequence of array, shape (R, D_i)
            Features at each place; the rows of examples may be rotated.
        constant : array, shape (R,)
            Value of each row in place of an example's constant 1.
        width : int
            Number of directions; fewer if the rows span less.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> rows = rng.normal(size=(50, 2)) @ rng.normal(size=(2, 30)) + 5.0
        >>> Directions.of([rows], np.ones(50), width=8).matrix.shape
        (2, 30)
        """
        features = np.concatenate(rows, axis=1).astype(np.float64)
        examples = float(constant @ constant)
        mean = constant @ features / examples
        features -= np.outer(constant, mean)
        spread = np.sqrt((features**2).sum(axis=0) / examples)
        moves = varies(spread, mean)
        exponents = np.full(len(spread), -_LARGEST)
        exponents[moves] = np.clip(-np.round(np.log2(spread[moves])), -_LARGEST, _LARGEST)
        features *= np.exp2(exponents)
        values, vectors = np.linalg.eigh(features @ features.T)
        largest = np.argsort(values)[::-1][:width]
        largest = largest[
            values[largest] > _NOTHING * max(float(values.max(initial=0.0)), _NOTHING)
        ]
        principal = (vectors[:, largest] / np.sqrt(values[largest])).T @ features
        turn = np.linalg.qr(np.random.default_rng(0).normal(size=(len(largest), len(largest))))[0]
        matrix = turn @ principal
        matrix *= _LARGEST / max(float(np.abs(matrix).max(initial=0.0)), _NOTHING)
        return cls(exponents.astype(np.int8), np.round(matrix).astype(np.int8))


class Projection(nn.Module):
    """Projects features onto fixed directions.

    The directions are integer buffers, because integer buffers travel with a model and are not averaged by servers.

    Parameters
    ----------
    features, width : int
        Number of features, and number of directions.
    device : torch.device, optional
        Device of the buffers.

    Examples
    --------
    >>> projection = Projection(30, 8)
    >>> projection(torch.randn(5, 30)).shape
    torch.Size([5, 8])
    """

    exponents: Tensor
    matrix: Tensor

    def __init__(self, features: int, width: int, device: torch.device | None = None) -> None:
        super().__init__()
        whole = torch.zeros(width, features, dtype=torch.int8, device=device)
        self.register_buffer("exponents", whole[0].clone())
        self.register_buffer("matrix", whole)

    def load(self, directions: Directions) -> None:
        """Replace the directions by these, which must be of the same number."""
        self.exponents.copy_(torch.from_numpy(directions.exponents))
        self.matrix.copy_(torch.from_numpy(directions.matrix))

    def forward(self, features: Tensor) -> Tensor:
        """Return the projected features, shape (N, K), for features of shape (N, D)."""
        scaled = features * 2.0 ** self.exponents.to(features.dtype)
        return scaled @ (self.matrix.to(features.dtype) / _LARGEST).T
