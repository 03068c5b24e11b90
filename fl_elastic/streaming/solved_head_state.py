"""The saved state of a stream's head in closed form, and the weights of samples in its sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_elastic.closed_form.running_sums import KeptSums, RunningSums


@dataclass(frozen=True, eq=False)
class SolvedHeadState:
    """State of a `SolvedHead`.

    Parameters
    ----------
    sums : KeptSums
        Sums over all samples that the head has learned.
    penalty : float
        Penalty as a share of the number of examples.
    newest, base : int
        Numbers of the newest sample, and of the sample whose weight is 1.
    chosen_at : float
        Weight of the sums when the penalty was last chosen.
    remember : float or None
        As in `ClosedForm`.
    before : float
        Number of examples from before the stream.
    gone : frozenset of int
        Samples that were subtracted from the sums and may still be in the store.
    changed : bool
        Whether the sums or the penalty have changed since the head in the model was solved.
    """

    sums: KeptSums
    penalty: float
    newest: int
    base: int
    chosen_at: float
    remember: float | None
    before: float
    gone: frozenset[int]
    changed: bool


def saved_sums(state: SolvedHeadState) -> RunningSums:
    """Return the sums that a learner has saved, scaled so that the newest sample has weight 1."""
    sums = RunningSums.of_state(state.sums)
    newest = sample_weights([state.newest], state.base, state.remember)
    sums.scale(1.0 / float(newest[0]))
    return sums


def sample_weights(
    numbers: Iterable[int], base: int, remember: float | None
) -> NDArray[np.float64]:
    """Return the weights of samples by their numbers; that of sample ``base`` is 1."""
    since = np.array([number - base for number in numbers], np.float64)
    return np.exp(since / remember) if remember else np.ones(len(since))
