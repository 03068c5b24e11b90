"""What the server makes of partial updates."""

from fl_elastic.aggregation import agreement, products, robust
from fl_elastic.aggregation.averaging import ModelAverage
from fl_elastic.aggregation.coverage import CoverageLedger
from fl_elastic.aggregation.mean import MergeOptions, PartialMean
from fl_elastic.aggregation.rules import RULES, AggregationRule, JointRule, LinearRule, RobustRule
from fl_elastic.aggregation.server_optimizers import SERVER_OPTIMIZERS, ServerOptimizer
from fl_elastic.aggregation.size_bounds import SizeBounds

__all__ = [
    "RULES",
    "SERVER_OPTIMIZERS",
    "AggregationRule",
    "CoverageLedger",
    "JointRule",
    "LinearRule",
    "MergeOptions",
    "ModelAverage",
    "PartialMean",
    "RobustRule",
    "ServerOptimizer",
    "SizeBounds",
    "agreement",
    "products",
    "robust",
]
