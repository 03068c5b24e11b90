"""What a learner says of one sample."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Observation"]


@dataclass(frozen=True)
class Observation:
    """What came of one sample, or of its label.

    Parameters
    ----------
    prediction : int or None
        Label that the model gave before it learned anything of the sample; None if it knew no class, or the
        sample was refused.
    correct : bool or None
        Whether that was right; None without a label.
    drift, adapted, rolled_back : bool
        What it gave rise to.
    sample_id : int or None
        By which its label can be told later; None if it was refused, or would not be known after a kill.
    again : bool
        Whether the sample was known already, by the name that its sender gave it: it counts once.
    refused : str
        Why it was; empty if it was not.
    """

    prediction: int | None = None
    correct: bool | None = None
    drift: bool = False
    adapted: bool = False
    rolled_back: bool = False
    sample_id: int | None = None
    again: bool = False
    refused: str = ""
