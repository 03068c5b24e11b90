"""Conformance checks of policies: rules that the plans of every policy must keep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, ElasticError
from fl_elastic.planning import Plan, PlanRequest, Policy
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import mask_bytes, step_memory
from fl_elastic.testing.probes import Snapshot, made_up_training
from fl_elastic.testing.profiles import made_up_profile
from fl_elastic.testing.subjects import Check, instance_of, require
from fl_elastic.training import ElasticTrainer

Subject = type[Policy] | Policy

_SPEEDUPS = (1.0, 1.3, 2.0, 4.0, 50.0)


def policy_checks() -> list[Check]:
    """Return the checks of a policy; each takes its class or an instance, and raises AssertionError if it fails.

    Examples
    --------
    >>> from fl_elastic.planning.plain import HeadPolicy
    >>> for check in policy_checks():
    ...     check(HeadPolicy)
    """
    return [
        check_plan_trains_something,
        check_plan_has_one_mode_per_group,
        check_plan_predicts_the_cost_of_its_profile,
        check_plan_fits_time_or_takes_fewer_steps,
        check_plan_without_budget_takes_every_step,
        check_plan_fits_memory_or_is_refused,
        check_plan_fits_uplink_or_is_refused,
        check_plan_is_reproducible_from_seed,
        check_plan_survives_worthless_groups,
        check_plan_of_a_single_group_trains_it,
        check_request_is_left_as_it_was,
        check_a_fit_leaves_what_is_not_its_own,
    ]


def check_plan_trains_something(subject: Subject) -> None:
    """Check that every plan trains at least one group, under any time budget."""
    for request in _timed_requests():
        plan = instance_of(subject).plan(request)
        require(bool(plan.mask.any()), f"an empty plan under {request.budget}")
        require(len(plan.trained_parameters) > 0, f"no parameter is trained under {request.budget}")


def check_plan_has_one_mode_per_group(subject: Subject) -> None:
    """Check that the plan covers exactly the profile's groups, in backward order."""
    for request in _timed_requests():
        plan = instance_of(subject).plan(request)
        require(
            plan.groups == request.profile.graph.groups, "the plan's groups are not the profile's"
        )
        require(len(plan.modes) == len(request.profile), "the plan has not one mode per group")


def check_plan_predicts_the_cost_of_its_profile(subject: Subject) -> None:
    """Check that predicted seconds and bytes are those of the profile for the plan's modes."""
    for request in _timed_requests():
        plan, profile = instance_of(subject).plan(request), request.profile
        pairs = [
            (plan.predicted_step_seconds, profile.plan_seconds(plan.modes)),
            (plan.full_step_seconds, profile.full_step_seconds),
            (plan.floor_step_seconds, profile.floor_step_seconds),
            (plan.allowed_step_seconds, request.allowed_step_seconds),
            (plan.predicted_step_bytes, step_memory(profile, plan.modes).total),
        ]
        require(
            all(bool(np.isclose(said, true, rtol=1e-9)) for said, true in pairs),
            f"the plan's figures are not its profile's: {pairs}",
        )


def check_plan_fits_time_or_takes_fewer_steps(subject: Subject) -> None:
    """Check that a plan that exceeds the time budget takes fewer steps, and a plan within it takes all."""
    for request in _timed_requests():
        plan = instance_of(subject).plan(request)
        seconds = request.profile.step_seconds(plan.mask)
        allowed = request.allowed_step_seconds
        fits = seconds <= allowed * (1 + 1e-6)
        require(
            plan.step_fraction * seconds <= allowed * (1 + 1e-6),
            f"{plan.step_fraction:.3f} of the steps of {seconds:.4f} s overrun {allowed:.4f} s",
        )
        require(plan.step_fraction > 0, "the plan takes no step at all")
        require(
            not fits or plan.step_fraction > 1 - 1e-6, "the plan fits but does not take every step"
        )


def check_plan_without_budget_takes_every_step(subject: Subject) -> None:
    """Check that without limits every step is taken."""
    plan = instance_of(subject).plan(_request(made_up_profile(), Budget()))
    require(plan.feasible and plan.step_fraction == 1.0, "steps are left out without any budget")


def check_plan_fits_memory_or_is_refused(subject: Subject) -> None:
    """Check that a step stays within the memory budget, or BudgetError is raised."""
    for profile in _profiles():
        full = mask_bytes(profile, np.ones(len(profile), dtype=bool))
        for share in (1.0, 0.5, 0.1, 1e-6):
            plan = _plan_or_refusal(subject, _request(profile, Budget(memory=full * share)))
            if plan is None:
                continue
            kept = plan.memory(profile).total
            require(kept <= full * share, f"the plan exceeds {share:g} of the full step's memory")
            require(
                bool(np.isclose(plan.predicted_step_bytes, kept)), "the plan predicts other bytes"
            )


def check_plan_fits_uplink_or_is_refused(subject: Subject) -> None:
    """Check that the trained tensors fit the uplink budget, or BudgetError is raised."""
    for profile in _profiles():
        full = float(profile.parameter_bytes.sum())
        for share in (1.0, 0.5, 0.1, 1e-6):
            plan = _plan_or_refusal(subject, _request(profile, Budget(uplink=full * share)))
            require(
                plan is None
                or _request(profile, Budget()).uplink_bytes(plan.modes) <= full * share,
                f"the plan sends more than {share:g} of the model",
            )


def check_plan_is_reproducible_from_seed(subject: Subject) -> None:
    """Check that all randomness comes from the request's generator."""
    for profile in _profiles():
        budget = Budget(speedup=1.5)
        plans = [instance_of(subject).plan(_request(profile, budget, seed=7)) for _ in range(3)]
        require(
            all(plan.modes == plans[0].modes for plan in plans), "the same seed gives two plans"
        )


def check_plan_survives_worthless_groups(subject: Subject) -> None:
    """Check that there is a plan even if every importance is zero or less."""
    for level in (0.0, -1.0):
        profile = made_up_profile(groups=6)
        request = PlanRequest(profile, Budget(speedup=1.5), np.full(len(profile), level))
        plan = instance_of(subject).plan(request)
        require(bool(plan.mask.any()), f"an empty plan when every importance is {level}")


def check_plan_of_a_single_group_trains_it(subject: Subject) -> None:
    """Check that a model of one group is trained, even if time is very short."""
    for speedup in _SPEEDUPS:
        request = _request(made_up_profile(groups=1), Budget(speedup=speedup))
        require(
            instance_of(subject).plan(request).mask.tolist() == [True], "the only group is left out"
        )


def check_a_fit_leaves_what_is_not_its_own(subject: Subject) -> None:
    """Check that a fit, or its refusal, leaves hooks, attributes, classes and flags unchanged."""
    for optimizer in ("sgd", "adam"):
        training = made_up_training(optimizer)
        trainer = ElasticTrainer(
            training.model, nn.functional.cross_entropy, training.optimizer_fn,
            budget=Budget(speedup=1.5), policy=instance_of(subject),
        )  # fmt: skip
        before = Snapshot(training.model)
        with contextlib.suppress(ElasticError):
            trainer.fit(training.batches)
        changed = before.foreign()
        require(not changed, f"a fit changed {changed[:3]}")


def check_request_is_left_as_it_was(subject: Subject) -> None:
    """Check that planning changes none of its inputs."""
    request = _request(made_up_profile(branched=True), Budget(speedup=2.0))
    profile = request.profile
    arrays = [request.importance, *(v for v in vars(profile).values() if isinstance(v, np.ndarray))]
    before = [array.copy() for array in arrays]
    instance_of(subject).plan(request)
    same = all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))
    require(same, "planning changed the importance or the profile")


def _profiles() -> Iterator[CostProfile]:
    for seed in range(3):
        yield made_up_profile(groups=9, seed=seed)
        yield made_up_profile(groups=10, branched=True, seed=seed)


def _timed_requests() -> Iterator[PlanRequest]:
    for profile in _profiles():
        yield _request(profile, Budget())
        for speedup in _SPEEDUPS:
            yield _request(profile, Budget(speedup=speedup))
        yield _request(profile, Budget(deadline=10 * profile.floor_step_seconds), steps=15)


def _request(profile: CostProfile, budget: Budget, *, steps: int = 1, seed: int = 0) -> PlanRequest:
    importance = np.random.default_rng(11).uniform(-0.2, 1.0, len(profile))
    generator = np.random.default_rng(seed)
    return PlanRequest(profile, budget, importance, steps=steps, generator=generator)


def _plan_or_refusal(subject: Subject, request: PlanRequest) -> Plan | None:
    try:
        return instance_of(subject).plan(request)
    except BudgetError:
        return None
