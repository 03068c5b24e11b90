"""Which clients' sums are trusted: sizes of features, and who judges whom."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fl_elastic.closed_form.folds import Fold
from fl_elastic.closed_form.head import best_ridge
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.ridge import RidgeSystem
from fl_elastic.closed_form.trusted_sums import harmful, sizes_of_features


def added_up(x: NDArray[np.float64]) -> HeadSums:
    """Sums of examples that came 16 at a time; what is rounded depends on their number."""
    rows = np.hstack([x, np.ones((len(x), 1))])
    products = np.zeros((rows.shape[1],) * 2)
    for start in range(0, len(x), 16):
        products += rows[start : start + 16].T @ rows[start : start + 16]
    return HeadSums("w", products, products[:, :2], np.ones(2), True)


def test_constant_features_say_nothing_about_a_client_however_many_examples_it_has() -> None:
    rng = np.random.default_rng(0)
    constant = rng.uniform(0.1, 50, 60)
    given = [rng.normal(size=(count, 12)) for count in (50, 60, 70, 5000, 80, 20_000)]
    expected = sizes_of_features([added_up(x) for x in given])
    beside = [np.hstack([x, np.tile(constant, (len(x), 1))]) for x in given]
    found = sizes_of_features([added_up(x) for x in beside])
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_who_alone_brings_a_class_is_not_judged_by_those_who_know_one(share: float) -> None:
    found = []
    for client in range(5):
        rng = np.random.default_rng(client)
        rare = (np.arange(60) < 60 * share) & (client == 0)
        features = rng.normal(size=(60, 8)) + 2.0 * rare[:, None]
        order = rng.permutation(60)
        folds = [
            Fold.of(features[each], np.eye(2)[rare[each].astype(int)])
            for each in np.split(order, 5)
        ]
        found.append(HeadSums.of_folds("w", folds, 8, 2, True))
    assert harmful(best_ridge(RidgeSystem.of(found, True))[0]) == []
