"""The arrays with which a server begins, and what the norm layers among them tell about the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import nn

from fl_elastic.flower.strategy_state import as_record
from fl_elastic.update import Manifest, weights_of

__all__ = ["fresh_statistics", "initial_arrays", "trained_before"]


def initial_arrays(model: nn.Module, *, whole: bool = False) -> ArrayRecord:
    """Return what a server begins with: of a model with a frozen base what is trained, and the base's digest.

    A client with another base refuses to train, and says so. Of a model of which everything is trained these are
    all tensors.

    Parameters
    ----------
    model : nn.Module
        As on the devices.
    whole : bool
        Whether to send the frozen base as well, for devices that do not have it.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> _ = model[0].requires_grad_(False)
    >>> list(initial_arrays(model))
    ['1.weight', '1.bias', 'fl_elastic.frozen_base']
    """
    return as_record(weights_of(model, Manifest.of(model, whole=whole)))


def fresh_statistics(weights: Mapping[str, NDArray[Any]], manifest: Manifest) -> list[str]:
    """Return the running statistics that have never seen data: a mean of zeros beside a variance of ones.

    Norms that keep them do not normalise at all.
    """
    fresh = []
    for name in manifest.names:
        mean, variance = weights[name], weights.get(name.replace("running_mean", "running_var"))
        if name.endswith("running_mean") and variance is not None:
            if not np.any(mean) and np.all(variance == 1):
                fresh.append(name)
    return fresh


def trained_before(weights: Mapping[str, NDArray[Any]]) -> bool:
    """Whether a model's norms are not as they were made: running statistics that have seen data, unequal scales.

    A model without norms does not tell; it counts as fresh.

    >>> trained_before({"norm.weight": np.ones(3), "norm.bias": np.zeros(3)})
    False
    >>> trained_before({"norm.weight": np.array([1.1, 0.9, 1.0])})
    True
    """
    means = [each for name, each in weights.items() if name.endswith("running_mean")]
    if means:
        return any(np.any(each) for each in means)
    scales = [each for name, each in weights.items() if name.endswith("weight") and each.ndim == 1]
    return any(len(each) > 0 and np.any(each != each[0]) for each in scales)
