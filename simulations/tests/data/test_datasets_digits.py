"""The digits are scikit-learn's, read without importing it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from fl_elastic_simulations.data.datasets import load_dataset


def test_they_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    bunch, ours = load_digits(), load_dataset("digits", None)
    expected = ((bunch.images[:, None] - 4.88) / 6.02).astype(np.float32)
    found = np.concatenate([ours.train_x, ours.test_x])
    order, other = (
        np.lexsort(expected.reshape(len(expected), -1).T),
        np.lexsort(found.reshape(len(found), -1).T),
    )
    np.testing.assert_array_equal(expected[order], found[other])
    labels = np.concatenate([ours.train_y, ours.test_y])
    np.testing.assert_array_equal(np.bincount(bunch.target), np.bincount(labels))


def test_scikit_learn_is_not_imported_for_them() -> None:
    script = (
        "import sys; from fl_elastic_simulations.data.datasets import load_dataset; "
        "load_dataset('digits', None); assert 'sklearn' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
