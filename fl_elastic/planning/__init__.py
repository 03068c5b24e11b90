"""Which tensor groups to train: what a plan is, the exact solvers, and what every policy has in common."""

from fl_elastic.groups import Mode
from fl_elastic.planning.joint import Choices, JointSelection, Limits, joint_knapsack
from fl_elastic.planning.knapsack import Selection, prefix_knapsack
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, PlanRequest, Policy, policies

__all__ = [
    "POLICIES",
    "Choices",
    "JointSelection",
    "Limits",
    "Mode",
    "Plan",
    "PlanRequest",
    "Policy",
    "Selection",
    "joint_knapsack",
    "policies",
    "prefix_knapsack",
]
