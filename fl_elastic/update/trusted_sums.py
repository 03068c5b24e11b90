"""Whose sums a head is made from: how large each client's features are, and whom its sums harm.

A client may say of its examples what it likes, as long as examples could have such sums. What it says is judged by
what the head of all, with its sums and without them, does on the examples that others hold out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import log

import numpy as np
from numpy.typing import NDArray

from fl_elastic.update.closed_form import STILL, held_out_in, parts_held_out
from fl_elastic.update.folds import Fold
from fl_elastic.update.head_sums import HeadSums

__all__ = ["harmful", "sizes_about_the_middle", "sizes_of_features"]

_Floats = NDArray[np.float64]
# Of who is judged by the others, one of so many that like its sums most do not count: they may belong together.
_OUTER = 5
# Nobody says that an error is more than so many times as large.
_MOST = 2.0
# Others' errors that grow by more than this over the number of clients, and by so many times what is usual among
# honest ones, are no accident: of 1,980 honest clients, alike or with few classes each, one went beyond it.
_HARM, _USUAL = 0.6, 4.0
_HELD = 1e9


def sizes_of_features(sums: Sequence[HeadSums]) -> _Floats:
    """Return how large each client's features are, about the median of the clients' means, over the mean client's.

    It is the mean over features of their mean squares, so that large features do not hide lies about small ones.

    Examples
    --------
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


def harmful(sums: Sequence[HeadSums], penalty: float, *, intercept: bool = True) -> list[int]:
    """Return which clients' sums make the head worse on what the others hold out, the worst one first.

    Each part of what is held out is left out of all sums. Others judge by the targets that they have themselves:
    a client that alone has a class takes nothing from them but what its class is mistaken for. What counts is how
    much larger their errors are with a client's sums than without, beside what that is for the others. Where all
    clients have other classes, it is large for all of them.

    Parameters
    ----------
    sums : sequence of HeadSums
        Of each client, of the same weight as it has in the head.
    penalty : float
        Of the head (`fl_elastic.update.closed_form.ClosedFormHead`).
    intercept : bool
        Whether the layer has a bias.
    """
    grown = _growth_of_errors(sums, penalty, intercept)
    known = ~np.isnan(grown)
    if known.sum() < 3:
        return []
    usual = float(np.median(grown[known]))
    spread = float(np.median(np.abs(grown[known] - usual)))
    limit = max(usual, 0.0) + max(_HARM / len(sums), _USUAL * spread)
    found = [client for client in np.flatnonzero(known) if grown[client] > limit]
    return sorted((int(each) for each in found), key=lambda client: -grown[client])


def _growth_of_errors(sums: Sequence[HeadSums], penalty: float, intercept: bool) -> _Floats:
    """Return by client the mean logarithm of how much larger others' errors are with its sums; NaN if unknown."""
    clients, outputs = len(sums), len(sums[0].squares)
    standard = _Standard.of(sums, intercept)
    counts = [float(each.products[-1, -1]) for each in sums]
    products = reduce(np.add, (each.products for each in sums))
    products = standard.rows(standard.rows(products).T)
    targets = standard.rows(reduce(np.add, (each.targets for each in sums)))
    nothing = np.zeros((0, len(targets))), np.zeros((0, outputs))
    before, after = np.zeros((clients, clients)), np.zeros((clients, clients))
    for part in parts_held_out(sums):
        held = {client: standard.of_fold(fold) for client, fold in held_out_in(part, sums).items()}
        rows, goals = (np.vstack(each) for each in zip(*held.values(), strict=True))
        examples = sum(counts) - float((rows[:, -1] ** 2).sum())
        ridge = penalty * examples * standard.penalised
        system = products - rows.T @ rows + np.diag(ridge)
        weight = np.linalg.solve(system, targets - rows.T @ goals)
        plain = standard.plain(weight)
        # To first order: what leaves the head with what is left of each client's sums.
        pulls = []
        for client, each in enumerate(sums):
            own, own_goals = held.get(client, nothing)
            count = max(counts[client] - float((own[:, -1] ** 2).sum()), 0.0)
            pulls.append(
                standard.rows(each.targets - each.products @ plain)
                - own.T @ (own_goals - own @ weight)
                - count / examples * ridge[:, None] * weight
            )
        steps = np.linalg.solve(system, np.hstack(pulls))
        for judge, (rows, goals) in held.items():
            known = sums[judge].squares > 0
            left = goals - rows @ weight
            without = left[:, None] + (rows @ steps).reshape(len(left), clients, outputs)
            before[:, judge] += (left[:, known] ** 2).sum()
            after[:, judge] += (without[..., known] ** 2).sum(axis=(0, 2))
    return np.array([_mean_growth(before[i], after[i], i) for i in range(clients)])


@dataclass(frozen=True, eq=False)
class _Standard:
    """How features are standardised, by the sums of all; a constant stays last, for the bias."""

    mean: _Floats
    scale: _Floats
    penalised: _Floats

    @classmethod
    def of(cls, sums: Sequence[HeadSums], intercept: bool) -> _Standard:
        examples = sum(float(each.products[-1, -1]) for each in sums)
        mean = np.sum([each.products[-1, :-1] for each in sums], axis=0) / examples
        squares = np.sum([np.diag(each.products)[:-1] for each in sums], axis=0) / examples
        mean = mean if intercept else np.zeros_like(mean)
        spread = np.sqrt(np.maximum(squares - mean**2, 0.0))
        scale = np.where(
            spread > STILL * max(float(spread.max(initial=0.0)), STILL), spread, np.inf
        )
        # A bias that there is none of is held at nothing.
        return cls(mean, scale, np.append(np.ones(len(mean)), 0.0 if intercept else _HELD))

    def rows(self, plain: _Floats) -> _Floats:
        """Return products of features with anything, shape (D + 1, K), in these terms."""
        moved = (plain[:-1] - np.outer(self.mean, plain[-1])) / self.scale[:, None]
        return np.vstack([moved, plain[-1:]])

    def plain(self, weight: _Floats) -> _Floats:
        """Return the weight that does to features as they are what this one does to standardised ones."""
        scaled = weight[:-1] / self.scale[:, None]
        return np.vstack([scaled, weight[-1:] - self.mean @ scaled])

    def of_fold(self, fold: Fold) -> tuple[_Floats, _Floats]:
        """Return a fold's rows in these terms, and its targets."""
        constant = fold.rows[:, -1:]
        return np.hstack(
            [(fold.rows[:, :-1] - constant * self.mean) / self.scale, constant]
        ), fold.targets


def _mean_growth(before: _Floats, after: _Floats, client: int) -> float:
    judges = (before > 0) & (after > 0)
    judges[client] = False
    if not judges.any():
        return float("nan")
    grown = np.sort(np.minimum(np.log(before[judges] / after[judges]), log(_MOST)))
    inner = min(-(-len(grown) // _OUTER), len(grown) - 1)
    return float(grown[inner:].mean())
