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
    save_every : int
        Samples after which the state is saved even without an adaptation; 0 for never.
    most_classes : int
        Labels beyond so many different ones are refused, so that nonsense does not grow the head for ever.
    head : str
        Name of the layer that gives the class scores; the last linear one if empty.
    history : int
        Adaptations that are remembered.
    training : TrainerOptions
        Of each adaptation.
    """

    steps: int = 50
    save_every: int = 1000
    most_classes: int = 1000
    head: str = ""
    history: int = 200
    training: TrainerOptions = field(default_factory=TrainerOptions)

    def __post_init__(self) -> None:
        for name in ("steps", "most_classes", "history"):
            if getattr(self, name) < 1:
                raise StreamError(f"{name} {getattr(self, name)} must be at least 1")
        if self.save_every < 0:
            raise StreamError(f"save_every {self.save_every} must not be negative")
