"""Find clients whose sums cannot be trusted: by the size of their features, and by their effect on the head.

A client can claim any sums that some examples could have. Its sums are judged by comparing the head with and
without them on the held-out examples of other clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from fl_elastic.claims import FEWEST, may_lie
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.ridge import Ridge, RidgeWithout, varies

_Floats = NDArray[np.float64]
# Cap on the factor by which an error grows according to one judge.
_MOST = 2.0
# A client is harmful if others' errors grow by more than usual plus the larger of two margins: the first number
# over the number of clients, and the second number times the median deviation. Of 1,980 honest clients one was
# found harmful.
_HARM, _USUAL = 0.6, 4.0
# Errors far below this share of the squared targets count as equal: doubling them does no harm.
_SMALL = 0.02


def sizes_of_features(sums: Sequence[HeadSums]) -> _Floats:
    """Return each client's mean square of features about the clients' median mean, relative to the average client.

    Each feature's mean square is divided by its average over clients before the features are averaged, so that
    large features do not hide false small ones.

    Examples
    --------
    >>> from fl_elastic.closed_form.folds import Fold
    >>> x = np.array([[1.0, 2.0], [3.0, 1.0], [2.0, 3.0]])
    >>> found = [HeadSums.of_folds("w", [Fold.of(k * x, x)], 2, 2, False) for k in (1, 1, 3)]
    >>> np.round(sizes_of_features(found), 2).tolist()
    [0.09, 0.09, 2.83]
    """
    means = np.array([each.means for each in sums])
    squares = np.array([each.diagonal[:-1] / each.diagonal[-1] for each in sums])
    return sizes_about_the_middle(means, squares)


def sizes_about_the_middle(means: _Floats, squares: _Floats) -> _Floats:
    """Return the result of `sizes_of_features`, computed from means and mean squares instead of sums.

    Parameters
    ----------
    means, squares : array, shape (clients, D)
        Means and mean squares of each feature. The result is averaged over features that are not constant.
    """
    middle = np.median(means, axis=0)
    about = np.maximum(squares - 2 * middle * means + middle**2, 0.0)
    usual = about.mean(axis=0)
    moves = varies(np.sqrt(usual), middle)
    if not moves.any():
        return np.ones(len(means))
    return np.asarray((about[:, moves] / usual[moves]).mean(axis=1))


def harmful(ridge: Ridge) -> list[int]:
    """Return the clients whose sums make the head worse on the held-out examples of others, worst first.

    The other clients are a client's judges: the measure is the growth of the errors on their held-out examples,
    which are in no sum. It is compared with that of the other clients, because it is large for all of them if all
    have different classes. A judge's errors count only in its own classes, so that a client with a class of its own
    harms no judge, unless examples are mistaken for that class. Clients with a single class do not judge such a
    client, because for them a head that predicts only their class is best.

    Parameters
    ----------
    ridge : Ridge
        The head, from the sums of each client with the weights that they have in it.
    """
    grown = _growth_of_errors(ridge)
    known = ~np.isnan(grown)
    if known.sum() < FEWEST:
        return []
    usual = float(np.median(grown[known]))
    spread = float(np.median(np.abs(grown[known] - usual)))
    limit = max(usual, 0.0) + max(_HARM / len(grown), _USUAL * spread)
    found = [client for client in np.flatnonzero(known) if grown[client] > limit]
    return sorted((int(each) for each in found), key=lambda client: -grown[client])


def _growth_of_errors(ridge: Ridge) -> _Floats:
    """Return the mean log growth of the other clients' errors that each client's sums cause; NaN if unknown."""
    system = ridge.system
    clients, outputs = len(system.sums), len(system.goal)
    before, after = np.zeros((clients, clients)), np.zeros((clients, clients))
    for rest in ridge.without:
        # First-order change of the head when the remaining sums of each client are removed.
        moved = rest.part.rows @ rest.solve(_pulls(rest))
        without = rest.left[:, None] + moved.reshape(-1, clients, outputs)
        for judge, rows in rest.part.whose.items():
            known = system.sums[judge].squares > 0
            small = _SMALL * (rest.part.targets[rows][:, known] ** 2).sum()
            before[:, judge] += small + (rest.left[rows][:, known] ** 2).sum()
            after[:, judge] += small + (without[rows][..., known] ** 2).sum(axis=(0, 2))
    if system.total.classes:
        held = np.array([own.squares > 0 for own in system.sums])
        brings = (held & (held.sum(axis=0) == 1)).any(axis=1)
        after[np.ix_(brings, held.sum(axis=1) == 1)] = 0.0
    return np.array([_mean_growth(before[i], after[i], i) for i in range(clients)])


def _pulls(rest: RidgeWithout) -> _Floats:
    """Return each client's contribution to the gradient at the regression without a part, side by side."""
    system, part, weight = rest.system, rest.part, rest.weight
    plain = system.plain(weight)
    # Targets about their overall mean: the constant is the last feature.
    plain[-1] += system.goal
    own = np.hstack([each.targets - each.times_matrix(plain) for each in system.sums])
    pulls = system.standard(own).reshape(len(weight), len(system.sums), -1)
    counts = np.array([float(each.diagonal[-1]) for each in system.sums]) - part.examples
    shares = np.maximum(counts, 0.0) / counts.sum()
    held_down = system.ridge(rest.penalty)[:, None] * weight
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
    # The fifth of the judges with the most favourable verdicts is ignored, because they may collude with the
    # client.
    inner = min(may_lie(len(grown)), len(grown) - 1)
    return float(grown[inner:].mean())
