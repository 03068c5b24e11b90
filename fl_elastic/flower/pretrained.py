"""Tell from a model's norm layers whether it is pretrained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fl_elastic.flower.records import as_arrays
from fl_elastic.update import Manifest


def trained_before(arrays: ArrayRecord) -> bool:
    """Return whether a model is pretrained, judged by its norm layers.

    Norms with running means count as trained if a mean is not zero; other norms if the scales within one differ. A
    model without norms counts as untrained.

    Examples
    --------
    >>> from fl_elastic.flower.records import as_record
    >>> trained_before(as_record({"norm.weight": np.ones(3), "norm.bias": np.zeros(3)}))
    False
    >>> trained_before(as_record({"norm.weight": np.array([1.1, 0.9, 1.0])}))
    True
    """
    weights = as_arrays(arrays)
    means = [array for name, array in weights.items() if name.endswith("running_mean")]
    if means:
        return any(np.any(mean) for mean in means)
    scales = [
        array for name, array in weights.items() if name.endswith("weight") and array.ndim == 1
    ]
    return any(len(scale) > 0 and np.any(scale != scale[0]) for scale in scales)


def fresh_statistics(weights: Mapping[str, NDArray[Any]], manifest: Manifest) -> list[str]:
    """Return the running statistics that have never seen data: a mean of zeros beside a variance of ones.

    A norm that keeps such statistics does not normalise at all.
    """
    fresh = []
    for name in manifest.names:
        mean, variance = weights[name], weights.get(name.replace("running_mean", "running_var"))
        if name.endswith("running_mean") and variance is not None:
            if not np.any(mean) and np.all(variance == 1):
                fresh.append(name)
    return fresh
