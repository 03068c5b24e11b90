"""Merging partial updates on the server: rules, coverage, and server optimisers."""

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
