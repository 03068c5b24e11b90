"""The fleet's cut, below which no client trains and which the server chooses; and what clients say is frozen."""

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
# Rounds between two decisions about a moving cut if the head is not solved for again and again.
_EVERY = 5
# Share and least number of the fastest clients that are asked; of all clients one in this many may lie.
_ASKED_SHARE = 1 / 3
# Digits and separator of an index in a client's statement, at most.
_LONGEST_INDEX = 8


class FleetCut:
    """Where the cut lies, and when clients are asked where it should lie.

    Each client says what training down to each place would gain in the same time (`fl_elastic.training.cut_worth`),
    and has one vote, for the place with the largest gain. The median of the voted places, in the order of the
    model, decides; of two medians the one nearer to the loss is taken, and most clients have to gain by the cut.
    So a few liars do not put the cut beyond what others vote for. A cut stays where it is: a move would make every
    client compute its features anew. While there is none, clients are asked again every ``solve_every`` rounds.

    Parameters
    ----------
    config : RoundConfig
        Says whether there is a cut, and whether the server chooses it.

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
        """Return whether clients are asked before this round.

        Until there is a cut, they are asked before round 1 and then every ``solve_every`` rounds; with 0, every 5.
        """
        open_yet = self._chosen_here and not self.group
        return open_yet and (server_round - 1) % self._every == 0

    def decide(self, shares: Sequence[Mapping[str, float]]) -> bool:
        """Put the cut where most is gained by the median of the votes; return whether a place gains anything.

        Parameters
        ----------
        shares : sequence of mapping of str to float
            For each client that answered: worth of each place, nearest to the loss first, as shares of their sum.
        """
        votes = [max(sorted(share), key=share.__getitem__) for share in shares if share]
        if not votes:
            _LOG.warning("no client said what cuts are worth: there is no cut")
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
    """Return how many of the fastest clients are asked what cuts are worth.

    A fifth of all clients may falsely claim to be fast: they are then no majority of those asked.

    >>> [voters(nodes) for nodes in (1, 4, 5, 10, 30)]
    [3, 3, 3, 5, 13]
    """
    return max(FEWEST, int(_ASKED_SHARE * nodes), 2 * may_lie(nodes) + 1)


def _depth(name: str, shares: Sequence[Mapping[str, float]]) -> float:
    """Return the distance of a place from the loss by the median of the clients; infinite if few name it."""
    places = [[*share].index(name) if name in share else inf for share in shares]
    return median_high(places)


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
        return {
            name: array if name in may_train else before[name] for name, array in weights.items()
        }

    def may_train(self) -> frozenset[str]:
        """Return the names of the parameters that may be trained."""
        ((said, votes),) = self._said.most_common(1) or [(frozenset[int](), 0)]
        names = self._manifest.names
        if 2 * votes <= self._clients:
            if self._clients:
                _LOG.warning("clients do not agree on what lies above the fleet's cut")
            return frozenset(names)
        return frozenset(names[index] for index in said)
