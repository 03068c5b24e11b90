"""Experience replay: how many rows of a training batch are new, and how many come from the store."""

from __future__ import annotations

from dataclasses import dataclass

from fl_elastic.errors import StreamError
from fl_elastic.given import is_real, whole

__all__ = ["Replay"]


@dataclass(frozen=True)
class Replay:
    """New and stored samples side by side in each batch (Chaudhry et al. 2019, "tiny episodic memories").

    Parameters
    ----------
    rows : int
        Rows of a batch.
    stored_share : float
        Share of rows that come from the store, from 0 to 1; with 0 the model forgets whatever does not recur.

    Examples
    --------
    >>> replay = Replay(8, stored_share=0.25)
    >>> replay.new_rows, replay.stored_rows
    (6, 2)
    """

    rows: int = 32
    stored_share: float = 0.5

    def __post_init__(self) -> None:
        if (whole(self.rows) or 0) < 1:
            raise StreamError(
                f"a batch of {self.rows!r} rows means nothing: give a whole number, at least 1"
            )
        if not is_real(self.stored_share) or not 0 <= self.stored_share <= 1:
            raise StreamError(f"a stored share of {self.stored_share!r} is not between 0 and 1")

    @property
    def stored_rows(self) -> int:
        """Number of rows that come from the store."""
        return round(self.rows * self.stored_share)

    @property
    def new_rows(self) -> int:
        """Number of rows of samples that the model has not been trained on."""
        return self.rows - self.stored_rows
