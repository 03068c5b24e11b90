"""The learner's answer for one sample."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Observation:
    """The result for one sample, or for its label.

    Parameters
    ----------
    prediction : int or None
        Label predicted before the model learned from the sample; None if no class was known or the sample was
        refused.
    correct : bool or None
        Whether the prediction was right; None without a label.
    drift, adapted, rolled_back : bool
        Whether the sample led to a drift, to an adaptation, or to one that was undone.
    sample_id : int or None
        Id for giving the label later; None if the sample was refused, or would be lost if the process were killed,
        or was no longer in the store when its label came, so that its prediction counts and nothing is learned.
    again : bool
        Whether the sample was known already by its sender's name; it is not counted again, but its label is given
        to it.
    refused : str
        Reason for refusing it; empty if it was accepted.
    """

    prediction: int | None = None
    correct: bool | None = None
    drift: bool = False
    adapted: bool = False
    rolled_back: bool = False
    sample_id: int | None = None
    again: bool = False
    refused: str = ""
