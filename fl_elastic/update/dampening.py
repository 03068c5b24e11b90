"""Squared gradients, and the dampening rule that shrinks weights according to them, to forget examples."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update.checks import Limits, check_count
from fl_elastic.update.frame import MessageKind, field, index_field, pack, unpack
from fl_elastic.update.manifest import Manifest

# Relative error of sums over many examples in fp32.
_ROUNDED = 1e-2
# Smallest normal number in fp32.
_TINY = np.finfo(np.float32).tiny
_Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class SquaredGradients:
    """Sums of the squared gradients of single examples.

    Sums of several devices or data sets are added with ``+``.

    Attributes
    ----------
    sums : dict of str to array
        Sum for each parameter, in its shape.
    examples : int
        Number of examples.

    Raises
    ------
    UpdateError
        If there is no example, or a sum is negative or not finite: values from a device are not trusted.
    """

    sums: Mapping[str, _Floats]
    examples: int

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise UpdateError(f"squared gradients of {self.examples} examples: take at least one")
        for name, array in self.sums.items():
            if not np.isfinite(array).all() or (array < 0).any():
                raise UpdateError(
                    f"the squared gradients of {name!r} are negative or not finite: check the model's weights and "
                    "the examples, or leave out the device that sent them"
                )

    def __add__(self, other: SquaredGradients) -> SquaredGradients:
        """Return the sums of both; raise UpdateError if their parameters differ."""
        if {n: s.shape for n, s in self.sums.items()} != {
            n: s.shape for n, s in other.sums.items()
        }:
            raise UpdateError(
                "squared gradients of two models cannot be added: their parameters differ"
            )
        sums = {name: array + other.sums[name] for name, array in self.sums.items()}
        return SquaredGradients(sums, self.examples + other.examples)

    @property
    def mean(self) -> float:
        """Mean over the examples of the sum of all parameters' squared gradients."""
        return sum(float(each.sum(dtype=np.float64)) for each in self.sums.values()) / self.examples

    def standing_for(self, examples: int) -> SquaredGradients:
        """Return the sums scaled to ``examples`` examples, of which the present ones are a sample."""
        more = self.times(examples / self.examples)
        return SquaredGradients(more.sums, examples)

    def times(self, factor: float) -> SquaredGradients:
        """Return the sums multiplied by ``factor``, for the same number of examples."""
        return SquaredGradients(
            {name: array * np.float32(factor) for name, array in self.sums.items()}, self.examples
        )


def encode_squares(
    everything: SquaredGradients, forgotten: SquaredGradients | None, manifest: Manifest
) -> bytes:
    """Return a device's squares as one buffer of fp32: of all its examples, then of those to be forgotten."""
    indices = sorted(manifest.index[name] for name in everything.sums)
    names = [manifest.names[index] for index in indices]
    header = {
        "manifest": manifest.hash,
        "indices": indices,
        "num_examples": everything.examples,
        "forgotten": 0 if forgotten is None else forgotten.examples,
    }
    parts = [everything] if forgotten is None else [everything, forgotten]
    return pack(
        MessageKind.SQUARES,
        header,
        [np.ascontiguousarray(p.sums[n], "<f4").tobytes() for p in parts for n in names],
    )


def decode_squares(
    data: bytes | memoryview, manifest: Manifest, limits: Limits | None = None
) -> tuple[SquaredGradients, SquaredGradients | None]:
    """Return the squares of all examples of a device, and those of the examples to be forgotten, if any.

    Raises
    ------
    UpdateError
        If the bytes are damaged or of another model, or the numbers cannot be such squares: all examples include
        those to be forgotten, and each example's gradient has length 1
        (`fl_elastic.methods.dampening.forget.squared_gradients`).
    """
    _, header, payload = unpack(data, manifest, MessageKind.SQUARES)
    indices = index_field(header, "indices", manifest)
    examples, few = field(header, "num_examples", int), field(header, "forgotten", int)
    check_count("num_examples", examples, 1, (limits or Limits()).max_examples)
    check_count("forgotten", few, 0, examples)
    shapes = {manifest.names[index]: manifest.shapes[index] for index in indices}
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes.values()]
    parts = 2 if few else 1
    if len(payload) != 4 * parts * sum(sizes):
        raise UpdateError(
            f"payload has {len(payload)} bytes, squares need {4 * parts * sum(sizes)}"
        )
    sent = np.frombuffer(payload, "<f4").reshape(parts, -1)
    found = []
    for row, count in zip(sent, (examples, few), strict=False):
        pieces = np.split(row, np.cumsum(sizes)[:-1])
        sums = {
            n: piece.reshape(shape)
            for (n, shape), piece in zip(shapes.items(), pieces, strict=True)
        }
        found.append(SquaredGradients(sums, count))
        if found[-1].mean > 1 + _ROUNDED:
            raise UpdateError(
                f"squares of {count} examples add up to {found[-1].mean * count:.3g}: the squares of "
                "each example's gradient, of length 1, must add up to one"
            )
    if few == 0:
        return found[0], None
    refuse_what_is_no_part(found[1], found[0])
    return found[0], found[1]


def refuse_what_is_no_part(forgotten: SquaredGradients, everything: SquaredGradients) -> None:
    """Raise UpdateError unless the examples of ``everything`` can include those of ``forgotten``."""
    for name, squares in forgotten.sums.items():
        # The two sums were rounded separately, and subnormal numbers have a large relative error.
        if (squares > everything.sums[name] * np.float32(1.001) + _TINY).any():
            raise UpdateError(
                f"the squares of {name!r} are larger for the examples to be forgotten than for all examples: the "
                "latter must include the former, without random changes"
            )


# Most weights from which a percentile is computed: in larger models only every second or third weight is used.
_LOOKED_AT = 4_000_000
_NEARLY = 1e-3


def dampening_factors(
    forgotten: SquaredGradients,
    everything: SquaredGradients,
    *,
    alpha: float | None = None,
) -> dict[str, _Floats]:
    r"""Return the factor by which each weight is to be multiplied, 1 for most.

    With mean squares :math:`I_f` and :math:`I_D`, a weight with :math:`I_f > \alpha I_D` is multiplied by
    :math:`\min(1, I_D / I_f)`. Since all examples contain the forgotten ones, :math:`I_f / I_D` is at most the
    number of all examples over the number of forgotten ones.

    Parameters
    ----------
    forgotten, everything : SquaredGradients
        Sums of the same parameters: for the examples to be forgotten, and for all training examples, including
        these.
    alpha : float, optional
        Above 0. A smaller value forgets more and does more damage to other examples. By default `alpha_by_share`
        computes it.

    Raises
    ------
    UpdateError
        If a number is invalid, ``everything`` does not contain ``forgotten``, or ``alpha`` is so large that it
        selects no weight.

    Examples
    --------
    >>> few = SquaredGradients({"weight": np.float32([8.0, 1.0])}, 1)
    >>> dampening_factors(few, SquaredGradients({"weight": np.float32([8.0, 4.0])}, 4))["weight"].tolist()
    [0.25, 1.0]
    """
    if alpha is not None and not (isinstance(alpha, numbers.Real) and 0 < alpha < math.inf):
        raise UpdateError(f"alpha {alpha!r} must be above 0 and finite: give a number such as 3.0")
    most = everything.examples / forgotten.examples
    if alpha is None:
        if most <= 1:
            raise UpdateError(
                f"{forgotten.examples} of {everything.examples} examples are to be forgotten: nothing matters to "
                "these more than to all; give all examples that the model was trained on, or train a new model"
            )
        alpha = alpha_by_share(forgotten, everything)
    if alpha >= most:
        raise UpdateError(
            f"alpha {alpha:g} selects nothing: {forgotten.examples} of {everything.examples} examples are to be "
            f"forgotten, so that a weight matters at most {most:.3g} times as much to them; give less than that"
        )
    refuse_what_is_no_part(forgotten, everything)
    factors: dict[str, _Floats] = {}
    for name, squares in forgotten.sums.items():
        own, of_all = squares / forgotten.examples, everything.sums[name] / everything.examples
        selected = own > alpha * of_all
        shrunk = np.minimum(of_all / np.where(selected, own, 1.0), 1.0)
        factors[name] = np.where(selected, shrunk, 1.0).astype(np.float32)
    return factors


def alpha_by_share(forgotten: SquaredGradients, everything: SquaredGradients) -> float:
    r"""Return an alpha such that few weights change if few examples are forgotten.

    It is the percentile :math:`100 - \ln(1 + 100 s)` of :math:`I_f / I_D` over all weights, where :math:`s` is the
    share of the examples that are to be forgotten (Schoepf, Foster and Brintrup, 2024), and at least 1.

    Parameters
    ----------
    forgotten, everything : SquaredGradients
        As for `dampening_factors`.

    Examples
    --------
    >>> few = SquaredGradients({"weight": np.float32(np.arange(101))}, 1)
    >>> everything = SquaredGradients({"weight": np.float32(np.full(101, 100))}, 20)
    >>> round(alpha_by_share(few, everything), 2)  # a twentieth: the percentile is 98.2
    19.64
    """
    share = forgotten.examples / everything.examples
    stride = -(-sum(each.size for each in forgotten.sums.values()) // _LOOKED_AT)
    ratios = [
        np.divide(few, of_all, out=np.zeros(few.shape, np.float32), where=of_all > 0)
        for few, of_all in (
            (squares.ravel()[::stride], everything.sums[name].ravel()[::stride])
            for name, squares in forgotten.sums.items()
        )
    ]
    found = np.percentile(np.concatenate(ratios), 100 - math.log1p(100 * share)) / share
    # Weights with gradients from no other example have the largest possible ratio, and there may be many of them.
    return max(min(float(found), (1 - _NEARLY) / share), 1.0)
