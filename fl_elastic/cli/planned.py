"""Profile, score and plan one model on random data, for the command line and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, ElasticError, ModelError, PlanError
from fl_elastic.groups import Batch, Mode
from fl_elastic.groups.forward import call_model
from fl_elastic.groups.untouched import untouched
from fl_elastic.losses import class_scores, classification_loss
from fl_elastic.planning import POLICIES, Plan, PlanRequest, Policy, policies
from fl_elastic.planning.cost_report import CostReport, check_feasible, cost_report
from fl_elastic.planning.importance import IMPORTANCES
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.estimate import estimated_modes
from fl_elastic.profiling.memory import CODE_BYTES
from fl_elastic.profiling.profile import profile_key
from fl_elastic.profiling.store import load_or_measure
from fl_elastic.registry import first_line
from fl_elastic.training import SelectionState, Timing, TrainerOptions
from fl_elastic.training.measured import MeasuredPlan, measure_plan, plan_measured
from fl_elastic.training.planner import Planner


@dataclass(frozen=True)
class RefusedPolicy:
    """A policy that has no plan for the budget, and the reason."""

    policy: str
    reason: str


@dataclass(frozen=True)
class Planned:
    """Costs, request, measurement if wanted, plan, and cost reports of one or all policies."""

    costs: CostProfile
    request: PlanRequest
    measured: MeasuredPlan | None
    plan: Plan
    reports: tuple[CostReport | RefusedPolicy, ...]


def sgd(parameters: object) -> torch.optim.Optimizer:
    """Return SGD with momentum and a small learning rate, which the command line uses to time steps."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)  # type: ignore[arg-type]


def random_batch(shape: tuple[int, ...], batch_size: int, classes: int) -> Batch:
    """Return random inputs and random classes."""
    return torch.randn(batch_size, *shape), torch.randint(0, classes, (batch_size,))


def classes_of(model: nn.Module, shape: tuple[int, ...], most: int) -> int:
    """Return the number of classes of a model, at most ``most``: a custom model may have fewer than assumed."""
    try:
        with untouched(model), torch.no_grad():
            outputs = call_model(model.eval(), torch.randn(1, *shape))
    except Exception:
        # The first training step will report the problem.
        return most
    # A loss compares the first outputs with the targets.
    return min([most, *(scores.shape[1] for scores in class_scores(outputs)[:1] if scores.numel())])


def planned(
    model: nn.Module,
    shape: tuple[int, ...],
    batch_size: int,
    classes: int,
    budget: Budget,
    policy: str,
    importance: str,
    *,
    profile: Path | None = None,
    seed: int = 0,
    measure: bool = False,
    compare: bool = False,
    tell: Callable[[str], object] = lambda _: None,
) -> Planned:
    """Return the plan of one policy, and its costs; with ``compare``, also those of all other policies' plans.

    Costs and gradient fidelity of modes are measured once, for all policies together. ``tell`` is called with a
    message before each phase, because a phase may take seconds.

    Raises
    ------
    BudgetError
        If memory or uplink do not even admit the head, or the policy refuses the budget.
    PlanError
        If the policy does not apply to this model.
    ModelError, TrainingError
        If the model cannot train on such a batch.
    """
    IMPORTANCES.make(importance)
    names = [policy, *(name for name in policies() if compare and name != policy)]
    asked = {name: POLICIES.make(name) for name in names}
    batches = [random_batch(shape, batch_size, classes) for _ in range(2)]
    model.train()
    tell("measuring what each tensor group costs")
    try:
        costs = _costs(model, batches[0], profile, _modes(asked.values()))
    except (RuntimeError, ValueError) as error:
        if isinstance(error, ElasticError):
            raise
        raise ModelError(
            f"the model cannot train on a batch of shape {(batch_size, *shape)}: {first_line(error)}"
        ) from None
    # On a device, a fit must also load the code that this process has already loaded for measuring.
    costs = replace(costs, code_bytes=CODE_BYTES)
    options = TrainerOptions(importance=importance, timing=Timing(closed_loop=False), seed=seed)
    scores: dict[str, SelectionState] = {}

    def begun(each: Policy) -> Planner:
        """Return a planner that has begun a fit; policies with the same importance share its scores."""
        state = scores.setdefault(each.needs.own_importance or importance, SelectionState())
        planner = Planner(
            model, classification_loss, policy=each, budget=budget, options=options, state=state,
            optimizer=lambda: sgd(model.parameters()),
        )  # fmt: skip
        planner.begin(costs, 1, batches)
        if state.scores:
            planner.measure_fidelity(batches[-1])
        else:
            planner.measure_importance(batches)
        return planner

    tell(f"scoring, and planning by {policy}{', and timing steps' if measure else ''}")
    planner = begun(asked[policy])
    request = planner.request()
    check_feasible(request)
    measured, chosen = _chosen(planner, request, model, batches[0], measure=measure)
    reports: list[CostReport | RefusedPolicy] = []
    for number, name in enumerate(sorted(asked), start=1):
        tell(f"policy {name}, {number} of {len(asked)}")
        if name == policy:
            reports.append(cost_report(request, chosen))
            continue
        try:
            other = begun(asked[name]).request()
            reports.append(cost_report(other, asked[name].plan(other)))
        except (BudgetError, PlanError) as error:
            reports.append(RefusedPolicy(name, str(error)))
    return Planned(costs, request, measured, chosen, tuple(reports))


def _chosen(
    planner: Planner, request: PlanRequest, model: nn.Module, batch: Batch, *, measure: bool
) -> tuple[MeasuredPlan | None, Plan]:
    """Return the policy's plan, and its times if they are measured, which may correct it."""
    policy = planner.policy
    if not measure:
        return None, policy.plan(request)

    def time_it(plan: Plan) -> MeasuredPlan:
        ready = planner.with_channels(plan)
        return measure_plan(model, classification_loss, batch, sgd, ready)

    measured = plan_measured(policy, request, time_it)
    return measured, measured.plan


def _modes(asked: Iterable[Policy]) -> list[Mode]:
    """Return the distinct modes that the policies may choose."""
    return list(dict.fromkeys(mode for policy in asked for mode in policy.needs.modes))


def _costs(model: nn.Module, batch: Batch, path: Path | None, modes: Sequence[Mode]) -> CostProfile:
    def measure() -> CostProfile:
        return profile_model(model, classification_loss, batch, optimizer_fn=sgd)

    costs = (
        measure()
        if path is None
        else load_or_measure(path, profile_key(model, batch, sgd), measure)
    )
    return estimated_modes(costs, model, tuple(modes))
