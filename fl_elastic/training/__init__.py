"""Train what the plan says, within the budget."""

from typing import TYPE_CHECKING

from fl_elastic.lazy_names import loaded_late
from fl_elastic.training.apply_plan import apply_plan
from fl_elastic.training.evaluate import evaluate
from fl_elastic.training.options import (
    ForwardOptions,
    Timing,
    TrainablePart,
    TrainerOptions,
)
from fl_elastic.training.report import FitReport
from fl_elastic.training.selection import SelectionState
from fl_elastic.training.trainer import ElasticTrainer

if TYPE_CHECKING:
    from fl_elastic.training.own_loop import changed, plan_for

__all__ = [
    "ElasticTrainer",
    "FitReport",
    "ForwardOptions",
    "SelectionState",
    "Timing",
    "TrainablePart",
    "TrainerOptions",
    "apply_plan",
    "changed",
    "evaluate",
    "plan_for",
]

__getattr__, __dir__ = loaded_late(__name__, {"changed": "own_loop", "plan_for": "own_loop"})
