"""Which tensor groups to train: the exact solver, and the policies that call it."""

from fl_elastic.groups import Mode
from fl_elastic.planning.elastic import ElasticPolicy
from fl_elastic.planning.fixed import BiasPolicy, FullPolicy, HeadPolicy, LastKPolicy
from fl_elastic.planning.knapsack import Selection, prefix_knapsack
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import (
    PlanRequest,
    Policy,
    make_policy,
    policies,
    register_policy,
)
from fl_elastic.planning.random import RandomPolicy

__all__ = [
    "BiasPolicy",
    "ElasticPolicy",
    "FullPolicy",
    "HeadPolicy",
    "LastKPolicy",
    "Mode",
    "Plan",
    "PlanRequest",
    "Policy",
    "RandomPolicy",
    "Selection",
    "make_policy",
    "policies",
    "prefix_knapsack",
    "register_policy",
]
