"""How far each client's sums are trusted: bounds on its features' sizes, and whether the head is worse with it.

A client may say of its examples what it likes, as long as examples could have such sums. What it says is judged by
what the head of all, with its sums and without them, does on the examples that others hold out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update.head_sums import HeadSums
from fl_elastic.update.ridge import Ridge, RidgeWithout

__all__ = ["harmful", "sizes_about_the_middle", "sizes_of_features"]

_Floats = NDArray[np.float64]
# Of who is judged by the others, one of so many that like its sums most do not count: they may belong together.
_OUTER = 5
# Nobody says that an error is more than so many times as large.
_MOST = 2.0
# Others' errors that grow by more than this over the number of clients, and by so many times what is usual among
# honest ones, are no accident: of 1,980 honest clients, alike or with few classes each, one went beyond it.
_HARM, _USUAL = 0.6, 4.0
# Errors far below this share of the squared targets are all the same: what doubles them does no harm.
_SMALL = 0.02


def sizes_of_features(sums: Sequence[HeadSums]) -> _Floats:
    """Return how large each client's features are, about the median of the clients' means, over the mean client's.

    It is the mean over features of their mean squares, so that large features do not hide lies about small ones.

    Examples
    --------
    >>> from fl_elastic.update.folds import Fold
    >>> x = np.array([[1.0, 2.0], [3.0, 1.0], [2.0, 3.0]])
    >>> found = [HeadSums.of_folds("w", [Fold.of(k * x, x)], 2, 2, False) for k in (1, 1, 3)]
    >>> np.round(sizes_of_features(found), 2).tolist()
    [0.09, 0.09, 2.83]
    """
    counts = np.array([each.products[-1, -1] for each in sums])[:, None]
    means = np.array([each.products[-1, :-1] for each in sums]) / counts
    squares = np.array([np.diag(each.products)[:-1] for each in sums]) / counts
    return sizes_about_the_middle(means, squares)


def sizes_about_the_middle(means: _Floats, squares: _Floats) -> _Floats:
    """Return each client's mean squares about the median of the clients' means, over the mean client's.

    Parameters
    ----------
    means, squares : array, shape (clients, D)
        Of each feature. The result is the mean over features that move.
    """
    middle = np.median(means, axis=0)
    about = np.maximum(squares - 2 * middle * means + middle**2, 0.0)
    usual = about.mean(axis=0)
    moves = usual > 0
    if not moves.any():
        return np.ones(len(means))
    return np.asarray((about[:, moves] / usual[moves]).mean(axis=1))


def harmful(ridge: Ridge) -> list[int]:
    """Return which clients' sums make a head worse on what the others hold out, the worst one first.

    Each part of what is held out is left out of all sums. Others judge by the targets that they have themselves:
    a client that alone has a class takes nothing from them but what its class is mistaken for. What counts is how
    much larger their errors are with a client's sums than without, beside what that is for the others. Where all
    clients have other classes, it is large for all of them.

    Parameters
    ----------
    ridge : Ridge
        The head, from the sums of each client, of the same weight as it has there.
    """
    grown = _growth_of_errors(ridge)
    known = ~np.isnan(grown)
    if known.sum() < 3:
        return []
    usual = float(np.median(grown[known]))
    spread = float(np.median(np.abs(grown[known] - usual)))
    limit = max(usual, 0.0) + max(_HARM / len(grown), _USUAL * spread)
    found = [client for client in np.flatnonzero(known) if grown[client] > limit]
    return sorted((int(each) for each in found), key=lambda client: -grown[client])


def _growth_of_errors(ridge: Ridge) -> _Floats:
    """Return by client the mean logarithm of how much larger others' errors are with its sums; NaN if unknown."""
    system = ridge.system
    clients, outputs = len(system.sums), len(system.goal)
    before, after = np.zeros((clients, clients)), np.zeros((clients, clients))
    for rest in ridge.without:
        # To first order: what leaves the head with what is left of each client's sums.
        moved = rest.part.rows @ rest.solve(_pulls(rest))
        without = rest.left[:, None] + moved.reshape(-1, clients, outputs)
        for judge, rows in rest.part.whose.items():
            known = system.sums[judge].squares > 0
            small = _SMALL * (rest.part.targets[rows][:, known] ** 2).sum()
            before[:, judge] += small + (rest.left[rows][:, known] ** 2).sum()
            after[:, judge] += small + (without[rows][..., known] ** 2).sum(axis=(0, 2))
    return np.array([_mean_growth(before[i], after[i], i) for i in range(clients)])


def _pulls(rest: RidgeWithout) -> _Floats:
    """Return what each client's sums that are left add to the gradient at a head, side by side."""
    system, part, weight = rest.whole.system, rest.part, rest.weight
    plain = system.plain(weight)
    own = np.hstack([system.about_goal(each) - each.products @ plain for each in system.sums])
    pulls = system.standard(own).reshape(len(weight), len(system.sums), -1)
    counts = np.array([float(each.products[-1, -1]) for each in system.sums]) - part.examples
    shares = np.maximum(counts, 0.0) / counts.sum()
    held_down = system.ridge(rest.whole.penalty)[:, None] * weight
    pulls -= shares[:, None] * held_down[:, None]
    for client, rows in part.whose.items():
        held = part.rows[rows]
        pulls[:, client] -= held.T @ (part.targets[rows] - held @ weight)
    return np.asarray(pulls.reshape(len(weight), -1))


def _mean_growth(before: _Floats, after: _Floats, client: int) -> float:
    judges = (before > 0) & (after > 0)
    judges[client] = False
    if not judges.any():
        return float("nan")
    grown = np.sort(np.minimum(np.log(before[judges] / after[judges]), log(_MOST)))
    inner = min(-(-len(grown) // _OUTER), len(grown) - 1)
    return float(grown[inner:].mean())
