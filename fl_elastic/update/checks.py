"""Checks of a client's update before it is merged: shapes, finite numbers and counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.update.manifest import FLOATS, Manifest, Role, is_variance
from fl_elastic.update.partial import PackedDeltas, PartialUpdate, reach
from fl_elastic.update.parts import Masks, take_part

MAX_VERSION = 2**62
# Slightly above the relative rounding error of bf16.
_ROUNDED = 0.01


@dataclass(frozen=True)
class Limits:
    """Bounds of the numbers that a server accepts: larger ones are treated as damage or an attack.

    Attributes
    ----------
    max_steps : int
        Most local steps per tensor.
    max_examples : int
        Most examples per client.
    max_change : float
        Largest absolute delta; far below the range of fp32, so that no sum can overflow.
    """

    max_steps: int = 1_000_000
    max_examples: int = 100_000_000
    max_change: float = 1e30


def check_update(update: PartialUpdate, manifest: Manifest, limits: Limits | None = None) -> None:
    """Raise UpdateError unless ``update`` can be merged.

    Checks names, roles, shapes, finiteness, step counts, trained parts, the example count and the base
    version.
    """
    limits = limits or Limits()
    check_count("num_examples", update.num_examples, 1, limits.max_examples)
    check_count("base_version", update.base_version, 0, MAX_VERSION)
    if set(update.steps) != set(update.deltas):
        odd = sorted(set(update.steps) ^ set(update.deltas))
        raise UpdateError(f"deltas and steps must name the same tensors, they differ in {odd[:3]}")
    packed = update.deltas if isinstance(update.deltas, PackedDeltas) else None
    together = math.inf if packed is None else packed.bound()
    ranges = {dtype: min(limits.max_change, _range_of(dtype) / 4) for dtype in FLOATS}
    for name, delta in update.deltas.items():
        index = manifest.index.get(name)
        if index is None:
            raise UpdateError(f"tensor {name!r} is not in the manifest {manifest.hash}")
        if manifest.roles[index] is Role.COUNTER:
            raise UpdateError(
                f"tensor {name!r} holds integers, which are never averaged; leave it out"
            )
        shape = np.shape(delta)
        if shape != manifest.shapes[index]:
            raise UpdateError(
                f"delta of {name!r} has shape {shape}, the manifest says {manifest.shapes[index]}"
            )
        largest = ranges[manifest.dtypes[index]]
        # The sums of squares, which are needed later anyway, bound all numbers. If this bound is too large, check
        # each.
        if packed is None or together > largest or packed.start(name) is None:
            _check_numbers(name, np.asarray(delta), largest)
        check_count(f"step count of {name!r}", update.steps[name], 1, limits.max_steps)

    for name, masks in update.parts.items():
        _check_part(update, name, masks)


def check_variances(update: PartialUpdate, base: Mapping[str, NDArray[Any]]) -> None:
    """Raise UpdateError if a running variance would become negative by more than a codec's rounding error.

    Parameters
    ----------
    update : PartialUpdate
        An update that passes `check_update`.
    base : mapping of str to ndarray
        The model from which it starts.
    """
    for name, delta in update.deltas.items():
        if not is_variance(name):
            continue
        old = np.asarray(base[name], np.float64)
        rounding = _ROUNDED * (np.abs(old) + np.abs(delta))
        if (old + delta < -rounding).any():
            least = float((old + delta).min())
            raise UpdateError(
                f"running variance {name!r} would be {least:.3g}, but cannot be negative"
            )


def check_count(what: str, value: object, lowest: int, highest: int) -> None:
    """Raise UpdateError unless ``value`` is an integer from ``lowest`` to ``highest``."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise UpdateError(f"{what} must be an integer, got {repr(value)[:40]}")
    number = int(value)
    if not lowest <= number <= highest:
        # Python refuses to print an integer of thousands of digits.
        seen = number if abs(number) < 2**64 else "beyond 64 bits"
        raise UpdateError(f"{what} is {seen}, expected {lowest} to {highest}")


def _check_numbers(name: str, delta: NDArray[Any], largest: float) -> None:
    if delta.dtype.kind not in "fiu":
        raise UpdateError(f"delta of {name!r} does not hold real numbers")
    found = reach(delta)
    if not math.isfinite(found):
        raise UpdateError(f"delta of {name!r} holds NaN or infinite values")
    if found > largest:
        raise UpdateError(f"delta of {name!r} reaches {found:.3g}, more than {largest:.3g}")


@cache
def _range_of(dtype: str) -> float:
    """Return the largest number of a manifest's floating dtype, by the numpy dtype that holds it."""
    return float(np.finfo("float32" if dtype == "bfloat16" else dtype).max)


def _check_part(update: PartialUpdate, name: str, masks: Masks) -> None:
    """Raise UpdateError unless ``masks`` describe a part of the tensor and the delta is zero outside it."""
    if name not in update.deltas:
        raise UpdateError(f"tensor {str(name)[:80]!r} has a trained part but no delta")
    delta = np.asarray(update.deltas[name])
    if not isinstance(masks, tuple) or len(masks) != delta.ndim:
        raise UpdateError(
            f"trained part of {name!r} must be a tuple of {delta.ndim} masks, one per axis"
        )
    if all(mask is None for mask in masks):
        raise UpdateError(f"trained part of {name!r} is all of it; leave it out of the parts")
    for axis, (mask, count) in enumerate(zip(masks, delta.shape, strict=True)):
        if mask is None:
            continue
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (count,):
            raise UpdateError(
                f"trained part of {name!r} must have a boolean mask of shape ({count},) or None "
                f"for axis {axis}"
            )
    # Counting non-zeros is many times cheaper than building the outer product to check outside it.
    if np.count_nonzero(delta) != np.count_nonzero(take_part(delta, masks)):
        raise UpdateError(f"delta of {name!r} is not zero outside its trained part")
