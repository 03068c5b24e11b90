"""The cost profile that a trainer plans with: the one at hand if it fits, or an estimate."""

from __future__ import annotations

from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.groups import Batch, LossFn
from fl_elastic.planning import Policy
from fl_elastic.profiling import CostProfile, estimate_profile
from fl_elastic.profiling.estimate import estimated_modes
from fl_elastic.profiling.measure import OptimizerFn, profile_key
from fl_elastic.training.options import TrainerOptions

__all__ = ["costs_for"]


def costs_for(
    policy: Policy,
    known: CostProfile | None,
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    *,
    optimizer_fn: OptimizerFn,
    budget: Budget,
    options: TrainerOptions,
) -> CostProfile:
    """Return ``known`` if it holds for this model, batch, optimiser and device, with the policy's modes.

    What is missing is estimated.
    """
    profile = known
    if profile is None or profile.key != profile_key(model, batch, optimizer_fn):
        profile = estimate_profile(
            model, loss_fn, batch, optimizer_fn=optimizer_fn, clock=options.clock,
            memory=budget.memory, prefix=options.forward is not None,
        )  # fmt: skip
    return estimated_modes(profile, model, policy.modes)
