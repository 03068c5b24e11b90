"""The joint solver: a mode for every group under time, memory and uplink together."""

from fl_elastic.planning.joint.choices import Choices, Limits, Totals
from fl_elastic.planning.joint.knapsack import JointSelection, joint_knapsack

__all__ = ["Choices", "JointSelection", "Limits", "Totals", "joint_knapsack"]
