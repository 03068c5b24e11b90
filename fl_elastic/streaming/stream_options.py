"""Rarely changed settings of a learner."""

from __future__ import annotations

from dataclasses import dataclass, field

from fl_elastic.errors import StreamError
from fl_elastic.training import TrainerOptions

__all__ = ["StreamOptions"]


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
    head : str
        Name of the layer that returns the class scores; empty for the last linear layer.
    history : int
        Number of adaptations that are remembered.
    training : TrainerOptions
        Options of each adaptation's training.
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
