"""Settings of a learner that seldom need a change."""

from __future__ import annotations

from dataclasses import dataclass, field

from fl_elastic.errors import StreamError
from fl_elastic.training import TrainerOptions

__all__ = ["StreamOptions"]


@dataclass(frozen=True)
class StreamOptions:
    """Settings of `StreamLearner` that seldom need a change.

    Parameters
    ----------
    steps : int
        Training steps of one adaptation, if the budget pays for them.
    fading : float
        What a sample counts in the prequential accuracy when the next one comes.
    save_every : int
        Samples after which the state is saved even without an adaptation; 0 for never.
    new : int
        Newest labelled samples that are kept for the next adaptation, beside the store.
    waiting : int
        Predictions that are kept until their label comes.
    names : int
        Names of senders that are remembered, to recognise a sample that is sent again.
    most_classes : int
        Labels beyond so many different ones are refused, so that nonsense does not grow the head for ever.
    head : str
        Name of the layer that gives the class scores; the last linear one if empty.
    history : int
        Adaptations that are remembered.
    points : int
        Points of the record along the stream that are kept.
    training : TrainerOptions
        Of each adaptation.
    """

    steps: int = 50
    fading: float = 0.99
    save_every: int = 1000
    new: int = 512
    waiting: int = 10_000
    names: int = 1000
    most_classes: int = 1000
    head: str = ""
    history: int = 200
    points: int = 256
    training: TrainerOptions = field(default_factory=TrainerOptions)

    def __post_init__(self) -> None:
        for name in ("steps", "new", "waiting", "names", "most_classes", "history", "points"):
            if getattr(self, name) < 1:
                raise StreamError(f"{name} {getattr(self, name)} must be at least 1")
        if not 0 < self.fading <= 1 or self.save_every < 0:
            raise StreamError(
                f"fading {self.fading} must be above 0 and at most 1, save_every {self.save_every} not negative"
            )
