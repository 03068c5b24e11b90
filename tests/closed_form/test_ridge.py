"""Ridge regression from sums: what the search for a penalty leaves behind."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from fl_elastic.closed_form.folds import Fold
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.ridge import Ridge, RidgeSystem


@pytest.mark.parametrize("features", [3, 200])
def test_a_regression_that_was_tried_is_freed_at_once(features: int) -> None:
    """It holds matrices of all features, and the collector comes late where there are few objects."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, features)), np.eye(2)[rng.integers(0, 2, 50)]
    folds = [Fold.of(x[part::5], y[part::5]) for part in range(5)]
    sums = HeadSums.of_folds("weight", folds, features, 2, True)
    tried = Ridge(RidgeSystem.of([sums], intercept=True), 0.1)
    assert all(np.isfinite(each.squared_errors()).all() for each in tried.without)
    # Both ways of leaving a part out are used.
    assert {each.half is None for each in tried.without} == {features == 3}
    gone = weakref.ref(tried)
    gc.disable()
    try:
        del tried
        assert gone() is None
    finally:
        gc.enable()
