"""The interface of policies, and their registry; a published method has a folder in `fl_elastic.methods`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fl_elastic.groups import Mode
from fl_elastic.planning.importance.base import Probe
from fl_elastic.planning.plan import Plan
from fl_elastic.planning.request import PlanRequest, PolicyMemory
from fl_elastic.profiling import CostProfile
from fl_elastic.registry import Factories

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Needs:
    """What must be measured before a policy can plan.

    Attributes
    ----------
    importance : bool or str
        Whether the policy reads ``request.importance``; a string names the registered score that defines the
        policy.
    modes : tuple of Mode
        Modes besides frozen, bias and full that the policy may choose; their costs are measured.
    channel_score : str, optional
        Registered channel score that defines the policy; by default the trainer's is used.
    fidelity : bool
        Whether the policy reads ``request.fidelity``, for which a probe takes a step that keeps the input of each
        layer.
    """

    importance: bool | str = False
    modes: tuple[Mode, ...] = ()
    channel_score: str | None = None
    fidelity: bool = False

    @property
    def own_importance(self) -> str | None:
        """The registered importance that defines the policy; None if there is none."""
        return self.importance if isinstance(self.importance, str) else None


class Policy(ABC):
    """Turns costs, importance and a budget into a plan.

    Every plan trains at least one group. If the time budget is below what the policy can reach, the plan takes
    fewer steps (`Plan.step_fraction`); it is never empty.

    Attributes
    ----------
    needs : Needs
        What must be measured before it plans.
    needs_coverage : bool
        Whether it leaves groups out only because of the budget, so that some fits must train everything for
        coverage. False for a policy that is defined by the groups that it trains, such as the head.
    reduces_uplink : bool
        Whether the policy can train and send less to keep a budget. If not, memory and uplink budgets that are too
        small for its plans are refused.
    needs_eval_prefix : bool
        Whether it makes choices per example that last, so that layers below its plans must run in eval mode.
        Trainers then run the prefix separately, even if their options do not ask for it.
    basis : str or None
        `FitReport.based_on` for plans that neither the policy nor the trainer chooses; None if one of them does.
    """

    needs: Needs = Needs()
    needs_coverage: ClassVar[bool] = True
    reduces_uplink: ClassVar[bool] = True
    needs_eval_prefix: ClassVar[bool] = False
    basis: ClassVar[str | None] = None

    @property
    def reads_steps(self) -> bool:
        """Whether `after_backward` must be called in every step."""
        return type(self).after_backward is not Policy.after_backward

    @property
    def reads_data(self) -> bool:
        """Whether its choice depends on the client's data: on gradients, or on observations of the model."""
        observes = type(self).observe is not Policy.observe
        return bool(self.needs.importance or self.needs.modes) or self.reads_steps or observes

    @abstractmethod
    def plan(self, request: PlanRequest) -> Plan:
        """Return what to train under ``request.budget``."""

    def refuse_misfit(self, profile: CostProfile) -> None:  # noqa: B027
        """Raise PlanError if the model has nothing that this policy can choose; by default never.

        Called once before a fit, so that a policy does not silently train only the head.
        """

    def observe(self, probe: Probe, profile: CostProfile, memory: PolicyMemory) -> PolicyMemory:
        """Look at the model before a fit, and return what the policy remembers; by default nothing new.

        The fit's plans find the result in `PlanRequest.memory`. If the fit succeeds, the result is kept for the
        next fit, on disk if the client has a folder.
        """
        del probe, profile
        return memory

    def after_backward(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        memory: PolicyMemory,
    ) -> PolicyMemory:
        """Look at a step's gradients before the optimiser's step, and return what the policy remembers.

        Parameters
        ----------
        parameters : mapping of str to Parameter
            The trained parameters, by name.
        optimizer : torch optimiser
            The optimiser that will take the step.
        memory : PolicyMemory
            What the policy has remembered so far.
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
"""Registry of policies by name."""


def policies() -> list[str]:
    """Return the names of the registered policies."""
    return POLICIES.names()
