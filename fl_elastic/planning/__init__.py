"""Which tensor groups to train: what a plan is, the exact solvers, and what every policy has in common."""

from fl_elastic.groups import Mode
from fl_elastic.planning.joint import Choices, JointSelection, Limits, joint_knapsack
from fl_elastic.planning.knapsack import Selection, prefix_knapsack
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import (
    PlanRequest,
    Policy,
    make_policy,
    policies,
    register_policy,
)

__all__ = [
    "Choices",
    "JointSelection",
    "Limits",
    "Mode",
    "Plan",
    "PlanRequest",
    "Policy",
    "Selection",
    "joint_knapsack",
    "make_policy",
    "policies",
    "prefix_knapsack",
    "register_policy",
]
