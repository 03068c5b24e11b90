"""Ridge regression the slow way: least squares over all examples, with rows for the penalty."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def slow_ridge(
    x: Floats, y: NDArray[np.int64], classes: int, penalty: float, counts: Floats | None = None
) -> Floats:
    """On standardised features, each example counting so much: weight, the bias as last row."""
    counts = np.ones(len(x)) if counts is None else counts
    mean = np.average(x, axis=0, weights=counts)
    scale = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=counts))
    root = np.sqrt(counts)[:, None]
    rows = np.hstack([(x - mean) / scale, np.ones((len(x), 1))]) * root
    held = np.sqrt(penalty * counts.sum()) * np.eye(x.shape[1], x.shape[1] + 1)
    wanted = np.vstack([np.eye(classes)[y] * root, np.zeros((x.shape[1], classes))])
    found = np.linalg.lstsq(np.vstack([rows, held]), wanted, rcond=None)[0]
    weight = found[:-1] / scale[:, None]
    return np.vstack([weight, found[-1] - mean @ weight])


def close(found: Floats, wanted: Floats, within: float) -> bool:
    """Whether no number is further away than such a share of the largest."""
    return float(np.abs(found - wanted).max()) <= within * float(np.abs(wanted).max())
