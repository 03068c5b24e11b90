"""A place that takes nearly all features that are allowed is not chosen where smaller ones do better together."""

from __future__ import annotations

import numpy as np

from fl_elastic.readout.best_places import Sample, choose_places
from fl_elastic.readout.place import Place


def test_two_small_places_are_preferred_to_a_large_one_that_is_best_alone() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, 300, 4))
    targets = left @ rng.normal(size=(4, 2)) + right @ rng.normal(size=(4, 2))
    # It knows both, but badly.
    both = np.concatenate([left, right], axis=1) + 0.8 * rng.normal(size=(300, 8))
    rows = {
        Place.parse("large@flat"): both,
        Place.parse("left@flat"): left,
        Place.parse("right@flat"): right,
    }
    sample = Sample.of(rows, targets, np.arange(300))
    found = choose_places(sample, most_features=8)
    assert found.single[0].name == "large@flat"
    assert found.best.name == "left@flat+right@flat"
    assert found.best.error < 0.1 < found.single[0].error
    assert [each.features for each in found.unions] == [4, 8]
