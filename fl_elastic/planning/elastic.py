"""The groups of most importance that fit the measured budget."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from fl_elastic.errors import BudgetError
from fl_elastic.importance.base import Scores
from fl_elastic.planning.knapsack import prefix_knapsack
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy import PlanRequest, Policy, register_policy
from fl_elastic.profiling import Mask, mask_bytes

__all__ = ["ElasticPolicy", "dearer_steps"]

_RECOSTINGS = 4
_PRICES = 24
_ALLOWANCES = 6


@register_policy("elastic")
class ElasticPolicy(Policy):
    """Train the head and the best part of the rest that the budget pays for.

    The prefix knapsack charges parallel branches as one chain; its answer is re-costed on the real graph, solved
    again with what that leaves over, and the last slack is filled group by group. A memory budget limits the
    depth; memory and uplink put a price on each group's bytes. If everything fits, everything is trained.

    Where steps may be traded (a deadline for the round, or a speed-up below the floor), the plan is the one whose
    importance times the share of steps that it leaves is largest: near the floor most of a step is spent on the
    forward pass whatever is trained, and fewer, deeper steps decrease the loss more per second.
    """

    uses_importance = True

    def plan(self, request: PlanRequest) -> Plan:
        """Return the best plan found; it is worth at least the best run of groups next to the loss."""
        everything = np.ones(len(request.profile), dtype=bool)
        if request.fits(everything):
            return request.plan_of_mask("elastic", everything)
        if not request.fits_bytes(request.head_mask()):
            self._refuse(request)
        best, suffix = self._within_bytes(request), _best_suffix(request)
        if request.importance[suffix].sum() > request.importance[best].sum():
            best = _fill(request, suffix)
        if (
            request.may_trade_steps
            and request.allowed_step_seconds < request.profile.full_step_seconds
        ):
            for dearer in dearer_steps(request):
                best = max(best, self._within_bytes(dearer), key=request.expected_decrease)
        return request.plan_of_mask("elastic", best)

    def _within_bytes(self, request: PlanRequest) -> Mask:
        """Raise the price of a byte until memory and uplink are met; fill what is left."""
        worth = self._worth_in_reach(request)
        best = self._within_time(request, worth)
        if not request.fits_bytes(best):
            sizes = request.profile.parameter_bytes
            low, high = 0.0, float((worth.clip(min=0) / sizes).max(initial=0.0)) + 1e-30
            best = request.head_mask()
            for _ in range(_PRICES):
                price = (low + high) / 2
                mask = self._within_time(request, worth - price * sizes)
                if request.fits_bytes(mask):
                    best, high = mask, price
                else:
                    low = price
        return _fill(request, best)

    def _within_time(self, request: PlanRequest, worth: Scores) -> Mask:
        """Solve, re-cost on the real graph, and solve again with the slack that branches leave."""
        profile = request.profile
        constant = float(profile.forward_seconds[0]) + profile.fixed_seconds
        whole = float(profile.update_seconds.sum() + profile.path_seconds.sum())
        allowed = min(request.allowed_step_seconds - constant, whole)
        head = request.head_mask()
        best, best_value, spend = head, -np.inf, allowed
        for _ in range(_RECOSTINGS):
            found = prefix_knapsack(
                profile.update_seconds, profile.path_seconds, worth, max(spend, 0.0),
                forced=[profile.graph.head],
            )  # fmt: skip
            actual = profile.step_seconds(found.mask) - constant
            if actual <= allowed * (1 + 1e-9) and found.value > best_value:
                best, best_value = found.mask, found.value
            slack = allowed - actual
            if abs(slack) <= 0.01 * abs(allowed):
                break
            spend += slack
        return best

    def _worth_in_reach(self, request: PlanRequest) -> Scores:
        """Return the importance, zero for groups that exceed memory or uplink with the head alone."""
        worth = request.importance.copy()
        if request.reachable is not None:
            worth[request.reachable :] = 0.0
        for group in range(len(worth)):
            mask = request.head_mask()
            mask[group] = True
            if not request.fits_bytes(mask):
                worth[group] = 0.0
        return worth

    def _refuse(self, request: PlanRequest) -> None:
        profile, budget, head = request.profile, request.budget, request.head_mask()
        memory = mask_bytes(profile, head, lean=request.lean)
        raise BudgetError(
            f"not even the head fits: it needs {memory:.0f} bytes of memory (budget {budget.memory}) and "
            f"{profile.parameter_bytes[head].sum():.0f} of uplink (budget {budget.uplink})"
        )


def dearer_steps(request: PlanRequest) -> list[PlanRequest]:
    """Return requests that allow longer steps, up to a full one."""
    lowest = max(request.allowed_step_seconds, request.profile.floor_step_seconds)
    allowances = np.geomspace(lowest, request.profile.full_step_seconds, _ALLOWANCES + 1)[1:]
    return [request.allowing(float(allowance) * (1 + 1e-9)) for allowance in allowances]


def _best_suffix(request: PlanRequest) -> Mask:
    """Return the groups next to the loss, as many as are worth most among those that fit."""

    def next_to_loss(count: int) -> Mask:
        mask = request.head_mask()
        mask[:count] = True
        return mask

    # A longer suffix never costs less, so the longest that fits is found by bisection.
    counts = range(1, len(request.profile) + 1)
    fitting = bisect_left(counts, True, key=lambda count: not request.fits(next_to_loss(count)))
    suffixes = [request.head_mask(), *(next_to_loss(count) for count in counts[:fitting])]
    return max(suffixes, key=lambda mask: float(request.importance[mask].sum()))


def _fill(request: PlanRequest, mask: Mask) -> Mask:
    """Add groups while they fit, most importance per second of their true extra cost first."""
    mask = mask.copy()
    base = request.profile.step_seconds(mask)
    gains = []
    for group in np.flatnonzero(~mask & (request.importance > 0)).tolist():
        mask[group] = True
        extra = max(request.profile.step_seconds(mask) - base, 1e-12)
        mask[group] = False
        gains.append((request.importance[group] / extra, group))
    for _, group in sorted(gains, reverse=True):
        mask[group] = True
        mask[group] = request.fits(mask)
    return mask
