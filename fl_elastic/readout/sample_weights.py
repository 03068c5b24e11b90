"""Weights of clients' samples when places are ranked, so that no client counts as much as many others together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fl_elastic.closed_form.trusted_sums import sizes_about_the_middle
from fl_elastic.readout.best_places import Sample

LARGEST_BELIEVED = 100.0
"""Factor of the median client's mean squares above which a client's numbers are not used."""

# Number of clients from which on it is known what is usual; and the largest weight of an example in usual ones.
_FEWEST, _LARGER = 3, 3.0


def sizes_of_samples(samples: Sequence[Sample]) -> NDArray[np.float64]:
    """Return for each client the largest ratio of its mean square to that of the median client.

    There is a ratio for the features of each place that all clients have, and one for the targets. Numbers are
    centred at the median of the clients' means, and each feature counts equally.

    Examples
    --------
    >>> from fl_elastic.readout.place import Place
    >>> x = np.array([[1.0, 2.0], [3.0, 1.0], [2.0, 3.0]])
    >>> found = [Sample.of({Place("a", "flat"): k * x}, x, np.arange(3)) for k in (1, 1, 9)]
    >>> np.round(sizes_of_samples(found)).tolist()
    [1.0, 1.0, 465.0]
    """
    if len(samples) < _FEWEST:
        return np.ones(len(samples))
    common = [place for place in samples[0].rows if all(place in each.rows for each in samples)]
    found = [_sizes(samples, [each.rows[place] for each in samples]) for place in common]
    found.append(_sizes(samples, [each.targets for each in samples]))
    return np.asarray(np.max(found, axis=0))


def weighed(samples: Sequence[Sample], sizes: NDArray[np.float64]) -> list[Sample]:
    """Return the samples, with smaller weights for those whose relative size exceeds `_LARGER`."""
    return [
        sample if size <= _LARGER else sample.times(_LARGER / size)
        for sample, size in zip(samples, sizes, strict=True)
    ]


def _sizes(samples: Sequence[Sample], rows: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
    counts = np.array([each.num_examples for each in samples])[:, None]
    means = np.array([each.constant @ own for each, own in zip(samples, rows, strict=True)])
    squares = np.array([np.einsum("ij,ij->j", own, own) for own in rows]) / counts
    found = sizes_about_the_middle(means / counts, squares)
    median = float(np.median(found))
    return np.asarray(found / median) if median > 0 else np.ones(len(samples))
