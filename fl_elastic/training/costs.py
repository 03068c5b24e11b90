"""The cost profile that a trainer plans with: the one at hand if it fits, or an estimate."""

from __future__ import annotations

import math

from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.groups import Batch, LossFn
from fl_elastic.planning import Policy
from fl_elastic.profiling import CostProfile, estimate_profile
from fl_elastic.profiling.clock import clock_for
from fl_elastic.profiling.estimate import estimated_modes
from fl_elastic.profiling.measure import OptimizerFn, model_device, profile_key
from fl_elastic.profiling.prefix import elastic_forward, measure_prefix
from fl_elastic.profiling.trainable_part import trainable_part
from fl_elastic.training.options import TrainerOptions

__all__ = ["costs_for", "lasting_costs", "passes_above_cut", "with_prefix"]

_MOST_PASSES = 16


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
    return estimated_modes(with_prefix(profile, model, batch, options), model, policy.modes)


def with_prefix(
    profile: CostProfile, model: nn.Module, batch: Batch, options: TrainerOptions
) -> CostProfile:
    """Return the profile with what a frozen prefix costs, where the options have one and it is not known."""
    if options.forward is None or len(profile.cut_inference_seconds):
        return profile
    clock = clock_for(model_device(model), options.clock)
    return measure_prefix(profile, model, batch, clock, repeats=1)


def lasting_costs(profile: CostProfile, options: TrainerOptions, examples: int) -> CostProfile:
    """Return the costs of steps in what may be trained, once features of so many examples are kept."""
    above, forward = None, options.forward
    if options.cut:
        above = profile.graph.groups_above(options.cut)
        if forward is not None:
            profile = elastic_forward(profile, forward.terms(examples, math.inf), at_least=above)
    return trainable_part(profile, above, options.kept_head)


def passes_above_cut(
    profile: CostProfile, options: TrainerOptions, examples: int, speedup: float = 1.0
) -> int:
    """Return how many passes above the fleet's cut take as long as one that trains everything; at most 16.

    Rounds stay as long as they were without a cut: shorter ones would send as much more often, and start a process
    for a few steps.

    Parameters
    ----------
    profile : CostProfile
        Of the whole model.
    options : TrainerOptions
        With a cut, or without: then one pass is one pass.
    examples : int
        Whose features are kept.
    speedup : float
        Of the client's budget, which has so much less time.
    """
    if not options.cut:
        return 1
    above = lasting_costs(profile, options, examples).full_step_seconds
    return max(1, min(int(profile.full_step_seconds / (speedup * above)), _MOST_PASSES))
