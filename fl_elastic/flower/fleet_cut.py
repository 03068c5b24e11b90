"""The fleet's cut, below which no client trains; and the clients' consensus on which parameters are frozen."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from statistics import median_high
from typing import Any

from numpy.typing import NDArray

from fl_elastic.claims import FEWEST, may_lie
from fl_elastic.flower.round_config import RoundConfig
from fl_elastic.update import Manifest

_LOG = logging.getLogger("fl_elastic")
# Rounds between two votes on a moving cut if the head is not solved for repeatedly.
_EVERY = 5
# Share of a round's clients, the fastest ones, that vote on the cut.
_ASKED_SHARE = 1 / 3
# Largest number of characters that an index and its separator take in a client's list.
_LONGEST_INDEX = 8


class FleetCut:
    """The fleet's cut, and the vote by which clients choose it.

    Each client reports the gain of training down to each place in the same time (`fl_elastic.training.cut_worth`);
    the place with its largest gain is its vote. The cut is the median of the votes in the order of the model (of
    two medians, the one nearer to the loss), provided that most clients gain there. So a few false votes cannot
    move it beyond the places that other clients vote for. Once chosen, the cut stays, because a move would make
    every client compute its features anew. Until then, clients vote every ``solve_every`` rounds.

    Parameters
    ----------
    config : RoundConfig
        Its ``cut`` is none, a fixed group, or chosen by vote ("moving").

    Attributes
    ----------
    group : str
        The deepest group that is trained; empty for no cut.
    """

    def __init__(self, config: RoundConfig) -> None:
        self.group = config.cut_group
        self._chosen_here = config.cut == "moving"
        self._every = config.solve_every or _EVERY

    def due(self, server_round: int) -> bool:
        """Return whether clients vote before this round.

        Until there is a cut, they vote before round 1 and then every ``solve_every`` rounds; with 0, every 5.
        """
        open_yet = self._chosen_here and not self.group
        return open_yet and (server_round - 1) % self._every == 0

    def decide(self, shares: Sequence[Mapping[str, float]]) -> bool:
        """Put the cut at the median of the votes; return False if nobody votes or most clients gain nothing there.

        Parameters
        ----------
        shares : sequence of mapping of str to float
            For each client that answered: the gain at each place, nearest to the loss first, as shares of their
            sum.
        """
        votes = [max(sorted(share), key=share.__getitem__) for share in shares if share]
        if not votes:
            _LOG.warning("no client reported the gain of any cut: there is no cut")
            return False
        votes.sort(key=lambda name: (_depth(name, shares), name))
        best = votes[(len(votes) - 1) // 2]
        if 2 * sum(share.get(best, 0.0) > 0 for share in shares) <= len(shares):
            return False
        _LOG.info("the fleet's cut is at %s", best)
        self.group = best
        return True

    def restore(self, group: str) -> None:
        """Restore the group of a stored state, if the server chooses it."""
        if self._chosen_here:
            self.group = group


def voters(nodes: int) -> int:
    """Return how many of the fastest clients vote on the cut.

    Even if a fifth of all clients falsely claim to be fast, they are no majority of the voters.

    >>> [voters(nodes) for nodes in (1, 4, 5, 10, 30)]
    [3, 3, 3, 5, 13]
    """
    return max(FEWEST, int(_ASKED_SHARE * nodes), 2 * may_lie(nodes) + 1)


def _depth(name: str, shares: Sequence[Mapping[str, float]]) -> float:
    """Return the distance of a place from the loss by the median of the clients; infinite if few name it."""
    places = [[*share].index(name) if name in share else inf for share in shares]
    return median_high(places)


class FrozenConsensus:
    """Determines from a round's replies which parameters may be trained, as the server has no graph of the model.

    A list of parameters counts if more than half of the clients send it, so that a single client changes nothing.
    Without such a majority every parameter may be trained.

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
        """Count a client's report: the indices of the parameters that may be trained, as JSON."""
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
        """Return ``weights`` with the value in ``before`` for every tensor that may not be trained.

        Clients list parameters only, so buffers, such as running statistics, are always those of ``before``.
        """
        may_train = self.may_train()
        return {
            name: array if name in may_train else before[name] for name, array in weights.items()
        }

    def may_train(self) -> frozenset[str]:
        """Return the names of the parameters that may be trained."""
        ((said, votes),) = self._said.most_common(1) or [(frozenset[int](), 0)]
        names = self._manifest.names
        if 2 * votes <= self._clients:
            if self._clients:
                _LOG.warning("clients do not agree on which parameters lie above the fleet's cut")
            return frozenset(names)
        return frozenset(names[index] for index in said)
