"""The server optimiser that goes further while rounds agree."""

from __future__ import annotations

import numpy as np
import pytest

from fl_elastic.aggregation import SERVER_OPTIMIZERS
from fl_elastic.aggregation.agreement import Agreement

ZERO = {"w": np.zeros(2), "v": np.zeros(3)}


def stepped(optimizer: Agreement, change: list[float], touched: str = "w") -> float:
    """Return how far the tensor went, in units of the change."""
    merged = ZERO | {touched: np.array(change)}
    new = optimizer.step(ZERO, merged, {touched})
    return float(np.linalg.norm(new[touched]) / np.linalg.norm(change))


def test_the_factor_follows_the_cosine_within_its_bounds() -> None:
    optimizer, rng = Agreement(2.0), np.random.default_rng(0)
    factor, last, found = 1.0, np.zeros(2), set()
    for number in range(60):
        # Agreeing rounds first, then noise, then rounds that take each other back.
        change = [np.array([1.0, 0.2]), rng.normal(size=2), np.array([(-1.0) ** number, 0.0])][
            number // 20
        ]
        if number:
            cosine = change @ last / np.linalg.norm(change) / np.linalg.norm(last)
            factor = min(max(factor * np.exp(0.2 * (cosine + 0.25)), 1.0), 1.5)
        assert stepped(optimizer, change.tolist()) == pytest.approx(2.0 * factor)
        last = change
        found.add(round(factor, 3))
    assert {1.0, 1.5} <= found and len(found) > 10


def test_only_tensors_trained_in_both_rounds_are_compared() -> None:
    optimizer = Agreement()
    assert stepped(optimizer, [1.0, 0.0]) == 1.0
    # Another tensor: nothing to compare it with, so nothing changes.
    assert stepped(optimizer, [1.0, 0.0, 0.0], "v") == 1.0
    assert stepped(optimizer, [1.0, 0.0]) == pytest.approx(np.exp(0.25))


def test_a_round_that_changes_nothing_says_nothing() -> None:
    optimizer = Agreement()
    stepped(optimizer, [1.0, 0.0])
    stepped(optimizer, [1.0, 0.0])
    factor = optimizer.factor
    optimizer.step(ZERO, ZERO, {"w"})
    assert optimizer.factor == factor > 1.0
    # The last change was zero: still nothing to compare with.
    assert stepped(optimizer, [-1.0, 0.0]) == pytest.approx(factor)


def test_agreeing_rounds_are_saved() -> None:
    """A quadratic whose clients agree: fewer rounds to the optimum than at the same rate without it."""
    rounds = {}
    for name in ("sgd", "agreement"):
        optimizer, weights = SERVER_OPTIMIZERS.make(name), {"w": np.array([10.0, -10.0])}
        for number in range(200):
            if np.abs(weights["w"]).max() < 1e-2:
                rounds[name] = number
                break
            weights = optimizer.step(weights, {"w": 0.9 * weights["w"]}, {"w"})
    assert rounds["agreement"] < 0.75 * rounds["sgd"]
