"""What the server makes of partial updates."""

from fl_elastic.aggregation import agreement, robust
from fl_elastic.aggregation.averaging import ModelAverage
from fl_elastic.aggregation.coverage import CoverageLedger
from fl_elastic.aggregation.mean import MergeOptions, PartialMean
from fl_elastic.aggregation.rules import (
    AggregationRule,
    LinearRule,
    RobustRule,
    make_rule,
    register_rule,
    rules,
)
from fl_elastic.aggregation.server_optimizers import (
    ServerOptimizer,
    make_server_optimizer,
    register_server_optimizer,
    server_optimizers,
)
from fl_elastic.aggregation.size_bounds import SizeBounds

__all__ = [
    "AggregationRule",
    "CoverageLedger",
    "LinearRule",
    "MergeOptions",
    "ModelAverage",
    "PartialMean",
    "RobustRule",
    "ServerOptimizer",
    "SizeBounds",
    "agreement",
    "make_rule",
    "make_server_optimizer",
    "register_rule",
    "register_server_optimizer",
    "robust",
    "rules",
    "server_optimizers",
]
