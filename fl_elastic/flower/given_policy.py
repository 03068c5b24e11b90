"""The policy of a client that does not choose."""

from __future__ import annotations

from collections.abc import Collection

from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode
from fl_elastic.planning import Plan, PlanRequest, Policy
from fl_elastic.profiling import CostProfile

__all__ = ["GivenPolicy"]


class GivenPolicy(Policy):
    """Trains exactly the groups that the server named; what does not fit the budget is trained in fewer steps.

    Importance is measured all the same, for the server to choose by.

    Parameters
    ----------
    names : collection of str
        Groups to train.
    """

    uses_importance = True
    covers = False
    basis = "the server's choice"

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan of these groups."""
        modes = [
            Mode.FULL if name in self.names else Mode.FROZEN for name in request.profile.group_names
        ]
        return request.plan("given", modes)

    def refuse_misfit(self, profile: CostProfile) -> None:
        """Raise PlanError if the model has no such groups."""
        unknown = sorted(self.names - set(profile.group_names))
        if unknown or not self.names:
            raise PlanError(
                f"the server asks for groups {unknown[:3]} that this model does not have"
            )
