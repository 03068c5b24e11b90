"""How far off each codec may be, from what it says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _largest(values: NDArray[Any]) -> float:
    return float(np.abs(values).max(initial=0.0))


def _topk(values: NDArray[Any]) -> float:
    magnitude = np.sort(np.abs(values).reshape(-1))
    if not magnitude.size:
        return 0.0
    left_out = magnitude[: magnitude.size - max(1, magnitude.size // 16)]
    # Half precision, and the roundings of the division and of the product.
    rounding = float(magnitude[-1]) * (2.0**-11 + 2.0**-22) + 2.0**-149
    return max(float(left_out.max(initial=0.0)), rounding)


_BOUNDS: dict[str, Callable[[NDArray[Any]], float]] = {
    "fp32": lambda values: 0.0,
    # Half a unit in the last place of the largest value, or of the steps near zero.
    "fp16": lambda values: _largest(values) * 2.0**-11 + 2.0**-25,
    "bf16": lambda values: _largest(values) * 2.0**-8 + 2.0**-134,
    # One step of the scale, itself rounded up.
    "int8": lambda values: _largest(values) / 127 * (1 + 2.0**-15) + 2.0**-148,
    "topk": _topk,
}


def error_bound(codec: str, values: NDArray[Any]) -> float:
    """Return the largest absolute error of any number when values are written and read."""
    return _BOUNDS[codec](values)
