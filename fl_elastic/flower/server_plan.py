"""One plan for all clients of a round, needed for secure aggregation and for rules that compare whole updates."""

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

    Costs are the clients' claims. Only claims with the same groups as most clients report are used. The slowest
    fifth of these clients (at least one, if there are three or more) is ignored, and has to take fewer steps; the
    slowest of the others determines the plan.

    As on a client that makes its own plan, the worth of a group grows with each round in which it is left out.
    After as many such rounds as a client would allow, all groups are trained, in fewer steps if need be. Otherwise
    a group too expensive for one step of a slow client would never be trained.
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
            Known capabilities of the round's clients.
        importance : mapping of str to float
            The fleet's importance by group name; empty until it has been measured.
        deadline : float, optional
            Seconds of the round.

        Returns
        -------
        tuple of str
            Empty if no client reported its costs: clients then make their own plans.
        """
        known = [(each, each.groups) for each in cohort if each.groups is not None]
        if not known:
            _LOG.warning(
                "no client of the round reported group costs: each client makes its own plan"
            )
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
    """Return the client that the plan has to suit, and its costs."""
    # Ties go to the names that come first in order, so that the order of arrival does not matter.
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
    """Return the time that a client may spend on a round, as a share of its time for a full round."""
    return _allowed(client, deadline) * client.steps / client.full_round_seconds


def _sending(client: Capabilities, costs: GroupCosts) -> NDArray[np.float64]:
    """Return the seconds per step that sending each group takes."""
    if client.bandwidth <= 0:
        return np.zeros(len(costs.names))
    return np.array(costs.sent_bytes) / client.bandwidth / client.steps
