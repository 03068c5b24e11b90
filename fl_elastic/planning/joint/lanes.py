"""The joint choice cut into lanes: one multiple-choice knapsack per depth.

Once the deepest trained group is fixed, its path is a constant and every other cost belongs to one group's option.
All arrays of costs here are in units of their limit, and costs without a limit are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fl_elastic.planning.joint.choices import COSTS, Choices, Limits

__all__ = ["Lanes", "Problem", "fixed", "lanes_of", "problem_of", "tightened"]

# A limit far below the largest cost is no unit for it.
_LEAST_UNIT = 1e-9

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]
_Ints = NDArray[np.intp]


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


@dataclass(frozen=True, eq=False)
class Lanes:
    """One knapsack per row: choose one allowed option of every group, costs within the room.

    Costs are shifted so that the cheapest allowed option of every group costs nothing, and scaled so that the room
    is 1; groups deeper than the lane's depth have option 0 alone.

    Attributes
    ----------
    depth : array of int, shape (L,)
    value : array, shape (L, N, K)
        Minus infinity where an option is not allowed.
    cost : array, shape (L, N, K, D)
    allowed : array of bool, shape (L, N, K)
    base : array, shape (L,)
    room : array, shape (L, D)
        The room before it was scaled, in units of the limits.
    """

    depth: _Ints
    value: _Floats
    cost: _Floats
    allowed: _Bools
    base: _Floats
    room: _Floats

    def __len__(self) -> int:
        return len(self.depth)

    def at(self, rows: _Ints) -> Lanes:
        """Return some of the lanes."""
        return Lanes(
            depth=self.depth[rows],
            value=self.value[rows],
            cost=self.cost[rows],
            allowed=self.allowed[rows],
            base=self.base[rows],
            room=self.room[rows],
        )


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


def lanes_of(problem: Problem, depths: _Ints) -> Lanes:
    """Return the knapsacks of some depths, without those that cannot be satisfied.

    An option that does not fit beside the cheapest options of all other groups is struck out.
    """
    groups = np.arange(len(problem.base))
    inner = groups[None, :] < depths[:, None]
    last = groups[None, :] == depths[:, None]
    outside = groups[None, :] > depths[:, None]
    allowed = inner[..., None] & problem.inner_allowed | last[..., None] & problem.last_allowed
    allowed[..., 0] |= outside
    cost = np.where(inner[..., None, None], problem.inner_cost, 0.0)
    rows = np.arange(len(depths))
    cost[rows, depths] = problem.last_cost[depths]
    value = np.where(inner[..., None], problem.inner_value, 0.0)
    value[rows, depths] = problem.last_value[depths]
    lanes = Lanes(depths, value, cost, allowed, problem.base[depths], problem.room[depths])
    return tightened(lanes)


def tightened(lanes: Lanes) -> Lanes:
    """Return lanes whose costs and options have been changed, shifted and scaled again.

    ``room`` is what the costs are compared with; lanes that cannot be satisfied are left out.
    """
    allowed, cost, room = lanes.allowed.copy(), lanes.cost, lanes.room
    while True:
        cheapest = np.where(allowed[..., None], cost, np.inf).min(axis=2, keepdims=True)
        cheapest = np.where(np.isfinite(cheapest), cheapest, 0.0)
        cost = np.where(allowed[..., None], cost - cheapest, 0.0)
        room = room - cheapest.sum(axis=(1, 2))
        too_dear = allowed & (cost > room[:, None, None, :]).any(axis=-1)
        if not too_dear.any():
            break
        allowed &= ~too_dear
    possible = (room >= 0).all(axis=-1) & allowed.any(axis=-1).all(axis=-1)
    cost /= np.where(room > 0, room, 1.0)[:, None, None, :]
    value = np.where(allowed, lanes.value, -np.inf)
    return replace(lanes, value=value, cost=cost, allowed=allowed, room=room).at(
        np.flatnonzero(possible)
    )


def fixed(lanes: Lanes, rows: _Ints, options: _Ints) -> Lanes:
    """Return lanes with some groups fixed.

    Parameters
    ----------
    rows : array of int, shape (M,)
        The lane that each new one starts from.
    options : array of int, shape (M, N)
        Option of each group, or -1 where it stays open.
    """
    lanes = lanes.at(rows)
    open_groups = (options < 0)[..., None]
    allowed = lanes.allowed & (
        open_groups | (np.arange(lanes.allowed.shape[-1]) == options[..., None])
    )
    return tightened(replace(lanes, allowed=allowed, room=np.ones_like(lanes.room)))
