"""The units of a window, as a slow reference."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def kept_units(size: int, length: int, start: int) -> NDArray[np.int64]:
    """Return the units of a window, in its own order."""
    return (start + np.arange(length)) % size
