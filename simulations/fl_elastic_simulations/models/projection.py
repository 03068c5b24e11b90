"""Targets for distillation: a teacher's features on fewer axes, large values compressed (KDEP, CVPR 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_elastic.errors import ModelError


@dataclass(frozen=True, eq=False)
class Projection:
    """The directions in which features vary most.

    Attributes
    ----------
    mean : Tensor, shape (D,)
        Mean of the features.
    directions : Tensor, shape (D, d)
        Orthonormal columns by decreasing variance; the largest entry of each is positive.
    """

    mean: Tensor
    directions: Tensor

    @classmethod
    def of(cls, features: Tensor, width: int) -> Projection:
        """Return the first ``width`` right-singular vectors of centred features.

        They are computed as eigenvectors of the covariance, which has D x D numbers whatever the number of
        examples.

        Parameters
        ----------
        features : Tensor, shape (n, D)
            One row per example.
        width : int
            Number of directions to keep.

        Raises
        ------
        ModelError
            If there are fewer features or examples than directions.

        Examples
        --------
        >>> line = torch.tensor([[0.0, 1.0], [3.0, 5.0], [6.0, 9.0]])
        >>> Projection.of(line, 1).directions.T
        tensor([[0.6000, 0.8000]])
        """
        if features.shape[1] < width:
            raise ModelError(
                f"the student has {width} features, the teacher {features.shape[1]}: a student cannot be taught "
                "more features than its teacher has; take a narrower student or a wider teacher"
            )
        if len(features) < width:
            raise ModelError(
                f"{len(features)} images do not tell {width} directions apart: give at least {width}"
            )
        mean = features.double().mean(0)
        centred = features.double() - mean
        _, vectors = torch.linalg.eigh(centred.T @ centred)
        found = vectors.flip(1)[:, :width]
        largest = found.gather(0, found.abs().argmax(0, keepdim=True))
        return cls(mean.to(features.dtype), (found * largest.sign()).to(features.dtype))

    def of_features(self, features: Tensor) -> Tensor:
        """Return features in these directions, shape (n, d)."""
        return (features - self.mean) @ self.directions


def power_temperature(values: Tensor, temperature: float = 0.1, power: float = 3.0) -> Tensor:
    r"""Return :math:`\mathrm{sign}(x)\,|x / T|^{1/n}`, which compresses large values and keeps their signs.

    The function is odd and increasing; the defaults are those of KDEP (He et al., CVPR 2022).

    Parameters
    ----------
    values : Tensor
        Values of any shape.
    temperature, power : float
        T and n, above 0.

    Examples
    --------
    >>> power_temperature(torch.tensor([-0.8, 0.0, 0.1]))
    tensor([-2.,  0.,  1.])
    """
    return values.sign() * (values.abs() / temperature).pow(1 / power)
