"""The input of the multiple-choice solver: the options of each group with their worth and costs, and the limits.

A group may be frozen, or trained in one of several modes (all of it, its bias alone, some of its channels), each
with its own worth, seconds, memory and uplink. Option 0 is "frozen".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_elastic.errors import BudgetError

COSTS = ("seconds", "memory", "uplink")
# Relative slack against rounding when sums are compared with a limit.
_EPSILON = 1e-9

_Floats = NDArray[np.float64]
_TABLES = ("value", *COSTS)
_SENSELESS: tuple[tuple[tuple[str, ...], Callable[[_Floats], Any], str], ...] = (
    (_TABLES, np.isnan, "is NaN"),
    (("value",), np.isinf, "is infinite"),
    (("seconds",), np.isneginf, "is minus infinity"),
    (("memory", "uplink"), lambda each: each < 0, "is negative"),
)


@dataclass(frozen=True)
class Totals:
    """Value, seconds, memory bytes and uplink bytes of one selection."""

    value: float
    seconds: float
    memory: float
    uplink: float


@dataclass(frozen=True)
class ChoiceLimits:
    """Upper limits on a selection's seconds, memory bytes and uplink bytes.

    Raises
    ------
    BudgetError
        If a limit is NaN.
    """

    seconds: float = math.inf
    memory: float = math.inf
    uplink: float = math.inf

    def __post_init__(self) -> None:
        for name in COSTS:
            if math.isnan(getattr(self, name)):
                raise BudgetError(f"the limit of {name} is NaN; give a number or infinity")

    def admit(self, totals: Totals) -> bool:
        """Return whether all totals are within the limits, up to rounding (1e-9 of the limit)."""
        return all(getattr(totals, name) <= self.with_slack(name) for name in COSTS)

    def with_slack(self, name: str) -> float:
        """Return the limit of the named cost with the slack against rounding."""
        limit = float(getattr(self, name))
        return limit + _EPSILON * abs(limit) if math.isfinite(limit) else limit


@dataclass(frozen=True, eq=False)
class Choices:
    """N tensor groups in backward order with K options each.

    Attributes
    ----------
    value, seconds, memory, uplink : array of float, shape (N, K)
        Worth and own costs of each option. Option 0 is "frozen" and all zero. Values and seconds may be negative,
        bytes not; an option with an infinite cost is never chosen.
    available : array of bool, shape (N, K)
        Options that may be chosen; option 0 always may, except for forced groups.
    path_seconds, path_memory : array of float, shape (N,)
        Path cost from the previous group to this one, charged for every group down to the deepest trained one.
    forced : tuple of int
        Groups that must not be frozen.

    Raises
    ------
    BudgetError
        If shapes differ, an available option has a NaN or a negative size, or a forced group does not exist.
    """

    value: _Floats
    seconds: _Floats
    memory: _Floats
    uplink: _Floats
    available: NDArray[np.bool_]
    path_seconds: _Floats
    path_memory: _Floats
    forced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        shape = np.shape(self.value)
        if len(shape) != 2 or shape[1] < 1:
            raise BudgetError(f"value has shape {shape}; it must be (groups, options)")
        for name in (*_TABLES, "path_seconds", "path_memory"):
            given = np.asarray(getattr(self, name), dtype=np.float64)
            if name not in _TABLES and np.isnan(given).any():
                raise BudgetError(f"{name} must not be NaN")
            _require_shape(name, given.shape, shape if name in _TABLES else shape[:1])
            object.__setattr__(self, name, given)
        object.__setattr__(self, "available", np.asarray(self.available, dtype=bool))
        _require_shape("available", self.available.shape, shape)
        object.__setattr__(self, "forced", tuple(int(group) for group in self.forced))
        if any(not 0 <= group < shape[0] for group in self.forced):
            raise BudgetError(f"forced groups {list(self.forced)} are outside 0 to {shape[0] - 1}")
        for name in _TABLES:
            if getattr(self, name)[:, 0].any():
                raise BudgetError(f"{name} of option 0 (frozen) must be zero")
        for names, is_wrong, what in _SENSELESS:
            for name in names:
                if is_wrong(getattr(self, name)[self.available]).any():
                    raise BudgetError(f"{name} of an available option {what}")

    def totals(self, options: Sequence[int] | ArrayLike) -> Totals:
        """Return the exact value and costs of one option per group, with the path to the deepest trained one.

        Parameters
        ----------
        options : array-like of int, shape (N,)
            Index of the option of every group.

        Examples
        --------
        >>> one = np.array([[0.0, 1.0], [0.0, 4.0]])
        >>> choices = Choices(one, one, one, one, one >= 0, np.array([1.0, 2.0]), np.zeros(2))
        >>> choices.totals([0, 1])
        Totals(value=4.0, seconds=7.0, memory=4.0, uplink=4.0)
        """
        chosen = np.asarray(options, dtype=np.intp)
        _require_shape("options", chosen.shape, self.path_seconds.shape)
        trained = np.flatnonzero(chosen)
        if not len(trained):
            return Totals(0.0, 0.0, 0.0, 0.0)
        own, end = (trained, chosen[trained]), int(trained[-1]) + 1
        seconds = self.seconds[own].sum() + self.path_seconds[:end].sum()
        memory = self.memory[own].sum() + self.path_memory[:end].sum()
        value, uplink = self.value[own].sum(), self.uplink[own].sum()
        return Totals(float(value), float(seconds), float(memory), float(uplink))


def _require_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise BudgetError(f"{name} has shape {shape}; it must be {expected}")
