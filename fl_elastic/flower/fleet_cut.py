"""The fleet's cut: the group below which no client trains; the server puts it where training gains most."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import inf
from statistics import median_high

from fl_elastic.flower.round_config import RoundConfig

_LOG = logging.getLogger("fl_elastic")
_EVERY = 5
# Share and least number of the fastest clients that are asked; of all clients one in this many may lie.
_ASKED_SHARE, _FEWEST, _LIARS = 1 / 3, 3, 5


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
        votes = [max(sorted(each), key=each.__getitem__) for each in shares if each]
        if not votes:
            _LOG.warning("no client said what cuts are worth: there is no cut")
            return False
        votes.sort(key=lambda name: (_depth(name, shares), name))
        best = votes[(len(votes) - 1) // 2]
        if 2 * sum(each.get(best, 0.0) > 0 for each in shares) <= len(shares):
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
    return max(_FEWEST, int(_ASKED_SHARE * nodes), 2 * -(-nodes // _LIARS) + 1)


def _depth(name: str, shares: Sequence[Mapping[str, float]]) -> float:
    """Return the distance of a place from the loss by the median of the clients; infinite if few name it."""
    places = [[*each].index(name) if name in each else inf for each in shares]
    return median_high(places)
