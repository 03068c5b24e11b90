"""Interface of learning rules for a stream's model: training steps, or a head in closed form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from fl_elastic.streaming.guard import Row, Score
from fl_elastic.streaming.progress import Progress
from fl_elastic.streaming.round_inbox import RoundChange
from fl_elastic.streaming.solved_head_state import SolvedHeadState
from fl_elastic.streaming.stream_memory import StreamMemory
from fl_elastic.training import SelectionState


@dataclass(frozen=True)
class Adaptation:
    """Record of one adaptation.

    Parameters
    ----------
    at : int
        Number of labelled samples seen when it was made.
    drift : bool
        Whether it followed a drift.
    trained : tuple of str
        Tensor groups of the last plan.
    groups : int
        Number of tensor groups of the model.
    steps : int
        Training steps.
    seconds, selection_seconds : float
        Seconds of training, and of choosing the groups to train; neither includes the measurement of costs.
    loss : float
        Mean training loss over the steps; NaN if training failed.
    before, after : Score
        Scores on held-out samples.
    undone : str
        Why the weights were restored; empty if the adaptation was kept.
    """

    at: int
    drift: bool
    trained: tuple[str, ...]
    groups: int
    steps: int
    seconds: float
    selection_seconds: float
    loss: float
    before: Score
    after: Score
    undone: str = ""


@dataclass(frozen=True, eq=False)
class RuleState:
    """State of a `LearningRule`: each rule has a field, and leaves the others' None.

    Parameters
    ----------
    selection : SelectionState or None
        Selection of groups for training by steps.
    head : SolvedHeadState or None
        The head in closed form.
    """

    selection: SelectionState | None = None
    head: SolvedHeadState | None = None


class LearningRule(ABC):
    """Base class of the ways in which a stream's model learns from labelled samples.

    Methods that are not abstract do nothing by default.

    Attributes
    ----------
    exact : bool
        Whether the model, after forgetting samples, equals one that never saw them.
    """

    exact: ClassVar[bool] = False

    @property
    def reads(self) -> str:
        """Where a head in closed form reads; empty without such a head."""
        return ""

    def kept(self, features: NDArray[Any]) -> NDArray[Any]:
        """Return a sample as it is to be kept and learned; raises Refused if it cannot be."""
        return features

    def learn(self, row: Row) -> None:  # noqa: B027
        """Receive a labelled sample for learning: it has just arrived, or has left the held-out window."""

    def drop(self, numbers: Collection[int]) -> None:  # noqa: B027
        """Discard samples with these numbers that were received since the last `update`."""

    def relabel(self, row: Row, y: int) -> None:  # noqa: B027
        """Correct the label of a sample that was received."""

    def update(self, held_out: Sequence[Row], *, guarded: bool = True) -> str | None:
        """Update the model by the samples received since the last call, if this needs no adaptation.

        Parameters
        ----------
        held_out : sequence of Row
            Samples of the held-out window.
        guarded : bool
            Whether an update is undone that makes the model worse on ``held_out``.

        Returns
        -------
        str or None
            Why the update was undone, empty if it was kept; None if there was none.
        """
        del held_out, guarded
        return None

    @abstractmethod
    def is_due(self, progress: Progress) -> bool:
        """Return whether it is time to `adapt`."""

    @abstractmethod
    def adapt(self, memory: StreamMemory, progress: Progress) -> Adaptation | None:
        """Adapt the model, and undo the adaptation if the model got worse; None if there is no labelled sample."""

    def drifted(self) -> None:  # noqa: B027
        """Discard state that is out of date after a drift."""

    @abstractmethod
    def forget(
        self, rows: Sequence[Row], memory: StreamMemory, progress: Progress, *, alpha: float | None
    ) -> tuple[int, Sequence[Row]]:
        """Make the model forget labelled samples; see `StreamLearner.forget`.

        Returns
        -------
        int
            Number of weights that were changed.
        sequence of Row
            Samples to `learn_again` if the forgetting cannot be saved.
        """

    def learn_again(self, rows: Sequence[Row]) -> None:  # noqa: B027
        """Receive forgotten samples again, after the forgetting could not be saved."""

    def erased(self) -> None:  # noqa: B027
        """Note that the store has erased all samples that were forgotten."""

    @abstractmethod
    def apply_round_result(self, change: RoundChange, held_out: Sequence[Row]) -> str:
        """Apply a round's change to the model; return why it was undone, empty if it was kept."""

    @abstractmethod
    def to_state(self) -> RuleState:
        """Return the state to save."""

    @abstractmethod
    def restore(self, state: RuleState, *, same_features: bool) -> None:
        """Restore the result of `to_state`; nothing if another rule saved it.

        Parameters
        ----------
        state : RuleState
            The saved state.
        same_features : bool
            Whether samples have the features that they had then.
        """
