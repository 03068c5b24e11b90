"""What the server makes of partial updates."""

from fl_elastic.aggregation.mean import PartialMean
from fl_elastic.aggregation.rules import AggregationRule, make_rule, register_rule, rules

__all__ = ["AggregationRule", "PartialMean", "make_rule", "register_rule", "rules"]
