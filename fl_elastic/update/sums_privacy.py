"""Differential privacy of sums: clipped examples, Gaussian noise on both moments, and the head that such sums give.

What one example adds, its features ``x`` scaled to a length of at most 1 and a constant 1 behind them, ``z``, is
``z z'`` of Frobenius norm ``|z|^2 <= 2``, and ``z y'`` of norm at most ``sqrt(2)``, for the target ``y`` is one at
the class. Both are released together, the second times 2 (`_TARGETS`): adding or removing an example moves that by
at most ``sqrt(2^2 + 2^2 * 2) = sqrt(12)``. The noise is that of the analytic Gaussian mechanism (Balle and Wang,
ICML 2018, theorem 8) for this length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import erfc, exp, sqrt

import numpy as np

from fl_elastic.errors import RegistryError, UpdateError
from fl_elastic.update.closed_form import ClosedFormHead, as_scores
from fl_elastic.update.frame import Kind, index_field, pack, unpack
from fl_elastic.update.head_sums import HeadSums, layer_shape
from fl_elastic.update.manifest import Manifest
from fl_elastic.update.secret_sums import as_vector, of_vector

__all__ = [
    "SumsPrivacy",
    "decode_noisy_sums",
    "encode_noisy_sums",
    "gaussian_delta",
    "noised",
    "private_head",
]

# By so many times as large are targets than products beside the same noise: on digits of 64 pixels accuracy is best
# from 2 to 4.
_TARGETS = 2.0
_LENGTH = sqrt(4.0 + 2.0 * _TARGETS**2)
# Of the largest eigenvalue that noise alone has: so much is added to all, and no eigenvalue of examples lost.
_RIDGE = 0.5
_MOST_EPSILON = 100.0
# Noise is not so many times as large as it is usually.
_SURE = 6.0
# What sums lose when they are written as fp32.
_ROUNDED = 1e-6


@dataclass(frozen=True)
class SumsPrivacy:
    """How one example's part in the sums for a head is hidden: whether it is among them stays uncertain.

    Parameters
    ----------
    epsilon, delta : float
        The sums of a client, or of all where they are added up in secret, are (epsilon, delta)-differentially
        private for adding or removing one example.
    clip : float
        Features of an example longer than this (Euclidean norm) are scaled down to it. Say it without looking at
        the clients' data: the usual length on public data.

    Raises
    ------
    RegistryError
        If a value is out of range.

    Examples
    --------
    >>> round(SumsPrivacy(epsilon=1.0, clip=20.0).noise, 2)
    12.92
    """

    epsilon: float
    clip: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= _MOST_EPSILON:
            raise RegistryError(
                f"epsilon {self.epsilon} must be above 0 and at most {_MOST_EPSILON:g}"
            )
        if not 0 < self.delta < 1:
            raise RegistryError(f"delta {self.delta} must be above 0 and below 1")
        if not 0 < self.clip < float("inf"):
            raise RegistryError(f"clip {self.clip} must be a length above 0")

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on products, whose features are in shares of the clip."""
        low, high = 1e-4, 1e6
        while high > low * (1 + 1e-12):
            middle = sqrt(low * high)
            if gaussian_delta(self.epsilon, middle) > self.delta:
                low = middle
            else:
                high = middle
        return _LENGTH * high


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Return the least delta for which Gaussian noise hides a change of length 1.

    Parameters
    ----------
    epsilon : float
    noise : float
        Its standard deviation.

    Examples
    --------
    >>> round(gaussian_delta(1.0, 1.0), 4)
    0.1269
    """
    half, shift = 0.5 / noise, epsilon * noise
    return _below(half - shift) - exp(epsilon) * _below(-half - shift)


def noised(sums: HeadSums, noise: float, rng: np.random.Generator) -> HeadSums:
    """Return sums of clipped features with noise on both moments; not of whole examples any more.

    The noise on products is symmetric, off the diagonal of half the variance: in Frobenius norm both count alike.

    Parameters
    ----------
    sums : HeadSums
        Of classes, and of features of length 1 at most.
    noise : float
        See `SumsPrivacy.noise`.
    rng : numpy.random.Generator
        Of the noise.
    """
    if not sums.classes:
        raise UpdateError(
            "differential privacy for sums is of classes: numbers have no known length"
        )
    upper = np.triu(rng.normal(scale=noise, size=sums.products.shape), 1) / np.sqrt(2.0)
    diagonal = np.diag(rng.normal(scale=noise, size=len(sums.products)))
    targets = sums.targets + rng.normal(scale=noise / _TARGETS, size=sums.targets.shape)
    # How many examples a class has is said by the targets of the constant alone.
    return replace(
        sums, products=sums.products + upper + upper.T + diagonal, targets=targets,
        squares=targets[-1].copy(), folds=(),
    )  # fmt: skip


def private_head(
    sums: HeadSums, noise: float, clip: float, *, intercept: bool = True
) -> ClosedFormHead:
    """Return the head that noisy sums give.

    Products are projected to those without negative eigenvalues, and a penalty as large as half of what noise alone
    gives is added (as AdaSSP of Wang, UAI 2018, does): no example is held out, which would take noise of its own.

    Parameters
    ----------
    sums : HeadSums
        Of `noised`, or several such added up.
    noise : float
        Standard deviation of the noise in them, ``sqrt(k)`` times a client's where k clients added theirs.
    clip : float
        By whose share features are given.
    intercept : bool
        Whether the layer has a bias.
    """
    products, targets = sums.products, sums.targets
    examples = max(float(products[-1, -1]), 1.0)
    goals = np.maximum(targets[-1], 0.0)
    goals = goals * examples / goals.sum() if goals.sum() > 0 else goals + examples / len(goals)
    mean = products[-1, :-1] / examples if intercept else np.zeros(len(products) - 1)
    centred = products[:-1, :-1] - examples * np.outer(mean, mean)
    values, vectors = np.linalg.eigh(centred)
    ridge = _RIDGE * noise * sqrt(2.0 * len(products))
    goal = goals / examples if intercept else np.zeros_like(goals)
    moved = targets[:-1] - np.outer(mean, goal * examples)
    if intercept:
        # Targets of an example add up to 1, so what moves with them adds up to nothing.
        moved -= moved.mean(axis=1, keepdims=True)
    weight = vectors @ ((vectors.T @ moved) / (np.maximum(values, 0.0) + ridge)[:, None])
    own = replace(sums, products=products / examples, targets=targets / examples)
    head = as_scores(own, weight, goal - mean @ weight, ridge / examples, 1.0)
    return replace(head, weight=(head.weight / clip).astype(np.float32))


def encode_noisy_sums(sums: HeadSums, manifest: Manifest) -> bytes:
    """Return sums of `noised` as one buffer; UpdateError if the manifest has no such weight."""
    if sums.weight not in manifest.index:
        raise UpdateError(f"the model has no tensor {sums.weight!r}")
    header = {"manifest": manifest.hash, "indices": [manifest.index[sums.weight]]}
    # Squares of targets say what their sums do.
    numbers = as_vector(sums)[: -len(sums.squares)]
    return pack(Kind.NOISY_SUMS, header, [numbers.astype("<f4").tobytes()])


def decode_noisy_sums(data: bytes | memoryview, manifest: Manifest, noise: float) -> HeadSums:
    """Return the sums in ``data``, to which noise of this standard deviation was added.

    Raises
    ------
    UpdateError
        If the bytes are damaged or of another model, or no noise makes such numbers of clipped examples.
    """
    _, header, payload = unpack(data, manifest, Kind.NOISY_SUMS)
    indices = index_field(header, "indices", manifest)
    if len(indices) != 1:
        raise UpdateError("sums are of one weight of a linear layer")
    shape = layer_shape(manifest.shapes[indices[0]])
    if len(payload) % 4:
        raise UpdateError(f"payload has {len(payload)} bytes, which are no numbers")
    numbers = np.frombuffer(payload, "<f4").astype(np.float64)
    outputs, features = shape
    sums = of_vector(
        np.append(numbers, numbers[len(numbers) - outputs :]),
        manifest.names[indices[0]], shape, classes=True,
    )  # fmt: skip
    examples, own = float(sums.products[-1, -1]), np.diag(sums.products)[:-1]
    slack = _SURE * noise
    if float(own.sum()) > examples + slack * (1 + sqrt(features)):
        raise UpdateError("features are longer than the clip allows")
    if abs(float(sums.targets[-1].sum()) - examples) > slack * (1 + sqrt(outputs)):
        raise UpdateError("targets do not count each example in one class")
    lost = _ROUNDED * float(np.abs(own).sum()) + slack + noise * sqrt(2.0 * features)
    if float(np.linalg.eigvalsh(sums.products)[0]) < -lost:
        raise UpdateError(
            "products of features are larger than their squares allow, taken together"
        )
    return sums


def _below(value: float) -> float:
    """Return the chance of a normal number below this."""
    return 0.5 * erfc(-value / sqrt(2.0))
