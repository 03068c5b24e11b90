"""Train the half next to the loss in one fit, and the other half in the next."""

from __future__ import annotations

import numpy as np

from fl_elastic.planning import POLICIES, Plan, PlanRequest, Policy, PolicyMemory
from fl_elastic.planning.importance import Probe
from fl_elastic.profiling import CostProfile

from .transform import RestingDropout


@POLICIES.register("taking_turns")
class TakingTurnsPolicy(Policy):
    """Train the head, and in turn one half of the other tensor groups, as many of them as fit the budget."""

    needs_coverage = False
    basis = "its turn"

    def observe(self, probe: Probe, profile: CostProfile, memory: PolicyMemory) -> PolicyMemory:
        """Count the fits; what is returned here is kept from fit to fit."""
        fits = int(memory.of("taking_turns").facts.get("fits", 0))
        return PolicyMemory("taking_turns", {"fits": fits + 1})

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan of this fit's half."""
        fits = int(request.memory.of("taking_turns").facts.get("fits", 1))
        half = (len(request.profile) + 1) // 2
        turn = range(half) if fits % 2 else range(half, len(request.profile))
        mask = request.head_mask()
        for group in turn:
            longer = mask.copy()
            longer[group] = True
            mask = longer if request.fits(longer) else mask
        plan = request.plan_of_mask("taking_turns", mask)
        return plan if np.all(mask) else plan.having(RestingDropout())
