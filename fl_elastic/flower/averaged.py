"""What is tested and returned where a strategy keeps the mean of its global models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from fl_elastic.aggregation import ModelAverage
from fl_elastic.flower.strategy_state import as_record

__all__ = ["EvaluateFn", "averaged", "tested"]

EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]


def averaged(strategy: Strategy, arrays: ArrayRecord) -> ArrayRecord:
    """Return the mean of the strategy's global models; ``arrays``, the newest one, where it keeps none."""
    average = getattr(strategy, "average", None)
    if not isinstance(average, ModelAverage) or not average.rounds:
        return arrays
    return as_record(average.weights())


def tested(strategy: Strategy, evaluate_fn: EvaluateFn | None) -> EvaluateFn | None:
    """Return the server's test of the model, given the mean where the strategy keeps one."""
    if evaluate_fn is None:
        return None
    test = evaluate_fn
    return lambda server_round, arrays: test(server_round, averaged(strategy, arrays))
