"""The interface of policies, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fl_elastic.groups import Mode
from fl_elastic.planning.importance.base import Probe
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.policy_memory import PolicyMemory
from fl_elastic.planning.request import PlanRequest
from fl_elastic.profiling import CostProfile
from fl_elastic.registry import Factories

if TYPE_CHECKING:
    import torch
    from torch import nn


__all__ = ["POLICIES", "Needs", "Policy", "policies"]


@dataclass(frozen=True)
class Needs:
    """What must be measured before a policy plans.

    Attributes
    ----------
    importance : bool or str
        Whether it reads ``request.importance``: by the trainer's score, or by a registered one that defines it.
    modes : tuple of Mode
        Modes besides frozen, bias and full that it may choose, whose costs and fidelity are measured.
    channel_score : str, optional
        Registered channel score that it is defined by; left out, the trainer's.
    """

    importance: bool | str = False
    modes: tuple[Mode, ...] = ()
    channel_score: str | None = None

    @property
    def own_importance(self) -> str | None:
        """The registered importance that the policy is defined by; None if there is none."""
        return self.importance if isinstance(self.importance, str) else None


class Policy(ABC):
    """Turns costs, importance and a budget into a plan.

    Every plan trains at least one group. A time budget below what the policy can reach is answered by fewer
    steps (`Plan.step_fraction`), never by an empty plan.

    Attributes
    ----------
    needs : Needs
        What must be measured before it plans.
    needs_coverage : bool
        Whether it leaves groups out for the budget's sake alone, so that they are to come back in fits that train
        everything. False for one that is defined by what it trains, such as the head.
    reduces_uplink : bool
        Whether it can train and send less; one that cannot refuses memory and uplink budgets that are too small.
    needs_eval_prefix : bool
        Whether it makes a choice for each example that lasts, so that layers below its plans must run in eval mode.
        Trainers then run the prefix apart, also where their options do not say so.
    basis : str or None
        What its plans are based on where neither it nor the trainer chooses, as `FitReport.based_on` says it.
    """

    needs: Needs = Needs()
    needs_coverage: ClassVar[bool] = True
    reduces_uplink: ClassVar[bool] = True
    needs_eval_prefix: ClassVar[bool] = False
    basis: ClassVar[str | None] = None

    @property
    def reads_steps(self) -> bool:
        """Whether `after_backward` is to be called in every step."""
        return type(self).after_backward is not Policy.after_backward

    @property
    def reads_data(self) -> bool:
        """Whether its choice depends on the client's data: on gradients, or on what it observes of the model."""
        observes = type(self).observe is not Policy.observe
        return bool(self.needs.importance or self.needs.modes) or self.reads_steps or observes

    @abstractmethod
    def plan(self, request: PlanRequest) -> Plan:
        """Return what to train under ``request.budget``."""

    def refuse_misfit(self, profile: CostProfile) -> None:  # noqa: B027
        """Raise PlanError if the policy would have nothing of its own to do on this model; by default none is.

        Asked once before a fit, so that a policy does not quietly train the head alone.
        """

    def observe(self, probe: Probe, profile: CostProfile, memory: PolicyMemory) -> PolicyMemory:
        """Return what the policy keeps, having looked at the model before a fit; by default nothing new.

        Plans of the fit find it in `PlanRequest.memory`. It lasts from fit to fit, on disk where the client has a
        folder, if the fit succeeds.
        """
        del probe, profile
        return memory

    def after_backward(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        memory: PolicyMemory,
    ) -> PolicyMemory:
        """Return what the policy keeps, having looked at a step's gradients before the optimiser takes it.

        Parameters
        ----------
        parameters : mapping of str to Parameter
            Those that train, by name.
        optimizer : torch optimiser
            That will take the step.
        memory : PolicyMemory
            As it was.
        """
        del parameters, optimizer
        return memory


POLICIES: Factories[Policy] = Factories(
    "policy",
    "fl_elastic.policies",
    {
        **dict.fromkeys(("bias", "full", "head", "last_k", "random"), "fl_elastic.planning.plain"),
        "elastic": "fl_elastic.planning.elastic",
    },
    listed_as="policies",
)
"""Policies by name."""


def policies() -> list[str]:
    """Return the names of the registered policies."""
    return POLICIES.names()
