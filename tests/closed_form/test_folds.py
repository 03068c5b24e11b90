"""What a client sends of a fold: rows with the fold's sums, which say nothing beyond them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_elastic.closed_form.folds import Fold

Floats = NDArray[np.float64]


def examples(seed: int, count: int, features: int, dead: int) -> tuple[Floats, Floats]:
    """Features of which the first ``dead`` are constant, as channels that never fire, and three classes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, features)) * 10.0 ** rng.uniform(-2, 2, features) + 5
    x[:, :dead] = 0.5
    return x, np.eye(3)[rng.integers(0, 3, count)]


@pytest.mark.parametrize("dead", [0, 3, 9])
@pytest.mark.parametrize("count", [2, 5, 9, 14, 60])
@pytest.mark.parametrize("seed", range(3))
def test_the_rows_of_a_fold_are_determined_by_its_sums(seed: int, count: int, dead: int) -> None:
    x, y = examples(seed, count, 14, dead)
    fold = Fold.of(x, y)
    mean, goal, rows, targets = fold.centred()
    np.testing.assert_allclose(mean, x.mean(axis=0))
    np.testing.assert_allclose(goal, y.mean(axis=0))
    assert len(rows) <= min(count, 14)
    own, wanted = x - x.mean(axis=0), y - y.mean(axis=0)
    scale = np.sqrt((own**2).sum(axis=0)) + 1e-9
    np.testing.assert_allclose(
        rows.T @ rows / np.outer(scale, scale), own.T @ own / np.outer(scale, scale), atol=1e-9
    )
    np.testing.assert_allclose(
        rows.T @ targets / scale[:, None], own.T @ wanted / scale[:, None], atol=1e-6
    )
    # No row is an example, in whatever direction.
    size = np.linalg.norm(own, axis=1, keepdims=True)
    alike = np.abs(rows @ own.T).T / (size * np.linalg.norm(rows, axis=1) + 1e-12)
    assert count == 2 or np.median(alike.max(axis=1)) < 0.999
    # Other examples with the same sums give the same rows, except for the direction of each.
    turn = np.linalg.qr(np.random.default_rng(99).normal(size=(count, count)))[0]
    other = Fold(turn @ fold.rows, turn @ fold.targets, fold.squares).centred()
    assert other[2].shape == rows.shape
    np.testing.assert_allclose(np.abs(other[2]) / scale, np.abs(rows) / scale, atol=1e-5)


def test_examples_do_not_stand_in_the_rows_where_the_first_features_are_constant() -> None:
    x, y = examples(0, 5, 14, dead=8)
    own = x - x.mean(axis=0)
    rows = Fold.of(x, y).centred()[2]
    assert not any(np.allclose(np.abs(row), np.abs(one)) for row in rows for one in own)
