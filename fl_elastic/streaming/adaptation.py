"""Record of one adaptation."""

from __future__ import annotations

from dataclasses import dataclass

from fl_elastic.streaming.guard import Score


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
        Seconds of training, and of choosing what to train; neither includes the measurement of costs.
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
