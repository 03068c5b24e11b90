"""Options that lose a share of the value of all deeper groups.

Along the backward order, ``value = v[0] + (1 - damage[0]) * (v[1] + (1 - damage[1]) * (...))``: seen from the
deepest group towards the loss, a choice is as good as its value so far, whatever follows. One sweep in that order
answers all depths. Beside it, damage is charged at what it costs around the best known choice, which leaves a
problem without damage.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fl_elastic.planning.joint.choices import Choices, Limits
from fl_elastic.planning.joint.lanes import Problem, lanes_of, problem_of
from fl_elastic.planning.joint.prices import best_prices, unit_prices
from fl_elastic.planning.joint.solve import Best, judge_of, solve

__all__ = ["improve_with_damage", "without_damage"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.intp]

_REPRICINGS = 4
# Entries of all tables of one sweep; it decides how many states are kept.
_WORK = 400_000
_LEAST_STATES, _MOST_STATES = 50, 4000
_ANSWERS = 8
# Room below zero by rounding alone still counts as room.
_ROUNDING = 1e-12


def without_damage(choices: Choices) -> Choices:
    """Return the choices without their damaging options."""
    if not choices.damaging.any():
        return choices
    harmless = choices.available & ~choices.damaging
    return replace(choices, available=harmless, damage=np.zeros_like(choices.damage))


def improve_with_damage(choices: Choices, limits: Limits, best: Best) -> None:
    """Offer choices with damaging options, starting from the best that is known."""
    problem = problem_of(choices, limits)
    for _ in range(_REPRICINGS):
        linear = _around(choices, best.options)
        found = Best(judge_of(linear, limits))
        solve(problem_of(linear, limits), found)
        if found.options is None or not best.offer(found.options):
            break
    for options in _sweep(choices, problem, best.options):
        best.offer(options)


def _keep_and_deeper(choices: Choices, options: _Ints) -> tuple[_Floats, _Floats]:
    """Return the share of each group's value that is kept, and the value below each group."""
    groups = np.arange(len(options))
    share = 1.0 - choices.damage[groups, options]
    keep = np.concatenate([[1.0], np.cumprod(share)[:-1]])
    deeper = np.zeros(len(options) + 1)
    for group in range(len(options) - 1, 0, -1):
        own = choices.value[group, options[group]]
        deeper[group - 1] = own + share[group] * deeper[group]
    return keep, deeper[:-1]


def _around(choices: Choices, options: _Ints | None) -> Choices:
    """Return choices whose values are what one changed option adds to the given ones."""
    if options is None:
        return replace(choices, damage=np.zeros_like(choices.damage))
    keep, deeper = _keep_and_deeper(choices, options)
    value = keep[:, None] * (choices.value - choices.damage * deeper[:, None])
    return replace(choices, value=value, damage=np.zeros_like(choices.damage))


def _sweep(choices: Choices, problem: Problem, known: _Ints | None) -> list[_Ints]:
    """Decide options from the deepest group towards the loss; return the best complete choices."""
    groups, options, _ = problem.inner_cost.shape
    cap = int(np.clip(_WORK / (groups * options), _LEAST_STATES, _MOST_STATES))
    prices, keep = np.zeros(problem.room.shape[1]), np.ones(groups)
    reachable = problem.reachable
    if known is not None and known.any():
        keep, _ = _keep_and_deeper(choices, known)
        lanes = lanes_of(problem, np.flatnonzero(known)[-1:])
        if len(lanes):
            prices = unit_prices(lanes, best_prices(lanes))[0]
    cheapest = np.where(problem.inner_allowed[..., None], problem.inner_cost, np.inf).min(axis=1)
    needed = np.concatenate([np.zeros((1, len(prices))), np.cumsum(cheapest, axis=0)])
    value, room = np.zeros(0), np.zeros((0, len(prices)))
    history: list[tuple[int, _Ints, _Ints]] = []
    for group in range(int(np.flatnonzero(reachable).max(initial=-1)), -1, -1):
        inner = np.flatnonzero(problem.inner_allowed[group])
        share = 1.0 - choices.damage[group, inner]
        values = problem.inner_value[group, inner] + share * value[:, None]
        rooms = room[:, None] - problem.inner_cost[group, inner]
        parent = np.repeat(np.arange(len(value)), len(inner))
        option = np.tile(inner, len(value))
        values, rooms = values.ravel(), rooms.reshape(-1, len(prices))
        if reachable[group]:
            last = np.flatnonzero(problem.last_allowed[group])
            values = np.concatenate([values, problem.last_value[group, last]])
            rooms = np.concatenate([rooms, problem.room[group] - problem.last_cost[group, last]])
            parent = np.concatenate([parent, np.full(len(last), -1)])
            option = np.concatenate([option, last])
        fits = np.flatnonzero((rooms >= needed[group] - _ROUNDING).all(axis=-1))
        merit = keep[group] * values[fits] + rooms[fits] @ prices
        chosen = fits[np.argsort(-merit, kind="stable")[:cap]]
        value, room = values[chosen], rooms[chosen]
        history.append((group, parent[chosen], option[chosen]))
    best = np.argsort(-value, kind="stable")[:_ANSWERS].tolist()
    return [_trace(history, state, groups) for state in best]


def _trace(history: list[tuple[int, _Ints, _Ints]], state: int, groups: int) -> _Ints:
    options = np.zeros(groups, dtype=np.intp)
    for group, parent, option in reversed(history):
        options[group] = option[state]
        state = int(parent[state])
        if state < 0:
            break
    return options
