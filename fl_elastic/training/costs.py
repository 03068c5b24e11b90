"""The cost profile that a trainer plans with: the one at hand if it fits, or a new one."""

from __future__ import annotations

from torch import nn

from fl_elastic.groups import Batch, LossFn
from fl_elastic.planning import Policy
from fl_elastic.profiling import CostProfile, clock_for, profile_model, with_modes
from fl_elastic.profiling.measure import OptimizerFn, model_device, profile_key

__all__ = ["costs_for"]


def costs_for(
    policy: Policy,
    known: CostProfile | None,
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    *,
    optimizer_fn: OptimizerFn,
    clock: str,
) -> CostProfile:
    """Return ``known`` if it was measured for this model, batch, optimiser and device and has the policy's modes.

    What is missing is measured.
    """
    profile = known
    if profile is None or profile.key != profile_key(model, batch, optimizer_fn):
        profile = profile_model(model, loss_fn, batch, optimizer_fn=optimizer_fn, clock=clock)
    return with_modes(profile, model, clock_for(model_device(model), clock), policy.modes)
