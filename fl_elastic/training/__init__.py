"""Train what the plan says, within the budget."""

from fl_elastic.training.apply_plan import apply_plan, frozen_outside
from fl_elastic.training.elastic_forward import ForwardOptions, ForwardReport
from fl_elastic.training.evaluate import Evaluation, MetricsFn, evaluate
from fl_elastic.training.options import TrainerOptions
from fl_elastic.training.own_loop import changed, plan_for
from fl_elastic.training.report import FitReport
from fl_elastic.training.selection import SelectionState
from fl_elastic.training.trainer import ElasticTrainer
from fl_elastic.training.variants import Variants

__all__ = [
    "ElasticTrainer",
    "Evaluation",
    "FitReport",
    "ForwardOptions",
    "ForwardReport",
    "MetricsFn",
    "SelectionState",
    "TrainerOptions",
    "Variants",
    "apply_plan",
    "changed",
    "evaluate",
    "frozen_outside",
    "plan_for",
]
