"""The units of a window, as a slow reference."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["kept_units"]


def kept_units(size: int, length: int, start: int) -> NDArray[np.int64]:
    """Return the units of a window, in its own order."""
    return (start + np.arange(length)) % size
