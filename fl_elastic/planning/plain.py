"""Policies without importance: all groups, head, last groups, biases, random groups, groups named by the server."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import POLICIES, Needs, Policy
from fl_elastic.planning.request import PlanRequest


@POLICIES.register("full")
class FullPolicy(Policy):
    """Train every group; a time budget is met with fewer steps."""

    needs_coverage = False
    reduces_uplink = False

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan that trains everything."""
        return request.plan_of_mask("full", np.ones(len(request.profile), dtype=bool))


@POLICIES.register("head")
class HeadPolicy(Policy):
    """Train the group nearest to the loss, as in classic transfer learning."""

    needs_coverage = False

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan that trains the head."""
        return request.plan_of_mask("head", request.head_mask())


@POLICIES.register("last_k")
class LastKPolicy(Policy):
    """Train as many groups next to the loss as the budget allows, at least the head."""

    def plan(self, request: PlanRequest) -> Plan:
        """Return the longest suffix that fits."""
        mask = request.head_mask()
        for deepest in range(len(mask)):
            longer = mask.copy()
            longer[: deepest + 1] = True
            if not request.fits(longer):
                break
            mask = longer
        return request.plan_of_mask("last_k", mask)


@POLICIES.register("bias")
class BiasPolicy(Policy):
    """Train the head, and the biases and norm parameters of every other group (TinyTL's "BN+Bias").

    The prediction assumes that each group's whole gradient is computed, because on CPU a convolution's bias
    gradient costs as much as its weight gradient. A time budget is met with fewer steps.
    """

    needs_coverage = False
    reduces_uplink = False

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan that trains biases everywhere."""
        groups = request.profile.graph.groups
        modes = [Mode.BIAS if group.vectors() else Mode.FROZEN for group in groups]
        modes[request.profile.graph.head] = Mode.FULL
        return request.plan("bias", modes)


@POLICIES.register("random")
class RandomPolicy(Policy):
    """Train the head, and other groups in random order as long as they fit the budget.

    If fewer steps may be taken, their length is drawn as well, between the allowed step and a full one.
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


class GivenPolicy(Policy):
    """Train exactly the groups that the server named; if they do not fit the budget, in fewer steps.

    Importance is measured nevertheless, because the server chooses by it.

    Parameters
    ----------
    names : collection of str
        Groups to train.
    """

    needs = Needs(importance=True)
    needs_coverage = False
    basis = "the server's choice"

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan of these groups; raise PlanError if the model does not have them."""
        known = request.profile.group_names
        unknown = sorted(self.names - set(known))
        if unknown or not self.names:
            raise PlanError(
                f"the server asks for groups {unknown[:3]} that this model does not have"
            )
        modes = [Mode.FULL if name in self.names else Mode.FROZEN for name in known]
        return request.plan("given", modes)
