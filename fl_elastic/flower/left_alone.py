"""What lies below the fleet's cut, or is solved for, stays as it is, whoever trained it all the same."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update import Manifest

__all__ = ["LeftAlone", "fresh_statistics", "trained_before"]

_LOG = logging.getLogger("fl_elastic")
_LONGEST_INDEX = 8


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


class LeftAlone:
    """Learns from the clients of a round which parameters may be trained: the server has no graph of the model.

    What more than half of them say counts, so that one that says something else, or trains what it likes, changes
    nothing there. Where there is no such majority nothing is held back.

    Parameters
    ----------
    manifest : Manifest
        Of the model.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._said: Counter[frozenset[int]] = Counter()
        self._clients = 0

    def hear(self, text: object) -> None:
        """Take in what a client says: the indices of the parameters that may be trained, as JSON."""
        self._clients += 1
        count = len(self._manifest)
        if not isinstance(text, str) or len(text) > _LONGEST_INDEX * (count + 1):
            return
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return
        if isinstance(found, list) and all(type(i) is int and 0 <= i < count for i in found):
            self._said[frozenset(found)] += 1

    def put_back(
        self, weights: Mapping[str, NDArray[Any]], before: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """Return the weights, with what nobody may train as before; norms keep their statistics there."""
        ((may_train, votes),) = self._said.most_common(1) or [(frozenset[int](), 0)]
        if 2 * votes <= self._clients:
            if self._clients:
                _LOG.warning("clients do not agree on what lies above the fleet's cut")
            return dict(weights)
        index = self._manifest.index
        return {
            name: each if index[name] in may_train else before[name]
            for name, each in weights.items()
        }
