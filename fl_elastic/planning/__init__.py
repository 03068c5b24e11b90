"""Which tensor groups to train: plans, the exact solvers, and what all policies have in common."""

from typing import TYPE_CHECKING

from fl_elastic.lazy_names import loaded_late
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, Needs, Policy, policies
from fl_elastic.planning.request import PlanRequest, PolicyMemory

if TYPE_CHECKING:
    from fl_elastic.planning.knapsack import Selection, prefix_knapsack

__all__ = [
    "POLICIES",
    "Needs",
    "Plan",
    "PlanRequest",
    "Policy",
    "PolicyMemory",
    "Selection",
    "policies",
    "prefix_knapsack",
]

__getattr__, __dir__ = loaded_late(
    __name__, dict.fromkeys(("Selection", "prefix_knapsack"), "knapsack")
)
