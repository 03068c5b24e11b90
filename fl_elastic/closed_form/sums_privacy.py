"""Differential privacy of head sums: clipped examples, Gaussian noise on both moments, and the resulting head.

Let ``z`` be an example's features ``x``, scaled to a length of at most 1, with a constant 1 appended. The example
adds ``z z'`` of Frobenius norm ``|z|^2 <= 2``, and ``z y'`` of norm at most ``sqrt(2)``, since the target ``y`` is
one-hot. Both are released together, the second times 2 (`_TARGETS`): adding or removing an example changes them by
at most ``sqrt(2^2 + 2^2 * 2) = sqrt(12)``. The noise is that of the analytic Gaussian mechanism (Balle and Wang,
ICML 2018, theorem 8) for this sensitivity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import erfc, exp, sqrt

import numpy as np

from fl_elastic.closed_form.head import ClosedFormHead, as_scores
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.head_sums_wire import layer_shape
from fl_elastic.closed_form.secret_sums import as_vector, of_vector
from fl_elastic.errors import SettingError, UpdateError
from fl_elastic.update.frame import MessageKind, index_field, pack, unpack
from fl_elastic.update.manifest import Manifest

# Factor by which targets are scaled up against products under the same noise: on digits of 64 pixels accuracy is
# best from 2 to 4.
_TARGETS = 2.0
_LENGTH = sqrt(4.0 + 2.0 * _TARGETS**2)
# Penalty as a share of the largest eigenvalue of the noise alone; unlike a cut-off it drops nothing.
_RIDGE = 0.5
_MOST_EPSILON = 100.0
# Noise beyond this many standard deviations does not occur by chance.
_SURE = 6.0
# Relative error of sums written as fp32.
_ROUNDED = 1e-6


@dataclass(frozen=True)
class SumsPrivacy:
    """Settings of differential privacy for the sums from which a head is solved.

    Parameters
    ----------
    epsilon, delta : float
        The sums of a client, or of all clients under secure aggregation, are (epsilon, delta)-differentially
        private for adding or removing one example.
    clip : float
        Features of an example longer than this (Euclidean norm) are scaled down to it. Choose it independently of
        the clients' data, for example as the usual length on public data.

    Raises
    ------
    SettingError
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
            raise SettingError(
                f"epsilon {self.epsilon} must be above 0 and at most {_MOST_EPSILON:g}"
            )
        if not 0 < self.delta < 1:
            raise SettingError(f"delta {self.delta} must be above 0 and below 1")
        if not 0 < self.clip < float("inf"):
            raise SettingError(f"clip {self.clip} must be above 0 and finite")

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on products of features, in units of the squared clip."""
        low, high = 1e-4, 1e6
        while high > low * (1 + 1e-12):
            middle = sqrt(low * high)
            if gaussian_delta(self.epsilon, middle) > self.delta:
                low = middle
            else:
                high = middle
        return _LENGTH * high


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Return the least delta at which Gaussian noise hides a change of length 1.

    Parameters
    ----------
    epsilon : float
    noise : float
        Standard deviation of the noise.

    Examples
    --------
    >>> round(gaussian_delta(1.0, 1.0), 4)
    0.1269
    """
    half, shift = 0.5 / noise, epsilon * noise
    return _below(half - shift) - exp(epsilon) * _below(-half - shift)


def noised(sums: HeadSums, noise: float, rng: np.random.Generator) -> HeadSums:
    """Return sums of clipped features with noise on both moments; they are no longer sums of whole examples.

    The noise on products is symmetric, with half the variance off the diagonal, so that both triangles together
    count like the diagonal in Frobenius norm.

    Parameters
    ----------
    sums : HeadSums
        Sums for classes, of features of length 1 at most.
    noise : float
        See `SumsPrivacy.noise`.
    rng : numpy.random.Generator
        Source of the noise.
    """
    if not sums.classes:
        raise UpdateError(
            "differential privacy for sums needs classes as targets: numeric targets have no bounded length"
        )
    upper = np.triu(rng.normal(scale=noise, size=sums.products.shape), 1) / np.sqrt(2.0)
    diagonal = np.diag(rng.normal(scale=noise, size=len(sums.products)))
    targets = sums.targets + rng.normal(scale=noise / _TARGETS, size=sums.targets.shape)
    # The number of examples of a class is given by the targets of the constant alone.
    products = sums.products + upper + upper.T + diagonal
    return HeadSums(sums.weight, products, targets, targets[-1].copy(), sums.classes)


def private_head(
    sums: HeadSums, noise: float, clip: float, *, intercept: bool = True
) -> ClosedFormHead:
    """Return the head for noisy sums.

    Negative eigenvalues of the products are set to zero, and a penalty of half the noise's largest eigenvalue is
    added (similar to AdaSSP, Wang, UAI 2018). No example is held out, because held-out sums would need noise of
    their own.

    Parameters
    ----------
    sums : HeadSums
        Result of `noised`, or the sum of several.
    noise : float
        Standard deviation of the noise in them: ``sqrt(k)`` times a client's if k clients added theirs.
    clip : float
        Length by which features were divided.
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
        # Targets of an example add up to 1, so their covariances with a feature add up to 0.
        moved -= moved.mean(axis=1, keepdims=True)
    weight = vectors @ ((vectors.T @ moved) / (np.maximum(values, 0.0) + ridge)[:, None])
    own = sums.without_folds().times(1 / examples)
    head = as_scores(own, weight, goal - mean @ weight, ridge / examples, 1.0)
    return replace(head, weight=(head.weight / clip).astype(np.float32))


def encode_noisy_sums(sums: HeadSums, manifest: Manifest) -> bytes:
    """Return the result of `noised` as one buffer."""
    header = {"manifest": manifest.hash, "indices": [manifest.index[sums.weight]]}
    # Squared targets equal the targets' sums, and are left out.
    numbers = as_vector(sums)[: -len(sums.squares)]
    return pack(MessageKind.NOISY_SUMS, header, [numbers.astype("<f4").tobytes()])


def decode_noisy_sums(data: bytes | memoryview, manifest: Manifest, noise: float) -> HeadSums:
    """Return the sums in ``data``, which contain noise of this standard deviation.

    Raises
    ------
    UpdateError
        If the bytes are damaged or of another model, or the numbers cannot come from clipped examples with noise.
    """
    _, header, payload = unpack(data, manifest, MessageKind.NOISY_SUMS)
    indices = index_field(header, "indices", manifest)
    if len(indices) != 1:
        raise UpdateError("sums are of one weight of a linear layer")
    shape = layer_shape(manifest.shapes[indices[0]])
    if len(payload) % 4:
        raise UpdateError(f"payload has {len(payload)} bytes, not a whole number of fp32 values")
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
    """Return the probability that a standard normal number is below this."""
    return 0.5 * erfc(-value / sqrt(2.0))
