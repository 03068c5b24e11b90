"""Squared gradients per example, a measure of how much each weight matters to them, for forgetting by dampening.

Foster, Schoepf and Brintrup, "Fast machine unlearning without retraining through selective synaptic dampening",
AAAI 2024: weights that matter far more to the examples to be forgotten than to all examples are shrunk, and nothing
is trained again. How much a weight matters is the diagonal of the Fisher information. The published code squares
the gradients of whole batches, which depend on the batch size; here they are those of single examples, so that sums
over devices equal those of all examples together. The factor by which a weight has to matter more follows Schoepf,
Foster and Brintrup, "Parameter-tuning-free data entry error unlearning with adaptive selective synaptic dampening",
2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update.checks import Limits, check_count
from fl_elastic.update.frame import Kind, field, index_field, pack, unpack
from fl_elastic.update.manifest import Manifest

# Relative error of sums over many examples in fp32.
_ROUNDED = 1e-2
# Smallest normal number in fp32.
_TINY = np.finfo(np.float32).tiny
_Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class SquaredGradients:
    """Sums of the squared gradients of single examples.

    Those of several devices or data sets are added with ``+``.

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
        for name, each in self.sums.items():
            if not np.isfinite(each).all() or (each < 0).any():
                raise UpdateError(
                    f"the squared gradients of {name!r} are negative or not finite: check the model's weights and "
                    "the examples, or leave out the device that sent them"
                )

    def __add__(self, other: SquaredGradients) -> SquaredGradients:
        """Return the sums of both; UpdateError if they are of other parameters."""
        if {n: s.shape for n, s in self.sums.items()} != {
            n: s.shape for n, s in other.sums.items()
        }:
            raise UpdateError(
                "squared gradients of two models cannot be added: their parameters differ"
            )
        sums = {name: each + other.sums[name] for name, each in self.sums.items()}
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
            {name: each * np.float32(factor) for name, each in self.sums.items()}, self.examples
        )


def encode_squares(
    everything: SquaredGradients, forgotten: SquaredGradients | None, manifest: Manifest
) -> bytes:
    """Return a device's squares as one buffer of fp32: those of all its examples, then those to be forgotten."""
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
        Kind.SQUARES,
        header,
        [np.ascontiguousarray(p.sums[n], "<f4").tobytes() for p in parts for n in names],
    )


def decode_squares(
    data: bytes | memoryview, manifest: Manifest, limits: Limits | None = None
) -> tuple[SquaredGradients, SquaredGradients | None]:
    """Return the squares of all examples of a device, and of those to be forgotten, if there are any.

    Raises
    ------
    UpdateError
        If the bytes are damaged or of another model, or the numbers cannot be such squares: all examples include
        those to be forgotten, and each example's gradient has length 1
        (`fl_elastic.methods.dampening.forget.squared_gradients`).
    """
    _, header, payload = unpack(data, manifest, Kind.SQUARES)
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
                f"squares of {count} examples add up to {found[-1].mean * count:.3g}: gradients of length 1 have "
                "squares that add up to one for each"
            )
    if few == 0:
        return found[0], None
    refuse_what_is_no_part(found[1], found[0])
    return found[0], found[1]


def refuse_what_is_no_part(forgotten: SquaredGradients, everything: SquaredGradients) -> None:
    """Raise UpdateError unless ``everything`` can contain ``forgotten``."""
    for name, squares in forgotten.sums.items():
        # The two were summed and rounded separately; tiny numbers are rounded to whole steps.
        if (squares > everything.sums[name] * np.float32(1.001) + _TINY).any():
            raise UpdateError(
                f"squares of what is to be forgotten are larger than those of all examples, as of {name!r}: all "
                "examples contain those to be forgotten, without random changes"
            )
