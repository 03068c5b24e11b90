"""Which tensor groups to train: the exact solver, and the policies that call it."""

from fl_elastic.groups import Mode
from fl_elastic.planning.elastic import ElasticPolicy
from fl_elastic.planning.fixed import BiasPolicy, FullPolicy, HeadPolicy, LastKPolicy
from fl_elastic.planning.gradient_filter import GradientFilterPolicy
from fl_elastic.planning.joint import Choices, JointSelection, Limits, joint_knapsack
from fl_elastic.planning.knapsack import Selection, prefix_knapsack
from fl_elastic.planning.mixed import JointPolicy
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
    "Choices",
    "ElasticPolicy",
    "FullPolicy",
    "GradientFilterPolicy",
    "HeadPolicy",
    "JointPolicy",
    "JointSelection",
    "LastKPolicy",
    "Limits",
    "Mode",
    "Plan",
    "PlanRequest",
    "Policy",
    "RandomPolicy",
    "Selection",
    "joint_knapsack",
    "make_policy",
    "policies",
    "prefix_knapsack",
    "register_policy",
]
