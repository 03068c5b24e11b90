"""The cost profile that a trainer plans with: the given one if it applies, or an estimate."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.groups import Batch, LossFn
from fl_elastic.optimizers import OptimizerFn
from fl_elastic.planning import Policy
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.clock import clock_for
from fl_elastic.profiling.prefix import elastic_forward, measure_prefix
from fl_elastic.profiling.profile import model_device, model_digest, profile_key, trainable_part
from fl_elastic.training.options import TrainerOptions

if TYPE_CHECKING:
    from fl_elastic.training.elastic_forward import ElasticForward


# Largest factor by which one fit corrects a part of an estimate, up or down.
_MOST_SCALE = 2.0
# Largest number of passes above a cut that stand for one pass of everything.
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

    With simulated times it only has to be of this model: it may be of another device or batch shape. Missing costs
    are estimated.
    """
    profile, measured = known, options.timing.closed_loop
    if profile is None or (
        profile.key != profile_key(model, batch, optimizer_fn)
        or (budget.memory is not None and not profile.memory_recorded)
        if measured
        else profile.key.model != model_digest(model)
    ):
        # Imported here: a trainer that is given costs does not need the estimator.
        from fl_elastic.profiling.estimate import estimate_profile

        profile = estimate_profile(
            model, loss_fn, batch, optimizer_fn=optimizer_fn, clock=options.timing.clock,
            memory=budget.memory, prefix=options.forward is not None,
            # In simulated time the deadline's seconds are another device's.
            deadline=budget.deadline if measured else None,
        )  # fmt: skip
    if options.forward is not None:
        profile = with_prefix(profile, model, batch, options.timing.clock)
    if not policy.needs.modes:
        return profile
    from fl_elastic.profiling.estimate import estimated_modes

    return estimated_modes(profile, model, policy.needs.modes)


def with_prefix(profile: CostProfile, model: nn.Module, batch: Batch, clock: str) -> CostProfile:
    """Return the profile with the costs of a frozen prefix, measured by this clock if they are unknown."""
    if len(profile.cut_inference_seconds):
        return profile
    return measure_prefix(profile, model, batch, clock_for(model_device(model), clock), repeats=1)


def planned_with(
    profile: CostProfile,
    forward: ElasticForward | None,
    groups_above: int | None = None,
    kept_head: str = "",
) -> CostProfile:
    """Return the costs by which a fit plans: of the forward pass as it will run, and of trainable groups only."""
    if forward is not None:
        profile = elastic_forward(profile, forward.terms, at_least=forward.locked_groups or 0)
    return trainable_part(profile, groups_above, kept_head)


def lasting_costs(profile: CostProfile, options: TrainerOptions, examples: int) -> CostProfile:
    """Return the step costs of the trainable part, once the features of ``examples`` examples are kept."""
    profile = profile.accumulated(options.accumulate)
    above, forward = None, options.forward
    if options.part.cut:
        above = profile.graph.groups_above(options.part.cut)
        if forward is not None:
            profile = elastic_forward(profile, forward.terms(examples, math.inf), at_least=above)
    return trainable_part(profile, above, options.part.kept_head)


def passes_above_cut(
    profile: CostProfile, options: TrainerOptions, examples: int, speedup: float = 1.0
) -> int:
    """Return how many passes above the fleet's cut take as long as one pass that trains everything; at most 16.

    With as many passes, a round takes as long as without a cut: shorter rounds would send more often for the same
    number of steps, and start a process for a few steps.

    Parameters
    ----------
    profile : CostProfile
        Costs of the whole model.
    options : TrainerOptions
        With a cut; without one the answer is 1.
    examples : int
        Number of examples whose features are kept.
    speedup : float
        Speed-up of the client's budget, which shortens its rounds.
    """
    if not options.part.cut:
        return 1
    full = profile.accumulated(options.accumulate).full_step_seconds
    above = lasting_costs(profile, options, examples).full_step_seconds
    return max(1, min(int(full / (speedup * above)), _MOST_PASSES))


def refined(
    profile: CostProfile,
    full_ratio: float | None,
    predicted_step_seconds: float,
    step_seconds: float,
) -> CostProfile:
    """Return the profile with its seconds scaled to the times measured while training.

    The profile stops being an estimate once full steps were timed among the plan's steps.

    Parameters
    ----------
    profile : CostProfile
        The profile that the fit planned with.
    full_ratio : float, optional
        Measured time of full steps over the profile's.
    predicted_step_seconds, step_seconds : float
        Time of the plan's step, as predicted and as measured.
    """
    if not step_seconds > 0 or not predicted_step_seconds > 0:
        return profile
    step_ratio = step_seconds / predicted_step_seconds
    full, forward = profile.full_step_seconds, float(profile.forward_seconds[-1])
    # Two equations: f F + b B = measured full step, f F + b B' = measured step of the plan.
    backward, planned = full - forward, predicted_step_seconds - forward
    if full_ratio is None:
        forward_scale = backward_scale = _bounded(step_ratio)
    elif backward - planned < 0.2 * full:
        forward_scale = backward_scale = full_ratio
    else:
        backward_scale = _bounded((full_ratio * full - step_seconds) / (backward - planned))
        forward_scale = _bounded((step_seconds - backward_scale * planned) / forward)
        # Budgets are relative to the full step: if a bound moved it, scale it back.
        moved = full_ratio * full / (forward_scale * forward + backward_scale * backward)
        forward_scale, backward_scale = forward_scale * moved, backward_scale * moved
    return replace(
        profile,
        node_update_seconds=profile.node_update_seconds * backward_scale,
        node_path_seconds=profile.node_path_seconds * backward_scale,
        optimizer_seconds=profile.optimizer_seconds * backward_scale,
        fixed_seconds=profile.fixed_seconds * backward_scale,
        forward_seconds=profile.forward_seconds * forward_scale,
        cut_plain_seconds=profile.cut_plain_seconds * forward_scale,
        cut_inference_seconds=profile.cut_inference_seconds * forward_scale,
        estimated=full_ratio is None,
    )


def _bounded(scale: float) -> float:
    return min(max(scale, 1 / _MOST_SCALE), _MOST_SCALE)
