"""Groups by chance: what every selection has to beat."""

from __future__ import annotations

from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, PlanRequest, Policy

__all__ = ["RandomPolicy"]


@POLICIES.register("random")
class RandomPolicy(Policy):
    """Train the head, and other groups in random order as long as they fit the budget.

    Where steps may be traded, their length is drawn as well, between the allowed and a full one.
    """

    def plan(self, request: PlanRequest) -> Plan:
        """Return a random plan that fits."""
        full, floor = request.profile.full_step_seconds, request.profile.floor_step_seconds
        drawn = request
        if request.may_trade_steps and request.allowed_step_seconds < full:
            lowest = max(request.allowed_step_seconds, floor)
            drawn = request.allowing(float(request.generator.uniform(lowest, full)))
        mask = request.head_mask()
        for group in request.generator.permutation(len(mask)):
            if not mask[group]:
                mask[group] = True
                mask[group] = drawn.fits(mask)
        return request.plan_of_mask("random", mask)
