"""Roll the global model back when the losses that clients measure jump."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fl_elastic.update.manifest import WeightDict

# Number of rounds whose losses are remembered.
_REMEMBERED = 5
# Share of the first round's loss that is added to the threshold for a jump.
_MARGIN = 0.1
# Factor on the rate limit at a rollback, its lower bound, and the number of good rounds after which it grows again.
_SHRINK, _LEAST, _RECOVERY = 0.5, 0.25, 10


@dataclass(frozen=True)
class RollbackState:
    """State of a `DivergenceRollback`.

    Parameters
    ----------
    rate_limit, first_loss, good_rounds, losses
        Rate limit, loss of the first round, good rounds since the last rollback, losses of the last rounds.
    had_model : bool
        Whether there was a model to go back to.
    """

    rate_limit: float
    first_loss: float
    good_rounds: int
    losses: tuple[float, ...]
    had_model: bool

    def __post_init__(self) -> None:
        finite = all(math.isfinite(loss) for loss in (self.first_loss, *self.losses))
        if not self.rate_limit > 0 or not finite:
            raise ValueError(
                f"rate limit {self.rate_limit} and losses {self.losses[:3]} are no state of a run"
            )


class DivergenceRollback:
    """Compares the losses that clients report for the model of a round with those of the rounds before.

    Clients report the mean loss of their training, which begins at the model that they received. If the lower
    median over a round's clients exceeds twice the largest loss of the last five rounds plus a tenth of the first
    round's loss, the server's last step was bad: its rate was too large, or the merge poisoned. The run then goes
    on from the model before that step. After a rollback there is no earlier model, so the next round is not judged:
    clients that falsely claim large losses can delay a run but not stop it.

    Attributes
    ----------
    rate_limit : float
        Largest norm of the server's step relative to the merged change of the clients: infinite at first, 1 after a
        rollback, halved at each further one down to a quarter; doubled, up to 1, after every ten good rounds.

    Examples
    --------
    >>> guard = DivergenceRollback()
    >>> for loss in (2.0, 1.5):
    ...     _ = guard.jumped([loss])
    ...     guard.keep({}, lambda: None)
    >>> guard.jumped([9.0, 1.4, 1.3]), guard.jumped([9.0, 8.0, 1.3])
    ('', 'clients report a loss of 8, 2 in the rounds before')
    """

    def __init__(self) -> None:
        self.rate_limit = math.inf
        self._losses: list[float] = []
        self._first = 0.0
        self._good = 0
        self._kept: tuple[WeightDict, Callable[[], None]] | None = None

    def jumped(self, losses: Iterable[float], diverged: int = 0) -> str:
        """Return why the model with these losses must not be kept; empty if it is kept.

        Parameters
        ----------
        losses : iterable of float
            Losses of clients that started from the newest model.
        diverged : int
            Number of clients that could not train from it because their loss was not finite.
        """
        found = sorted(each for each in losses if math.isfinite(each))
        # A client that failed because its loss was not finite counts like any that reports a number.
        found += [math.inf] * diverged
        if not found:
            return ""
        loss = found[(len(found) - 1) // 2]
        before = max(self._losses, default=math.inf)
        most = before + abs(before) + _MARGIN * abs(self._first)
        if self._kept is not None and loss > most:
            return f"clients report a loss of {loss:.4g}, {before:.4g} in the rounds before"
        if not math.isfinite(loss):
            return ""
        if not self._losses:
            self._first = loss
        self._losses = [*self._losses, loss][-_REMEMBERED:]
        self._good += 1
        if self._good % _RECOVERY == 0 and self.rate_limit < 1:
            self.rate_limit = min(self.rate_limit / _SHRINK, 1.0)
        return ""

    def keep(self, weights: WeightDict, undo: Callable[[], None]) -> None:
        """Keep the model before a step, and a function that undoes the other changes of the step."""
        self._kept = weights, undo

    def step_back(self) -> WeightDict:
        """Return the model before the last step, and undo the step's other changes."""
        assert self._kept is not None
        weights, undo = self._kept
        undo()
        self._kept, self._good = None, 0
        self.rate_limit = max(_SHRINK * self.rate_limit, _LEAST) if self.rate_limit <= 1 else 1.0
        return weights

    def to_state(self) -> RollbackState:
        """Return the state to be stored; the model to go back to is stored elsewhere."""
        return RollbackState(
            self.rate_limit, self._first, self._good, tuple(self._losses), self._kept is not None
        )

    def restore(self, state: RollbackState) -> None:
        """Restore what `to_state` returned."""
        self.rate_limit, self._first = max(state.rate_limit, _LEAST), state.first_loss
        self._good, self._losses = state.good_rounds, [*state.losses][-_REMEMBERED:]


def undo_of(owners: Iterable[object]) -> Callable[[], None]:
    """Return a function that restores the objects' plain attributes to their present values.

    Arrays are not copied: Flower's strategies and the optimisers here replace arrays and do not change them.
    """
    kept = [
        (owner, {name: _held(value) for name, value in vars(owner).items() if _is_state(value)})
        for owner in owners
    ]

    def undo() -> None:
        for owner, values in kept:
            # Copied again: the owner may change the restored values in place, and be restored once more.
            vars(owner).update({name: _held(value) for name, value in values.items()})

    return undo


def _is_state(value: object) -> bool:
    return value is None or isinstance(value, (dict, list, float, int, np.ndarray, ArrayRecord))


def _held(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, list)) else value
