"""How far the server's step may go, relative to the step that the clients asked for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update import Manifest
from fl_elastic.update.manifest import Role, Weights


def longest_step(limit: float, manifest: Manifest, *, relative: bool) -> float:
    """Return the largest length of a round's step relative to its clients' steps, infinity for no limit.

    Parameters
    ----------
    limit : float
        Limit set by the fleet's losses.
    manifest : Manifest
        Manifest of the model; a model with running statistics moves no further than its clients did, because the
        statistics do not take part in a longer step, and would lag behind.
    relative : bool
        Whether the step is a multiple of the change that the clients made.
    """
    return min(limit, 1.0) if relative and Role.STATISTIC in manifest.roles else limit


def no_longer_than(
    limit: float, base: Weights, merged: Weights, stepped: Weights, manifest: Manifest
) -> dict[str, NDArray[Any]]:
    """Return the model after the server's step, shortened to ``limit`` times the step that the clients asked for.

    Parameters
    ----------
    limit : float
        Bound on the norm of the parameters' change, relative to the clients' change.
    base, merged, stepped : mapping of str to ndarray
        The model before the round, after the clients' updates, and after the server optimiser's step.
    manifest : Manifest
        Manifest of the model.
    """
    if math.isinf(limit):
        return dict(stepped)
    names = [name for name in manifest.names if manifest.role(name) is Role.PARAMETER]
    clients_norm, step_norm = (
        math.sqrt(sum(_square(each[name], base[name]) for name in names))
        for each in (merged, stepped)
    )
    if step_norm <= limit * clients_norm * (1 + 1e-6):
        return dict(stepped)
    share = limit * clients_norm / step_norm
    shorter = {
        name: np.asarray(
            base[name] + share * (np.asarray(stepped[name], np.float64) - base[name]),
            manifest.array_dtype(name),
        )
        for name in names
    }
    return {**stepped, **shorter}


def _square(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float(np.square(np.asarray(one, np.float64) - other).sum())
