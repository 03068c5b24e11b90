"""One plan for all clients of a round, needed for secure sums and for rules over whole updates."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fl_elastic.claims import outer
from fl_elastic.flower.capabilities import Capabilities, GroupCosts
from fl_elastic.planning.knapsack import prefix_knapsack
from fl_elastic.training import SelectionState, TrainerOptions

_LOG = logging.getLogger("fl_elastic")


class ServerPlanner:
    """Chooses the most important groups that a slow client of a round can afford.

    Costs are the clients' claims. They count if they name the set of groups that most clients with costs name. Of
    those clients the slowest fifth, at least one of three or more, does not decide; it takes fewer steps.

    Groups that were left out gain worth from round to round, as on a client that chooses for itself. Once a group
    was left out for as many rounds as such a client would leave it out, all groups are trained, in fewer steps if
    need be. Otherwise a group too expensive for one step of a slow client would never be trained.
    """

    def __init__(self) -> None:
        self._state = SelectionState()
        self._quota = 2 * TrainerOptions().full_update_every

    def choose(
        self,
        cohort: Sequence[Capabilities],
        importance: Mapping[str, float],
        deadline: float | None = None,
    ) -> tuple[str, ...]:
        """Return the names of the groups to train, in backward order.

        Parameters
        ----------
        cohort : sequence of Capabilities
            Capabilities of the round's clients, as far as they are known.
        importance : mapping of str to float
            The fleet's importance by group name; empty until it was measured.
        deadline : float, optional
            Seconds of the round.

        Returns
        -------
        tuple of str
            Empty if no client named its costs: clients then choose for themselves.
        """
        known = [(each, each.groups) for each in cohort if each.groups is not None]
        if not known:
            _LOG.warning("no client of the round said what groups cost: each chooses for itself")
            return ()
        slowest, costs = _slow(known, deadline)
        self._state.fit_to(costs.names)
        self._state.scores = [importance.get(name, 0.0) for name in costs.names]
        worth = self._state.worth(np.array(costs.sent_bytes) + 1.0)
        # The scores belong to the fleet and are not remembered here.
        self._state.scores = []
        found = prefix_knapsack(
            np.array(costs.update_seconds) + _sending(slowest, costs), costs.path_seconds, worth,
            max(_allowed(slowest, deadline) - costs.constant_seconds, 0.0), forced=[costs.head],
        )  # fmt: skip
        mask = found.mask | (max(self._state.left_out) >= self._quota)
        self._state.trained(mask.tolist())
        return tuple(name for name, on in zip(costs.names, mask, strict=True) if on)

    def to_state(self) -> SelectionState:
        """Return the state to be stored."""
        return self._state

    def restore(self, state: SelectionState) -> None:
        """Restore what `to_state` returned."""
        self._state = state


def _slow(
    known: Sequence[tuple[Capabilities, GroupCosts]], deadline: float | None
) -> tuple[Capabilities, GroupCosts]:
    """Return the client whose time decides, and its costs."""
    # Ties go to the names that come first in order, so that it does not matter who answered first.
    counted = Counter(costs.names for _, costs in known)
    names = min(counted, key=lambda each: (-counted[each], each))
    alike = [pair for pair in known if pair[1].names == names]
    alike.sort(key=lambda pair: _share(pair[0], deadline))
    return alike[outer(len(alike))]


def _allowed(client: Capabilities, deadline: float | None) -> float:
    """Return the seconds that one step of a client may take."""
    limits = [client.allowed_step_seconds or np.inf]
    if deadline is not None:
        limits.append(deadline / client.steps)
    return float(min(limits))


def _share(client: Capabilities, deadline: float | None) -> float:
    """Return the share of a whole round that a client can afford."""
    return _allowed(client, deadline) * client.steps / client.full_round_seconds


def _sending(client: Capabilities, costs: GroupCosts) -> NDArray[np.float64]:
    """Return the seconds per step that sending each group takes."""
    if client.bandwidth <= 0:
        return np.zeros(len(costs.names))
    return np.array(costs.sent_bytes) / client.bandwidth / client.steps
