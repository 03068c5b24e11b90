"""Settings of a learner: replay in batches, trigger of adaptations, head in closed form, and other options."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fl_elastic.closed_form.head_sums import HeadSums
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
        Most classes; further labels are refused, so that invalid labels do not make the head grow without limit.
    history : int
        Number of past adaptations that are kept in the record.
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


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """Settings of a head in closed form that learns from a stream.

    It reads the input of the model's last layer. For a head that reads other places, give the learner the model
    that `fl_elastic.training.read_out.readout_of` returns.

    Parameters
    ----------
    remember : float, optional
        After this many further samples, a sample's weight is 1/e of a new sample's. By default all samples have
        equal weight, so that the head forgets no class, in whatever order classes come; 1,000 to 3,000 suit streams
        whose classes change.
    before : HeadSums, optional
        Sums from before the stream, as `fl_elastic.training.head_pass` computes them locally, or from a server.
        They have one column per label in ``classes`` of the learner, in order.

    Examples
    --------
    >>> ClosedForm(remember=1000).remember
    1000
    """

    remember: float | None = None
    before: HeadSums | None = None

    def __post_init__(self) -> None:
        if self.remember is not None and not 1 <= self.remember < math.inf:
            raise StreamError(
                f"remember {self.remember} is invalid: give a number of samples, at least 1, or None for all"
            )
