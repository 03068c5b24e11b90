"""Which parameters no client may train, as most clients of a round report: those below the cut, a solved head."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from fl_elastic.update import Manifest

_LOG = logging.getLogger("fl_elastic")
# Digits and separator of an index in a client's statement, at most.
_LONGEST_INDEX = 8


class FrozenConsensus:
    """Learns from a round's clients which parameters may be trained, because the server has no graph of the model.

    The statement made by more than half of the clients counts, so that a single client changes nothing. Without
    such a majority no parameter is held back.

    Parameters
    ----------
    manifest : Manifest
        Manifest of the model.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._said: Counter[frozenset[int]] = Counter()
        self._clients = 0

    def hear(self, text: object) -> None:
        """Count a client's statement: the indices of the parameters that may be trained, as JSON."""
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
        """Return ``weights`` with the tensors of ``before`` where the clients' majority may not train.

        Clients list parameters only, so buffers, such as running statistics, are always those of ``before``.
        """
        may_train = self.may_train()
        return {name: each if name in may_train else before[name] for name, each in weights.items()}

    def may_train(self) -> frozenset[str]:
        """Return the names of the parameters that may be trained."""
        ((said, votes),) = self._said.most_common(1) or [(frozenset[int](), 0)]
        names = self._manifest.names
        if 2 * votes <= self._clients:
            if self._clients:
                _LOG.warning("clients do not agree on what lies above the fleet's cut")
            return frozenset(names)
        return frozenset(names[index] for index in said)
