"""The fleet's cut, below which nobody trains; the server moves it to where training gains most."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median_high
from typing import Any

from numpy.typing import NDArray

from fl_elastic.flower.backoff import Backoff
from fl_elastic.flower.round_config import RoundConfig
from fl_elastic.update import Manifest

__all__ = ["FleetCut", "FrozenConsensus", "voters"]

_LOG = logging.getLogger("fl_elastic")
# A move makes every client compute its features anew, and a place's worth is measured on few batches. Moves with a
# promised gain of a tenth ended lower than keeping the cut.
_WORTH_MOVING = 1.5
_LONGEST_PAUSE = 8
_EVERY = 5
# Share and least number of the fastest clients that are asked; of all clients one in this many may lie.
_ASKED_SHARE, _FEWEST, _LIARS = 1 / 3, 3, 5
_LONGEST_INDEX = 8


@dataclass(frozen=True)
class CutState:
    """State of a `FleetCut`: its group, and when clients are asked again."""

    group: str
    stays: Backoff


class FleetCut:
    """Where the cut lies, and when clients are asked where it should lie.

    Each client says what training down to each place would gain in the same time (`fl_elastic.training.cut_worth`),
    and has one vote, for the place with the largest gain. The median of the voted places, in the order of the
    model, decides; of two medians the one nearer to the loss is taken, and most clients have to gain by the move.
    So a few liars do not move the cut beyond what others vote for. An existing cut only moves deeper: the gain of a
    short step says little about what a whole run would lose above the cut, and moving up again spoiled runs. While
    the cut stays, clients are asked more and more rarely.

    Parameters
    ----------
    config : RoundConfig
        Says whether there is a cut, and whether it moves.

    Attributes
    ----------
    group : str
        The deepest group that is trained; empty for no cut.
    """

    def __init__(self, config: RoundConfig) -> None:
        self.group = config.cut_group
        self._moves = config.cut == "moving"
        self._every = config.solve_every or _EVERY
        self._stays = Backoff(_LONGEST_PAUSE)

    def due(self, server_round: int) -> bool:
        """Return whether clients are asked before this round: the first one, or one after a head was solved for."""
        return self._may_move_before(server_round) and self._stays.is_due

    def passed(self, server_round: int) -> None:
        """Note a round before which clients were not asked."""
        if self._may_move_before(server_round):
            self._stays.passed()

    def _may_move_before(self, server_round: int) -> bool:
        return self._moves and (server_round - 1) % self._every == 0

    def decide(self, shares: Sequence[Mapping[str, float]]) -> bool:
        """Move the cut to the place of most worth, not above the present one; return whether it moved.

        Parameters
        ----------
        shares : sequence of mapping of str to float
            For each client that answered: worth of each place, nearest to the loss first, as shares of their sum.
        """
        self._stays.failed()
        names = sorted({name for each in shares for name in each})
        if not names:
            _LOG.warning("no client said what cuts are worth: the cut stays at %r", self.group)
            return False
        depth = {name: (_depth(name, shares), name) for name in {*names, self.group}}
        if self.group:
            names = [name for name in names if depth[name][0] >= depth[self.group][0]]
        votes = [
            max((name for name in names if name in each), key=each.__getitem__, default="")
            for each in shares
        ]
        votes = sorted((vote for vote in votes if vote), key=depth.__getitem__)
        best = votes[(len(votes) - 1) // 2] if votes else self.group
        gains = sum(
            each.get(best, 0.0) > _WORTH_MOVING * each.get(self.group, 0.0) for each in shares
        )
        if best == self.group or 2 * gains <= len(shares):
            return False
        _LOG.info("the fleet's cut moves from %s to %s", self.group or "nowhere", best)
        self.group = best
        self._stays.reset()
        return True

    def to_state(self) -> CutState:
        """Return the state to be stored."""
        return CutState(self.group, replace(self._stays))

    def restore(self, state: CutState) -> None:
        """Restore what `to_state` returned, if the cut moves."""
        if self._moves:
            self.group, self._stays = state.group, replace(state.stays)


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
        """Return the weights with what nobody may train put back; norms there keep their statistics."""
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
