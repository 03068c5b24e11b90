"""Guard: compares the model before and after an adaptation on samples that it was not trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from fl_elastic.errors import StreamError


@dataclass(frozen=True, eq=False)
class Row:
    """A sample as the store keeps it.

    Parameters
    ----------
    x : array
        Input or features.
    y : int or None
        Label; None if it has not arrived.
    number : int
        Number of the sample in the stream, its id everywhere; 0 if unknown.
    """

    x: NDArray[Any]
    y: int | None
    number: int = 0


@dataclass(frozen=True)
class Score:
    """Mean loss, share of right answers, and number of held-out samples."""

    loss: float
    accuracy: float
    samples: int


@dataclass(frozen=True)
class Guard:
    """Settings: which samples are held out, and when the model counts as worse.

    Parameters
    ----------
    every : int
        One in this many labelled samples goes to the held-out window, and to training only after leaving it.
    size : int
        Number of samples in the window.
    """

    every: int = 10
    size: int = 32

    least: ClassVar[int] = 8
    """Samples that a comparison needs; with fewer, only a loss that is not finite counts as worse."""
    tolerance: ClassVar[float] = 0.05
    """Accepted fall of the accuracy, on top of one standard error at this number of samples."""
    loss_tolerance: ClassVar[float] = 0.5
    """Accepted rise of the loss if the accuracy has not risen."""

    def __post_init__(self) -> None:
        if self.every < 2 or self.size < 1:
            raise StreamError(
                f"a guard needs every of at least 2 and size of at least 1, got {self.every} and {self.size}"
            )

    def worse(self, before: Score, after: Score) -> str:
        """Return why the model is worse than before; empty if it is not.

        Examples
        --------
        >>> Guard().worse(Score(0.5, 0.9, 32), Score(0.6, 0.7, 32))
        'accuracy on held-out samples fell from 0.900 to 0.700'
        """
        if after.samples and not math.isfinite(after.loss):
            return f"loss on held-out samples became {after.loss}"
        if min(before.samples, after.samples) < self.least:
            return ""
        if before.accuracy - after.accuracy > self.tolerance + _chance(before, after):
            return f"accuracy on held-out samples fell from {before.accuracy:.3f} to {after.accuracy:.3f}"
        rise = after.loss - before.loss
        if after.accuracy <= before.accuracy and rise > self.loss_tolerance:
            return f"loss on held-out samples rose from {before.loss:.3f} to {after.loss:.3f}"
        return ""


def _chance(before: Score, after: Score) -> float:
    """Return the standard error of an accuracy on that many samples, at least the share of one sample."""
    share = (before.accuracy + after.accuracy) / 2
    samples = min(before.samples, after.samples)
    return max(math.sqrt(share * (1 - share) / samples), 1 / samples) + 1e-9
