"""What lies below the fleet's cut, or is solved for, stays as it is, whoever trained it all the same."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from fl_elastic.update import Manifest

__all__ = ["LeftAlone"]

_LOG = logging.getLogger("fl_elastic")
_LONGEST_INDEX = 8


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
