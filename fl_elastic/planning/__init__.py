"""Which tensor groups to train: what a plan is, the exact solvers, and what every policy has in common."""

from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, PlanRequest, Policy, policies
from fl_elastic.planning.policy_memory import PolicyMemory

__all__ = [
    "POLICIES",
    "Plan",
    "PlanRequest",
    "Policy",
    "PolicyMemory",
    "policies",
]
