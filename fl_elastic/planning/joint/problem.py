"""The joint choice as tables: what every option costs above the deepest trained group, and as the deepest itself.

All arrays of costs are in units of their limit, and costs without a limit are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fl_elastic.planning.joint.choices import COSTS, Choices, Limits

__all__ = ["Problem", "problem_of"]

# A limit far below the largest cost is no unit for it.
_LEAST_UNIT = 1e-9
# Room below zero by rounding alone still counts as room.
_ROUNDING = 1e-12

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Problem:
    """Values and costs of every option, as a group above the deepest one (inner) or as the deepest (last).

    Attributes
    ----------
    inner_value, last_value : array, shape (N, K)
    inner_cost, last_cost : array, shape (N, K, D)
        In units of the D limits that are finite.
    inner_allowed, last_allowed : array of bool, shape (N, K)
    base : array, shape (N,)
        Value that comes with reaching a depth.
    room : array, shape (N, D)
        What each limit leaves when the path to a depth is paid; minus infinity for depths out of reach.
    """

    inner_value: _Floats
    last_value: _Floats
    inner_cost: _Floats
    last_cost: _Floats
    inner_allowed: _Bools
    last_allowed: _Bools
    base: _Floats
    room: _Floats

    @property
    def reachable(self) -> _Bools:
        """Depths that can be had at all, shape (N,)."""
        return np.asarray(np.isfinite(self.room).all(axis=-1))

    @property
    def needed(self) -> _Floats:
        """The least of each cost that the groups above each one take, shape (N, D)."""
        cheapest = np.where(self.inner_allowed[..., None], self.inner_cost, np.inf).min(axis=1)
        nothing = np.zeros((1, cheapest.shape[1]))
        return np.concatenate([nothing, np.cumsum(cheapest, axis=0)[:-1]])

    def within(self, depths: _Bools) -> Problem:
        """Return the problem without options that fit above none of these depths, beside the cheapest others."""
        above = np.where(self.inner_allowed[..., None], self.inner_cost, np.inf)
        least = above.min(axis=1)
        ends = np.where(self.last_allowed[..., None], self.last_cost, np.inf).min(axis=1)
        slack = np.full_like(self.room, -np.inf)
        slack[depths] = self.room[depths] - self.needed[depths] - ends[depths]
        deeper = np.maximum.accumulate(slack[::-1])[::-1]
        most = np.concatenate([deeper[1:], np.full((1, slack.shape[1]), -np.inf)])
        fits = (above - least[:, None] <= most[:, None] + _ROUNDING).all(axis=-1)
        return replace(self, inner_allowed=self.inner_allowed & fits)


def problem_of(choices: Choices, limits: Limits, *, least: str | None = None) -> Problem:
    """Return the tables of a choice, without regard to damage.

    Parameters
    ----------
    choices, limits
        What is chosen from, and within what.
    least : str, optional
        Name of a cost; if given, the value to maximise is minus this cost.
    """
    open_to = choices.available.copy()
    for name in COSTS:
        open_to &= np.isfinite(np.where(open_to, getattr(choices, name), 0.0))
    inner, last = open_to.copy(), open_to.copy()
    inner[:, 0], last[:, 0] = True, False
    inner[list(choices.forced), 0] = False
    tables = {name: _tables(choices, name, open_to) for name in COSTS}
    reachable = np.isfinite(tables["seconds"][2]) & np.isfinite(tables["memory"][2])
    reachable[: max(choices.forced, default=0)] = False
    bounded = [name for name in COSTS if limits.with_slack(name) < np.inf]
    nothing = np.zeros_like(choices.value)
    # Without any limit, one cost that nobody has keeps the shapes regular.
    inner_costs, last_costs, rooms = [nothing], [nothing], [np.ones(len(nothing))]
    for name in bounded:
        own, above, path = tables[name]
        limit = limits.with_slack(name)
        largest = float(np.abs(own).max(initial=0.0))
        unit = max(abs(limit) if limit > -np.inf else 0.0, _LEAST_UNIT * largest) or 1.0
        inner_costs.append(above / unit)
        last_costs.append(own / unit)
        rooms.append((limit - path) / unit)
    first = 1 if bounded else 0
    inner_cost, last_cost = np.stack(inner_costs[first:], -1), np.stack(last_costs[first:], -1)
    room = np.where(reachable[:, None], np.stack(rooms[first:], -1), -np.inf)
    fits = np.asarray((room >= _least(inner_cost, inner, last_cost, last)).all(axis=-1))
    inner_value = last_value = np.where(open_to, choices.value, 0.0)
    base = np.zeros(len(nothing))
    if least is not None:
        last_value, inner_value, base = (-table for table in tables[least])
    return Problem(
        inner_value=inner_value,
        last_value=last_value,
        inner_cost=inner_cost,
        last_cost=last_cost,
        inner_allowed=inner,
        last_allowed=last,
        base=np.where(reachable, base, 0.0),
        room=np.where(fits[:, None], room, -np.inf),
    )


def _tables(choices: Choices, name: str, open_to: _Bools) -> tuple[_Floats, _Floats, _Floats]:
    """Return one cost of all options as the last group and as an inner one, and of the paths."""
    own = np.where(open_to, getattr(choices, name), 0.0)
    if name == "uplink":
        return own, own, np.zeros(len(own))
    path = np.cumsum(getattr(choices, f"path_{name}"))
    if name == "memory":
        return own, own, path
    return own, own + np.where(open_to, choices.path_change, 0.0), path


def _least(inner_cost: _Floats, inner: _Bools, last_cost: _Floats, last: _Bools) -> _Floats:
    """Return the least of each cost with which each depth can be had, shape (N, D)."""
    above = np.where(inner[..., None], inner_cost, np.inf).min(axis=1)
    least: _Floats = np.where(last[..., None], last_cost, np.inf).min(axis=1)
    least[1:] += np.cumsum(above, axis=0)[:-1]
    return least
