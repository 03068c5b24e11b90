"""Settings of a learner: what a batch holds, and what is rarely changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from fl_elastic.errors import StreamError
from fl_elastic.given import is_real, whole
from fl_elastic.training import TrainerOptions


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
                f"a batch of {self.rows!r} rows is invalid: give a whole number, at least 1"
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


@dataclass(frozen=True)
class StreamOptions:
    """Rarely changed settings of `StreamLearner`.

    Parameters
    ----------
    steps : int
        Training steps of one adaptation, if the budget allows them.
    save_every : int
        Number of samples after which the state is saved even without an adaptation; 0 for never.
    most_classes : int
        Most classes; further labels are refused, so that invalid ones do not make the head grow without end.
    history : int
        Number of adaptations that are remembered.
    training : TrainerOptions
        Options of each adaptation's training.
    """

    steps: int = 50
    save_every: int = 1000
    most_classes: int = 1000
    history: int = 200
    training: TrainerOptions = field(default_factory=TrainerOptions)

    def __post_init__(self) -> None:
        for name in ("steps", "most_classes", "history"):
            if getattr(self, name) < 1:
                raise StreamError(f"{name} {getattr(self, name)} must be at least 1")
        if self.save_every < 0:
            raise StreamError(f"save_every {self.save_every} must not be negative")
