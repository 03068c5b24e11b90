"""What the server makes of partial updates."""

from fl_elastic.aggregation.averaging import ModelAverage
from fl_elastic.aggregation.mean import MergeOptions, PartialMean
from fl_elastic.aggregation.rules import RULES, AggregationRule, JointRule, LinearRule, RobustRule
from fl_elastic.aggregation.server_optimizers import SERVER_OPTIMIZERS, ServerOptimizer

__all__ = [
    "RULES",
    "SERVER_OPTIMIZERS",
    "AggregationRule",
    "JointRule",
    "LinearRule",
    "MergeOptions",
    "ModelAverage",
    "PartialMean",
    "RobustRule",
    "ServerOptimizer",
]
