"""The fleet's cut: below it nobody trains, and the server moves it to where training gains most."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from statistics import median_high, median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.flower.terms import RoundTerms
from fl_elastic.update import Manifest

__all__ = ["FleetCut", "LeftAlone"]

_LOG = logging.getLogger("fl_elastic")
# A move makes every client compute its features anew, and what a place is worth is told by few batches. Moves that
# promised a tenth more ended lower than the cut that stayed.
_WORTH_MOVING = 1.5
_LONGEST_PAUSE = 8
_EVERY = 5
_LONGEST_NAME = 500


class FleetCut:
    """Where the cut lies, and when clients are asked where it should lie.

    Clients say what training down to each place would gain in the same time (`fl_elastic.training.cut_worth`). The
    median over them decides, the lower one of two, so that one that says something else moves nothing. Once there
    is a cut it only goes deeper: what a short step gains says little of what a whole run would lose above it, and
    moving up again spoiled runs. While the cut stays clients are asked ever more rarely.

    Parameters
    ----------
    terms : RoundTerms
        Whether there is a cut, and whether it moves.

    Attributes
    ----------
    group : str
        The deepest group that anybody trains; empty for no cut.
    """

    def __init__(self, terms: RoundTerms) -> None:
        self.group = terms.cut_group
        self._moves = terms.cut == "moving"
        self._every = terms.solve_every or _EVERY
        self._pause, self._left = 1, 0

    def due(self, server_round: int) -> bool:
        """Whether clients are asked before this round: the first, or one before which a head was solved for."""
        if not self._moves or (server_round - 1) % self._every:
            return False
        self._left -= 1
        return self._left < 1

    def decide(self, shares: Sequence[Mapping[str, float]]) -> bool:
        """Move to the place of most worth that is not above the cut; return whether it is another one.

        Parameters
        ----------
        shares : sequence of mapping of str to float
            Of each client that answered: worth of each place, nearest to the loss first, as shares of their sum.
        """
        self._left = self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        names = sorted({name for each in shares for name in each})
        if not names:
            _LOG.warning("no client said what cuts are worth: the cut stays at %r", self.group)
            return False
        worth = {name: median_low(each.get(name, 0.0) for each in shares) for name in names}
        if self.group:
            depth = {name: _depth(name, shares) for name in {*names, self.group}}
            names = [name for name in names if depth[name] >= depth[self.group]]
        best = max(names, key=worth.__getitem__, default=self.group)
        if best == self.group or worth[best] <= _WORTH_MOVING * worth.get(self.group, 0.0):
            return False
        _LOG.info("the fleet's cut moves from %s to %s", self.group or "nowhere", best)
        self.group = best
        self._left = self._pause = 1
        return True

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return what must outlast a restart of the server."""
        if not self._moves:
            return {}
        return {"group": np.array(self.group), "pause": np.array([self._pause, self._left])}

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Put back what `to_arrays` gave."""
        if self._moves and "group" in arrays:
            self.group = str(arrays["group"])[:_LONGEST_NAME]
            self._pause, self._left = (int(each) for each in arrays["pause"])


def _depth(name: str, shares: Sequence[Mapping[str, float]]) -> float:
    """Return how far from the loss most say that a place lies; infinitely far if hardly anyone names it."""
    places = [[*each].index(name) if name in each else inf for each in shares]
    return median_high(places)


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
