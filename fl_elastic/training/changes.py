"""What a fit changed, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import TrainingError

__all__ = ["changes"]

Weights = Mapping[str, NDArray[Any]]


def changes(now: Weights, before: Weights, steps: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """Return the change of each tensor that was trained for at least one step, in the order of ``now``.

    Raises
    ------
    TrainingError
        If such a tensor is no longer finite.
    """
    deltas = {}
    for name, value in now.items():
        if steps.get(name, 0) > 0:
            deltas[name] = np.asarray(value - before[name])
            if not np.isfinite(deltas[name]).all():
                raise TrainingError(
                    f"tensor {name!r} is no longer finite after training: lower the learning rate"
                )
    return deltas
