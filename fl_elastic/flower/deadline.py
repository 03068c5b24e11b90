"""How long a round may take, and how long the server waits for replies.

A client takes the shorter of its own deadline and the server's, see `ClientRound.budget`.
`fl_elastic.aggregation.merge_options.MergeOptions` sets the weight of a reply that comes after the deadline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fl_elastic.errors import BudgetError
from fl_elastic.flower.client_availability import inner_times
from fl_elastic.given import is_real

# Factor of the deadline for which the server waits: the device's clock starts later, when it has the model.
_GRACE = 1.5


@dataclass(frozen=True)
class Deadline:
    """The time that a client has, from receiving the model to having sent its update.

    Parameters
    ----------
    seconds : float, optional
        Fixed time.
    quantile : float, optional
        Quantile of the times that the fleet's devices need to train everything: 0 is the fastest device, 1 the
        slowest. A time is what the device claims, but at least what the server measured. The fifth of the times at
        either end, at least one of three or more, does not count, so that a few devices that lie do not set the
        deadline.

    Raises
    ------
    BudgetError
        Unless exactly one of them is given, with a possible value.

    Examples
    --------
    >>> times = [10.0, 20.0, 30.0, 40.0]
    >>> Deadline(quantile=0.5).among(times), Deadline(quantile=0.0).among(times)
    (25.0, 20.0)
    >>> Deadline(seconds=60).among([])
    60
    """

    seconds: float | None = None
    quantile: float | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.quantile is None):
            raise BudgetError("a deadline takes either seconds or a quantile")
        seconds, quantile = self.seconds, self.quantile
        if seconds is not None and not (is_real(seconds) and 0 < seconds < float("inf")):
            raise BudgetError(f"deadline of {seconds!r} seconds is not a positive number")
        if quantile is not None and not (is_real(quantile) and 0 <= quantile <= 1):
            raise BudgetError(f"deadline quantile {quantile!r} is not between 0 and 1")

    def among(self, times: Iterable[float]) -> float | None:
        """Return the deadline in seconds, given devices' times; None if it depends on them and none is known."""
        if self.seconds is not None:
            return self.seconds
        inner = inner_times(times)
        return float(np.quantile(inner, self.quantile or 0.0)) if inner else None


def reply_timeout(deadline: float | None) -> float | None:
    """Return the seconds for which a server waits for the replies of a round; None to wait for all.

    >>> reply_timeout(60.0), reply_timeout(None)
    (90.0, None)
    """
    return None if deadline is None else deadline * _GRACE
