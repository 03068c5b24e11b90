"""Test a global model at equal intervals of simulated time, however long its rounds are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.scenario.sections import TrainingSection

Weights: TypeAlias = Mapping[str, NDArray[Any]]
Test: TypeAlias = Callable[[Weights, int], tuple[float, float]]
"""Returns accuracy and loss of the model after a round."""


@dataclass
class _Standing:
    """The newest model, the costs at the end of its round, and its accuracy and loss once tested."""

    server_round: int
    weights: Weights
    spent: dict[str, float]
    found: tuple[float, float] | None = None


class TimedTests:
    """Records in a cell, at equally spaced times, the quality of the newest model at that time.

    The newest model is the one whose round ended last before that time. Each model is tested at most once, and not
    at all if it is never the newest at such a time.

    Parameters
    ----------
    training : TrainingSection
        Sets the simulated seconds and the number of tests.
    cell : RunResult
        Keeps the time and the results; its first test is that of the untrained model, at time 0.
    test : callable
        Returns accuracy and loss of the model after a round.
    tell : callable
        Called with round, accuracy, loss and time of each test.
    """

    def __init__(
        self,
        training: TrainingSection,
        cell: RunResult,
        test: Test,
        tell: Callable[[int, float, float, float], None],
    ) -> None:
        self._seconds, self._rounds = training.simulated_seconds or 0.0, training.rounds
        count = training.tests or 1
        self._times = [self._seconds * number / count for number in range(1, count + 1)]
        self._cell, self._test, self._tell = cell, test, tell
        self._standing: _Standing | None = None

    def after_round(self, server_round: int, weights: Weights) -> tuple[float, float] | None:
        """Take in the model after a round; return accuracy and loss of the last model tested in this call."""
        now = self._cell.simulated_seconds
        found = None if self._standing is None else self._enter(self._standing, before=now)
        first = self._standing is None
        self._standing = _Standing(server_round, weights, dict(self._cell.spent))
        if first:
            found = self._tested(self._standing)
            self._enter_at(self._standing, found, 0.0)
        if now >= self._seconds or server_round == self._rounds:
            found = self._enter(self._standing, before=float("inf")) or found
        return found

    def _enter(self, standing: _Standing, before: float) -> tuple[float, float] | None:
        """Record the test of the newest model at all remaining test times before ``before``."""
        found = None
        while self._times and self._times[0] < before:
            found = self._tested(standing)
            self._enter_at(standing, found, self._times.pop(0))
        return found

    def _enter_at(self, standing: _Standing, found: tuple[float, float], at: float) -> None:
        spent = {**standing.spent, "simulated_seconds": at}
        since = standing.spent["simulated_seconds"]
        self._cell.evaluated(standing.server_round, *found, spent=spent, since=since)
        self._tell(standing.server_round, *found, at)

    def _tested(self, standing: _Standing) -> tuple[float, float]:
        if standing.found is None:
            standing.found = self._test(standing.weights, standing.server_round)
        return standing.found
