"""ElasticTrainer's choice of tensors as it was published, with the losses of its arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_elastic.errors import BudgetError

__all__ = ["published_selection"]

_LEVELS = 1000


def published_selection(
    update_cost: ArrayLike,
    path_cost: ArrayLike,
    importance: ArrayLike,
    share: float,
    *,
    levels: int = _LEVELS,
) -> NDArray[np.bool_]:
    r"""Return the tensors that ElasticTrainer's dynamic programme selects; none if none fits.

    Times are scaled to ``levels`` in all and rounded down; what that loses is counted twice against the budget:
    with the lost share :math:`1 - d`, the limit is :math:`\lfloor s d \sum \tilde t \rfloor`. Best importance over
    the k tensors nearest the output within time t:

    .. math:: L_{k,t} = \max\Big(L_{k-1,t},\; \max_{j<k} L_{j,\,t - u_{k-1} - \sum_{i=j}^{k-1} p_i} + I_{k-1}\Big)

    where only those states (j, t) are looked at in which tensor j - 1 was itself selected, or j is 0. Tensors from
    the first on whose summed path exceeds the limit are left out; if there is none, the deepest is. Unlike
    `fl_elastic.planning.knapsack.prefix_knapsack` this is not optimal.

    Parameters
    ----------
    update_cost : array-like, shape (N,)
        Time of each tensor's own gradient, in backward order.
    path_cost : array-like, shape (N,)
        Time to pass the error gradient through it; also charged for the deepest selected tensor.
    importance : array-like, shape (N,)
        Worth of each tensor.
    share : float
        Allowed part of the sum of all these times.
    levels : int
        Resolution of time.

    References
    ----------
    Huang et al., "ElasticTrainer", MobiSys 2023, section 6, and its published solver.

    Examples
    --------
    >>> published_selection([1, 1, 1], [1, 1, 1], [1.0, 1.0, 5.0], share=0.4).tolist()
    [True, False, False]
    """
    times = np.array([update_cost, path_cost], dtype=np.float64)
    worth = np.asarray(importance, dtype=np.float64)
    if times.shape != (2, len(worth)) or not times.sum() > 0 or (times < 0).any():
        raise BudgetError(f"times of shape {times.shape} must not be negative, nor all zero")
    updates, paths = np.floor(times * (levels / times.sum())).astype(np.int64)
    scaled = int((updates + paths).sum())
    limit = int(share * (scaled / levels) * scaled)
    if limit < 0:
        return np.zeros(len(worth), dtype=bool)
    beyond = np.flatnonzero(np.cumsum(paths) > limit)
    count = int(beyond[0]) if len(beyond) else len(worth) - 1
    return _best_state(updates, paths, worth, count, limit)


def _best_state(
    updates: NDArray[np.int64],
    paths: NDArray[np.int64],
    worth: NDArray[np.float64],
    count: int,
    limit: int,
) -> NDArray[np.bool_]:
    """Fill the tables tensor by tensor, for all times at once."""
    value = np.zeros((count + 1, limit + 1))
    masks = np.zeros((count + 1, limit + 1, len(worth)), dtype=bool)
    open_states = np.zeros((count + 1, limit + 1), dtype=bool)
    open_states[0, :] = True
    best, best_mask = -np.inf, np.zeros(len(worth), dtype=bool)
    for k in range(1, count + 1):
        value[k], masks[k] = value[k - 1], masks[k - 1]
        taken = np.zeros(limit + 1, dtype=bool)
        spent = int(updates[k - 1])
        for before in range(k - 1, -1, -1):
            spent += int(paths[before])
            if spent > limit:
                break
            candidate = value[before, : limit + 1 - spent] + worth[k - 1]
            better = open_states[before, : limit + 1 - spent] & (candidate > value[k, spent:])
            times = np.flatnonzero(better) + spent
            value[k, times] = candidate[better]
            masks[k, times] = masks[before, times - spent]
            masks[k, times, k - 1] = True
            taken[times] = True
        open_states[k] = taken
        place = int(np.argmax(value[k]))
        if value[k, place] > best:
            best, best_mask = float(value[k, place]), masks[k, place]
    return best_mask
