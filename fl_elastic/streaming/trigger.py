"""When a stream's learner adapts: after a number of labelled samples, sooner after a drift.

A head in closed form follows each sample and has no use for a trigger.
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_elastic.errors import StreamError
from fl_elastic.given import whole


@dataclass(frozen=True)
class Trigger:
    """Adapt after a number of labelled samples, and after a drift.

    Parameters
    ----------
    samples : int, optional
        Labelled samples from one adaptation to the next; None to adapt after drifts only.
    after_drift : int, optional
        Labelled samples to wait for after a drift; None to ignore drifts.

    Examples
    --------
    >>> Trigger(100).due(samples=40, since_drift=None), Trigger(100).due(samples=40, since_drift=32)
    (False, True)
    """

    samples: int | None = 50
    after_drift: int | None = 32

    def __post_init__(self) -> None:
        if self.samples is not None and (whole(self.samples) or 0) < 1:
            raise StreamError(
                f"{self.samples!r} samples between adaptations is invalid: give a whole number, at least 1"
            )
        after = whole(self.after_drift)
        if self.after_drift is not None and (after is None or after < 0):
            raise StreamError(
                f"{self.after_drift!r} samples after a drift is invalid: give a whole number from 0"
            )

    def due(self, samples: int, since_drift: int | None) -> bool:
        """Return whether to adapt now.

        Parameters
        ----------
        samples : int
            Labelled samples since the last adaptation.
        since_drift : int or None
            Labelled samples since a drift that no adaptation has followed yet; None if there is none.
        """
        if self.samples is not None and samples >= self.samples:
            return True
        if self.after_drift is None or since_drift is None:
            return False
        return since_drift >= self.after_drift
