"""The interface of policies, what they are asked, and their registry."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError
from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.importance.base import Scores
from fl_elastic.planning.plan import Plan
from fl_elastic.profiling import CostProfile, Mask
from fl_elastic.registry import Registry

__all__ = ["PlanRequest", "Policy", "make_policy", "policies", "register_policy"]


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """Everything a policy may look at.

    Attributes
    ----------
    profile : CostProfile
        What each group costs here.
    budget : Budget
        What may be spent.
    importance : array, shape (N,)
        What each group is worth now; zeros for policies that do not ask for it.
    steps : int
        Local steps of the round, over which a deadline is spread.
    correction : float
        Measured over predicted step time, learnt while training.
    allowed_override : float, optional
        Allowed step seconds to plan with instead of the budget's.
    generator : numpy.random.Generator
        The only source of randomness.
    """

    profile: CostProfile
    budget: Budget
    importance: Scores
    steps: int = 1
    correction: float = 1.0
    allowed_override: float | None = None
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def allowed_step_seconds(self) -> float:
        """What the profile may predict for one step, corrected by what was measured."""
        if self.allowed_override is not None:
            return self.allowed_override
        full = self.profile.full_step_seconds
        return self.budget.allowed_step_seconds(full, self.steps) / self.correction

    @property
    def may_trade_steps(self) -> bool:
        """Whether dearer steps may be paid for by taking fewer of them.

        A deadline limits the round, so steps and groups are one choice; a speed-up limits each step, unless not
        even the head fits, when fewer steps are the only answer left.
        """
        floor = self.profile.floor_step_seconds
        return self.budget.speedup is None or self.allowed_step_seconds < floor

    def allowing(self, step_seconds: float) -> PlanRequest:
        """Return the same request with another allowed step time."""
        return replace(self, allowed_override=step_seconds)

    def head_mask(self) -> Mask:
        """Return the mask that trains the head alone."""
        mask = np.zeros(len(self.profile), dtype=bool)
        mask[self.profile.graph.head] = True
        return mask

    def expected_decrease(self, mask: Mask) -> float:
        """Return the importance of ``mask`` times the share of the steps that it can take within the budget."""
        share = self.allowed_step_seconds / self.profile.step_seconds(mask)
        return float(self.importance[mask].sum()) * min(1.0, share)

    def fits(self, mask: Mask) -> bool:
        """Whether a step of ``mask`` fits time, memory and uplink."""
        in_time = self.profile.step_seconds(mask) <= self.allowed_step_seconds * (1 + 1e-9)
        return in_time and self.fits_bytes(mask)

    def fits_bytes(self, mask: Mask) -> bool:
        """Whether a step of ``mask`` fits memory and uplink."""
        memory, uplink = self.budget.memory, self.budget.uplink
        return (memory is None or self.profile.step_bytes(mask) <= memory) and (
            uplink is None or float(self.profile.parameter_bytes[mask].sum()) <= uplink
        )

    def plan(self, policy: str, modes: list[Mode]) -> Plan:
        """Return the plan that trains each group in its mode.

        Raises
        ------
        BudgetError
            If it exceeds the memory or the uplink, which fewer steps cannot mend.
        """
        mask = np.array([not mode.is_frozen for mode in modes])
        profile, budget, groups = self.profile, self.budget, self.profile.graph.groups
        needed = profile.step_bytes(mask)
        if budget.memory is not None and needed > budget.memory:
            raise BudgetError(
                f"policy {policy!r} needs {needed:.0f} bytes for a step, memory budget is "
                f"{budget.memory:.0f}: raise it, lower the batch size, or use policy 'elastic'"
            )
        sent = sum(_sent_bytes(group, mode) for group, mode in zip(groups, modes, strict=True))
        if budget.uplink is not None and sent > budget.uplink:
            raise BudgetError(
                f"policy {policy!r} sends {sent:.0f} bytes, uplink budget is {budget.uplink:.0f}: "
                "raise it or use policy 'elastic'"
            )
        return Plan(
            policy=policy,
            groups=groups,
            modes=tuple(modes),
            full_step_seconds=profile.full_step_seconds,
            predicted_step_seconds=profile.step_seconds(mask),
            floor_step_seconds=profile.floor_step_seconds,
            allowed_step_seconds=self.allowed_step_seconds,
            predicted_step_bytes=needed,
        )

    def plan_of_mask(self, policy: str, mask: Mask) -> Plan:
        """Return the plan that trains the groups in ``mask`` in full."""
        return self.plan(policy, [Mode.FULL if on else Mode.FROZEN for on in mask])


def _sent_bytes(group: TensorGroup, mode: Mode) -> float:
    """Return the bytes that a group trained in ``mode`` sends as fp32."""
    sent = mode.trains(group)
    shapes = zip(group.parameters, group.shapes, strict=True)
    return 4.0 * sum(math.prod(shape) for name, shape in shapes if name in sent)


class Policy(ABC):
    """Turns costs, importance and a budget into a plan.

    Every plan trains at least one group. A time budget below what the policy can reach is answered by fewer
    steps (`Plan.step_fraction`), never by an empty plan.

    Attributes
    ----------
    uses_importance : bool
        Whether `plan` reads ``request.importance``.
    selects : bool
        Whether the policy can train and send less; one that cannot refuses memory and uplink budgets that are
        too small.
    """

    uses_importance: ClassVar[bool] = False
    selects: ClassVar[bool] = True

    @abstractmethod
    def plan(self, request: PlanRequest) -> Plan:
        """Return what to train under ``request.budget``."""


_REGISTRY: Registry[type[Policy]] = Registry("policy")
register_policy: Callable[[str], Callable[[type[Policy]], type[Policy]]] = _REGISTRY.register


def policies() -> list[str]:
    """Return the names of the registered policies."""
    return _REGISTRY.names()


def make_policy(name: str) -> Policy:
    """Return the policy registered as ``name``."""
    return _REGISTRY.get(name)()
