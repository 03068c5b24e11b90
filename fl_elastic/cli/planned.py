"""Profile, score and plan one model on random data, for the command line and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
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
from fl_elastic.planning.importance import CHANNEL_SCORES, IMPORTANCES, Probe
from fl_elastic.planning.importance.base import Scores
from fl_elastic.planning.importance.fidelity import Fidelity, measure_fidelity
from fl_elastic.profiling import CostProfile, profile_model
from fl_elastic.profiling.estimate import estimated_modes
from fl_elastic.profiling.memory import CODE_BYTES
from fl_elastic.profiling.profile import profile_key
from fl_elastic.profiling.store import load_or_measure
from fl_elastic.registry import first_line
from fl_elastic.training import SelectionState
from fl_elastic.training.measured import MeasuredPlan, measure_plan, plan_measured
from fl_elastic.training.planner import CHANNEL_SCORE, with_channels, worth_for


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
    """Return SGD with momentum at a small rate, with which the command line times steps."""
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

    Costs and gradient fidelity of modes are measured once, for all policies together. ``tell`` is called with what
    is done next, since that may take seconds.

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
    # On a device, the process of a fit has not yet loaded the code that this process has loaded to measure.
    costs = replace(costs, code_bytes=CODE_BYTES)
    maker = _Requests(model, costs, batches, budget, importance, seed)
    asked[policy].refuse_misfit(costs)
    check_feasible(maker.request_for(asked[policy]))
    tell(f"scoring, and planning by {policy}{', and timing steps' if measure else ''}")
    request, measured, chosen = _chosen(maker, asked[policy], measure=measure)
    reports: list[CostReport | RefusedPolicy] = []
    for number, name in enumerate(sorted(asked), start=1):
        tell(f"policy {name}, {number} of {len(asked)}")
        own = name == policy
        reports.append(cost_report(request, chosen) if own else _report(maker, name, asked[name]))
    return Planned(costs, request, measured, chosen, tuple(reports))


class _Requests:
    """Makes the request of each policy with the importance that it uses; no measurement is made twice."""

    def __init__(
        self,
        model: nn.Module,
        profile: CostProfile,
        batches: Sequence[Batch],
        budget: Budget,
        importance: str,
        seed: int,
    ) -> None:
        self.model, self.batches = model, batches
        self._profile, self._budget = profile, budget
        self._importance, self._seed = importance, seed
        self._states: dict[str, SelectionState] = {}
        self._fidelity: Fidelity | None = None
        self._found: dict[type, Any] = {}

    def request_for(self, policy: Policy) -> PlanRequest:
        """Return the request for ``policy``, with a random generator of its own."""
        return PlanRequest(
            profile=self._profile,
            budget=self._budget,
            importance=self._worth_for(policy),
            fidelity=self._known_fidelity() if policy.needs.fidelity else None,
            generator=np.random.default_rng(self._seed),
        )

    def with_channels(self, policy: Policy, plan: Plan) -> Plan:
        """Return the plan with the channels of its groups chosen, so that it can be trained."""
        score = CHANNEL_SCORES.make(policy.needs.channel_score or CHANNEL_SCORE)
        return with_channels(
            plan, self._profile.graph, lambda: score, lambda: self._probe(score.batches_needed)
        )

    def _worth_for(self, policy: Policy) -> Scores:
        name = policy.needs.own_importance or self._importance
        if name not in self._states:
            score, state = IMPORTANCES.make(name), SelectionState()
            state.fit_to(self._profile.group_names)
            state.absorb(score.score(self._probe(score.batches_needed)))
            self._states[name] = state
        return worth_for(policy, self._states[name], self._profile)

    def _known_fidelity(self) -> Fidelity | None:
        known = self._profile.modes
        if self._fidelity is None and known is not None:
            self._fidelity = measure_fidelity(
                self.model, classification_loss, self.batches[-1], self._profile.graph, known.modes
            )
        return self._fidelity

    def _probe(self, batches: int) -> Probe:
        if batches > len(self.batches):
            raise PlanError(f"a score asks for {batches} batches, {len(self.batches)} are there")
        return Probe(
            self.model, classification_loss, self._profile.graph.groups, self.batches, sgd,
            np.random.default_rng(self._seed), self._found,
        )  # fmt: skip


def _chosen(
    maker: _Requests, policy: Policy, *, measure: bool
) -> tuple[PlanRequest, MeasuredPlan | None, Plan]:
    request = maker.request_for(policy)
    if not measure:
        return request, None, policy.plan(request)

    def time_it(plan: Plan) -> MeasuredPlan:
        ready = maker.with_channels(policy, plan)
        return measure_plan(maker.model, classification_loss, maker.batches[0], sgd, ready)

    measured = plan_measured(policy, request, time_it)
    return request, measured, measured.plan


def _report(maker: _Requests, name: str, policy: Policy) -> CostReport | RefusedPolicy:
    request = maker.request_for(policy)
    try:
        policy.refuse_misfit(request.profile)
        return cost_report(request, policy.plan(request))
    except (BudgetError, PlanError) as error:
        return RefusedPolicy(name, str(error))


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
