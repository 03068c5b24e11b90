"""Choose the groups to train: ask the policy, and decide when to measure importance or to train everything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fl_elastic.budget import Budget, sendable
from fl_elastic.errors import PlanError, TrainingError
from fl_elastic.groups import Batch, LossFn, Mode
from fl_elastic.optimizers import shadow_of
from fl_elastic.planning import POLICIES, Plan, PlanRequest, Policy
from fl_elastic.planning.importance import IMPORTANCES, Probe
from fl_elastic.planning.importance.base import Scores
from fl_elastic.planning.importance.channels import CHANNEL_SCORES, ChannelScore, choose_channels
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import CODE_BYTES, code_to_load, mask_bytes
from fl_elastic.profiling.profile import Mask
from fl_elastic.training.options import TrainerOptions
from fl_elastic.training.selection import SelectionState

if TYPE_CHECKING:
    from fl_elastic.planning.importance.fidelity import Fidelity


_LOG = logging.getLogger("fl_elastic")
# Largest share of a fit's time, or of the steps that a probe serves, that one probe may take.
_PROBE_SHARE = 0.15
# Largest share of one fit's time that a probe may take under a speed-up; largest share of a deadline for choosing.
_FIT_SHARE, _CHOOSING_SHARE = 0.5, 0.5
# A later probe may take this share of the time of all steps since the last one. Until it may, earlier scores and
# the importance read from steps suffice.
_LATER_PROBE_SHARE = 0.01
# Steps that read the importance of what they train: one moves the weights, the next one's gradients score the move.
_STEPS_THAT_SCORE = 2
# Largest share of a deadline that making a plan may take. If it takes more, everything is trained, and the
# remembered time shrinks by the second factor.
_PLANNING_SHARE, _KEPT_PLANNING_TIME = 0.05, 0.9
# Kinds of modes whose update holds the whole group, so that a later plan of the fit may train any part of it.
_SEND_ALL = ("full", "filtered")
# Distinguishes the generator of full updates from the policy's.
_FULL_UPDATES = 0xDEE9
# Score by which channels are chosen if the policy names none.
_CHANNEL_SCORE = "fisher"


class Planner:
    """Asks a policy for plans, with scores that are measured when they are due.

    Parameters
    ----------
    model, loss_fn :
        As given to the trainer.
    policy : str or Policy
        A registered name, or an object with options of its own.
    budget : Budget
        What one fit may spend.
    options : TrainerOptions
        How to select groups.
    state : SelectionState
        Scores remembered from earlier fits.
    optimizer : callable
        Returns the real optimiser; a probe starts from a copy of its state.

    Attributes
    ----------
    memory : PolicyMemory
        What the policy remembers of this fit; it is stored in the state when the fit has succeeded.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        policy: str | Policy,
        budget: Budget,
        options: TrainerOptions,
        state: SelectionState,
        optimizer: Callable[[], torch.optim.Optimizer],
    ) -> None:
        self.policy = POLICIES.make(policy)
        self.importance = IMPORTANCES.make(self.policy.needs.own_importance or options.importance)
        self.budget = budget
        self.options = options
        self.state = state
        self.requested_steps = 1
        self._model, self._loss_fn = model, loss_fn
        self._optimizer = optimizer
        self._generator = np.random.default_rng(options.seed)
        # A separate generator, so that the number of a policy's draws does not affect which fits train everything.
        self._full_generator = np.random.default_rng([abs(options.seed), _FULL_UPDATES])
        self._fidelity: Fidelity | None = None
        self._costs: CostProfile | None = None
        self._reachable: int | None = None
        self._batches: Sequence[Batch] = ()
        self._last_probe: Probe | None = None
        self._first_plan: Plan | None = None
        self._measured_in_fit = False
        self._fits_at_pace: tuple[float, bool] | None = None
        self._code_bytes = CODE_BYTES
        self.based_on = ""
        self.memory = state.memory

    @cached_property
    def channel_score(self) -> ChannelScore:
        """The score by which channels are chosen in a group that is trained by channels."""
        return CHANNEL_SCORES.make(self.policy.needs.channel_score or _CHANNEL_SCORE)

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that this fit's plans choose among."""
        return [name for group in self._known_costs().graph.groups for name in group.parameters]

    @property
    def batches_needed(self) -> int:
        """Number of batches of one probe."""
        scored = self.importance.batches_needed if self.policy.needs.importance else 1
        chosen = self.channel_score.batches_needed if self.policy.needs.modes else 1
        return max(scored, chosen, 1)

    def begin(
        self,
        costs: CostProfile,
        requested_steps: int,
        batches: Sequence[Batch],
        budget: Budget | None = None,
        whole: CostProfile | None = None,
    ) -> None:
        """Start a fit with these costs, this number of steps, and the rest of the budget.

        Parameters
        ----------
        costs : CostProfile
            Costs of the trainable part.
        requested_steps : int
            Steps that share the budget.
        batches : sequence of batch
            Batches that the policy may look at.
        budget : Budget, optional
            What is left of the budget; by default all of it.
        whole : CostProfile, optional
            Costs of the whole model, if they differ: a speed-up is relative to its full step. If the policy could
            choose groups in the whole model but finds none above a cut, the last groups that fit are trained.

        Raises
        ------
        PlanError
            If the policy has no groups to choose from.
        """
        budget = self.budget if budget is None else budget
        if whole is not None and whole is not costs:
            budget = _relative_to(costs, whole, budget)
            if self.options.part.cut:
                self._choose_above(whole, costs)
        self.policy.refuse_misfit(costs)
        self.requested_steps = requested_steps
        self.budget = budget
        # A simulated device has a process of its own, whatever code this one has loaded.
        self._code_bytes = code_to_load() if self.options.timing.closed_loop else CODE_BYTES
        memory = self.budget.memory
        if memory is not None and memory < code_to_load() == self._code_bytes == CODE_BYTES:
            _LOG.warning(
                "a memory budget of %.3g MB is less than the %.0f MB of code that a process loads for its first "
                "steps: this fit may exceed the budget by that much; later fits of this process do not",
                memory / 1e6, CODE_BYTES / 1e6,
            )  # fmt: skip
        self.go_on(costs, None)
        self._batches = batches
        self._first_plan = None
        self._measured_in_fit = False
        self.state.fit_to(costs.group_names)
        self.memory = self.policy.observe(self.probe(batches), costs, self.state.memory)

    def _choose_above(self, whole: CostProfile, costs: CostProfile) -> None:
        try:
            self.policy.refuse_misfit(costs)
        except PlanError as error:
            self.policy.refuse_misfit(whole)
            _LOG.info(
                "above the cut at %r the last groups that fit are trained: %s",
                self.options.part.cut,
                error,
            )
            self.policy = POLICIES.make("last_k")

    def go_on(self, costs: CostProfile, reachable: int | None) -> None:
        """Plan with these costs from now on, and only with the first ``reachable`` groups."""
        rate = self.budget.sending_seconds_per_byte(self.requested_steps)
        costs = replace(costs.with_sending(rate), code_bytes=self._code_bytes)
        self._costs, self._reachable = costs, reachable
        self._fits_at_pace = self._last_probe = None

    def probe_due(self, correction: float, left_seconds: float = np.inf) -> bool:
        """Return whether importance must be measured now: never while everything fits at the measured pace.

        A policy that is defined by its own importance measures it even then, regardless of the cost of its probes
        over many fits. No probe may take more than a fixed share of ``left_seconds``, which is infinite for the
        first.
        """
        if not (self.policy.needs.importance and self.state.probe_due()):
            return False
        if self.probe_seconds > _PROBE_SHARE * left_seconds:
            return False
        if self.policy.needs.own_importance is not None:
            return not self._choosing_takes_too_long
        if self.state.scores and not self._another_probe_is_earned():
            return False
        return self._can_pay_for_probe() and not self._everything_fits(correction)

    @property
    def full_step_fits_memory(self) -> bool:
        """Whether a full step, as a probe takes it, stays within the memory budget."""
        costs, memory = self._known_costs(), self.budget.memory
        return memory is None or mask_bytes(costs, np.ones(len(costs), dtype=bool)) <= memory

    @property
    def probe_seconds(self) -> float:
        """Predicted seconds of one probe of importance."""
        return self.batches_needed * self._known_costs().full_step_seconds

    @property
    def _choosing_takes_too_long(self) -> bool:
        """Whether choosing would take too much of a deadline, including passes over single examples."""
        deadline = self.budget.deadline
        if deadline is None:
            return False
        takes_examples = [self.importance.by_example]
        if self.policy.needs.modes:
            takes_examples.append(self.channel_score.by_example)
        costs = self._known_costs()
        examples = costs.key.rows
        passes = self.batches_needed + examples * any(takes_examples)
        return passes * costs.full_step_seconds > _CHOOSING_SHARE * deadline

    def _another_probe_is_earned(self) -> bool:
        """Return whether one more probe costs little compared with all steps since the last one."""
        full = self._known_costs().full_step_seconds
        allowed = self.budget.allowed_step_seconds(full, self.requested_steps)
        since = self.state.steps_since_probe * min(allowed, full)
        return self.probe_seconds <= _LATER_PROBE_SHARE * since

    def _can_pay_for_probe(self) -> bool:
        """Return whether a probe fits the memory and leaves most of the time; otherwise known scores are used."""
        if not self.full_step_fits_memory:
            return False
        full = self._known_costs().full_step_seconds
        allowed = self.budget.allowed_step_seconds(full, self.requested_steps)
        if np.isinf(allowed):
            return True
        probe, steps = self.probe_seconds, self.requested_steps
        if self.budget.deadline is not None or not self.state.known:
            return probe <= _PROBE_SHARE * allowed * steps
        # A speed-up holds over many fits, and a probe serves all steps until the next probe.
        served = max(steps, self.state.probe_every)
        return probe <= min(_FIT_SHARE * steps, _PROBE_SHARE * served) * allowed

    def measure_importance(self, batches: Sequence[Batch]) -> bool:
        """Probe the importance of every group; return whether importance has drifted."""
        self._batches = batches
        self.measure_fidelity(batches[-1])
        self._measured_in_fit = True
        probe = self._last_probe = self.probe(batches)
        found = self.importance.score(probe)
        # Groups that may not be trained now were not probed and keep their scores.
        scores = np.full(len(self.state.names), np.nan)
        scores[: len(found)] = found
        return self.state.absorb(scores)

    @property
    def learns_from_steps(self) -> bool:
        """Whether the training steps of a fit measure the importance of the groups that they train."""
        return self.policy.needs.importance is True and self.importance.read_from_steps

    def learn(self, scores: Scores) -> None:
        """Merge scores from training steps, shape (N,), NaN for groups without one."""
        together = bool(np.isfinite(scores[: self._reachable]).all())
        self._measured_in_fit |= together
        # The probe is outdated, because steps were taken since.
        self._last_probe = None
        self.state.absorb(scores, together=together)

    def after_backward(
        self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        """Let the policy look at a step's gradients."""
        self.memory = self.policy.after_backward(parameters, optimizer, self.memory)

    def measure_fidelity(self, batch: Batch) -> None:
        """Measure how much of the gradient the policy's cheaper modes keep now, if the policy uses this."""
        if self.policy.needs.fidelity:
            # Imported here: few policies read it.
            from fl_elastic.planning.importance.fidelity import measure_fidelity

            self._fidelity = measure_fidelity(
                self._model,
                self._loss_fn,
                batch,
                self._known_costs().graph,
                self.policy.needs.modes,
            )

    def plan(self, correction: float) -> Plan:
        """Return the policy's plan at the measured pace, with the channels of its groups.

        If sending is limited, later plans of a fit train parts of what the first one trains, because the update
        contains everything that any of them trained.
        """
        first, request = self._first_plan, self.request(correction)
        if first is not None and any(transform.runs_part for transform in first.transforms):
            # Steps run only the part that is sent, so the part does not change within a fit.
            return first
        if first is not None:
            request = replace(request, importance=request.importance * first.mask)
        plan = self.policy.plan(request)
        self.based_on = self._basis(correction)
        plan = self.with_channels(plan if first is None else _part_of(first, plan, request))
        if first is not None:
            chosen = {name: first.channels.get(name, of) for name, of in plan.channels.items()}
            return replace(_choosing(plan, chosen), sending_seconds=first.sending_seconds)
        lasting = any(transform.lasts_a_fit for transform in plan.transforms)
        if lasting or request.budget.uplink is not None or request.sending_seconds_per_byte > 0:
            self._first_plan = plan
        return plan

    def pay_for_plan(self) -> float:
        """Subtract the simulated time of making a plan from the budget; return these seconds.

        It is 0 if everything fits or the policy has nothing to select.

        Raises
        ------
        BudgetError
            If nothing is left of a deadline.
        """
        seconds = self.options.timing.planning_seconds
        if not seconds or not self.policy.reduces_uplink:
            return 0.0
        if self._everything_fits(1.0):
            return 0.0
        full = self._known_costs().full_step_seconds
        self.budget = self.budget.after(seconds, full, self.requested_steps)
        self._fits_at_pace = None
        return seconds

    def full_update_plan(self, affordable: Callable[[Plan], int]) -> Plan | None:
        """Return the plan that trains everything in fewer steps if this fit should, else None.

        A fit trains everything if a random draw says so; if no importance is known and a probe is too expensive,
        because two full steps measure it; and if choosing would take more than a twentieth of a deadline. It does
        not if it cannot pay for full steps.

        Parameters
        ----------
        affordable : callable
            Returns how many steps of a plan the fit pays for.
        """
        if not self.policy.needs_coverage:
            return None
        due = self.state.draw_full_update(self.options.full_update_every, self._full_generator)
        if self._everything_fits(1.0):
            return None
        steps, basis = (1, "everything, in turn") if due else self._full_steps_instead()
        if not steps:
            return None
        request = self.request(1.0)
        mask = self._longest_left_out(request)
        if mask is None:
            # The policy raises the error.
            return None
        plan = request.plan_of_mask("full", mask)
        if affordable(plan) < steps:
            return None
        self.based_on = basis
        return plan

    def _full_steps_instead(self) -> tuple[int, str]:
        """Return how many full steps are better than a choice, and the basis to report; 0 if a choice is better."""
        if not (self.policy.needs.importance and self.options.full_update_every):
            return 0, ""
        if self._choosing_takes_too_long and (self.policy.needs.modes or not self.state.scores):
            return 1, "everything, as choosing takes too long"
        if self.policy.needs.own_importance is not None:
            return 0, ""
        if self.learns_from_steps and not self.state.scores and not self._can_pay_for_probe():
            # No importance is known, and only full steps can measure it.
            return _STEPS_THAT_SCORE * self.options.accumulate, "everything, to learn its worth"
        planning, deadline = self.state.planning_seconds, self.budget.deadline
        if deadline and planning > _PLANNING_SHARE * deadline:
            # Shrink the remembered time, so that planning is tried again some day.
            self.state.planning_seconds = _KEPT_PLANNING_TIME * planning
            return 1, "everything, as choosing takes too long"
        return 0, ""

    def cheapest_plan(self, plan: Plan) -> Plan:
        """Return the plan that trains only the head, or ``plan`` if the policy cannot train less."""
        if not self.policy.reduces_uplink:
            return plan
        request = self.request(1.0)
        self.based_on = "the head, as choosing took all of the time"
        return request.plan_of_mask("head", request.head_mask())

    def with_channels(self, plan: Plan) -> Plan:
        """Return the plan with its groups' channels chosen; without a probe if the policy chose all of them."""
        pairs = zip(plan.groups, plan.modes, strict=True)
        if not any(mode.kind == "channels" and g.name not in plan.channels for g, mode in pairs):
            return plan
        graph = self._known_costs().graph
        scores = self.channel_score.once(self._probe_now(), graph)
        return _choosing(plan, {**choose_channels(plan.modes, graph, scores), **plan.channels})

    def _probe_now(self) -> Probe:
        """Return the last probe of importance with its results, or a new one if steps were taken since."""
        last = self._last_probe
        if last is None or self.state.steps_since_probe or last.batches is not self._batches:
            return self.probe(self._batches)
        return last

    def _longest_left_out(self, request: PlanRequest) -> Mask | None:
        """Return a mask of all groups; if these exceed memory or uplink, of those left out for longest that fit."""
        everything = np.ones(len(request.profile), dtype=bool)
        if request.fits_bytes(everything):
            return everything
        mask = request.head_mask()
        if not request.fits_bytes(mask):
            return None
        for group in np.argsort(-np.array(self.state.left_out), kind="stable").tolist():
            if not mask[group]:
                mask[group] = True
                mask[group] = request.fits_bytes(mask)
        return mask

    def probe(self, batches: Sequence[Batch]) -> Probe:
        """Return the object through which an importance score looks at model and batches."""
        return Probe(
            model=self._model,
            loss_fn=self._loss_fn,
            groups=self._known_costs().graph.groups[: self._reachable],
            batches=batches,
            shadow_optimizer=self._shadow_optimizer,
            generator=self._generator,
        )

    def _known_costs(self) -> CostProfile:
        if self._costs is None:
            raise TrainingError("there is no cost profile before the first fit")
        return self._costs

    def _everything_fits(self, correction: float) -> bool:
        """Return whether all groups fit; cached per costs and pace, because it is asked after every step."""
        if self._fits_at_pace is None or self._fits_at_pace[0] != correction:
            request = self.request(correction)
            everything = np.ones(len(request.profile), dtype=bool)
            self._fits_at_pace = correction, request.fits(everything)
        return self._fits_at_pace[1]

    def _basis(self, correction: float) -> str:
        """Return the basis of a plan at this pace, see `FitReport.based_on`."""
        if self.policy.basis is not None:
            return self.policy.basis
        if not self.policy.needs.importance:
            return "fixed rule"
        if self.policy.needs.own_importance is None and self._everything_fits(correction):
            return "everything fits"
        if bool((np.nan_to_num(self.state.measured) > 0).any()):
            return "measured importance" if self._measured_in_fit else "remembered importance"
        return "size and turns"

    def _shadow_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return a copy of the optimiser, state included, that drives ``parameters``."""
        probed = {
            name
            for group in self._known_costs().graph.groups[: self._reachable]
            for name in group.parameters
        }
        # In the order of importance scores; parameters frozen for good, as below a stream's features, are left out.
        own = [
            parameter
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad or name in probed
        ]
        return shadow_of(self._optimizer(), zip(own, parameters, strict=True))

    def request(self, correction: float = 1.0) -> PlanRequest:
        """Return the request to the policy, at the measured pace."""
        costs = self._known_costs()
        # A policy that always sends everything raises its own error if that takes too long.
        budget = sendable(self.budget) if self.policy.reduces_uplink else self.budget
        return PlanRequest(
            profile=costs,
            budget=budget,
            importance=_worth_for(self.policy, self.state, costs),
            steps=self.requested_steps,
            correction=correction,
            fidelity=self._fidelity,
            reachable=self._reachable,
            sending_seconds_per_byte=budget.sending_seconds_per_byte(self.requested_steps),
            generator=self._generator,
            memory=self.memory,
        )


def _relative_to(costs: CostProfile, whole: CostProfile, budget: Budget) -> Budget:
    """Return the budget with a speed-up over the whole model's steps restated over the steps of ``costs``."""
    if budget.speedup is None:
        return budget
    speedup = budget.speedup * costs.full_step_seconds / whole.full_step_seconds
    return replace(budget, speedup=max(speedup, 1.0))


def _worth_for(policy: Policy, state: SelectionState, costs: CostProfile) -> Scores:
    """Return the groups' worth to ``policy`` now; without the exploration bonus if it has its own importance."""
    if policy.needs.own_importance is not None or not policy.needs.importance:
        return np.nan_to_num(state.measured) if state.names else np.zeros(len(costs))
    return state.worth(costs.parameter_bytes)


def _part_of(first: Plan, plan: Plan, request: PlanRequest) -> Plan:
    """Return the plan without groups and modes whose changes the first plan's update does not hold."""
    modes = [
        mode if before.kind in _SEND_ALL or mode == before else Mode.FROZEN
        for mode, before in zip(plan.modes, first.modes, strict=True)
    ]
    if all(mode.is_frozen for mode in modes):
        return first
    part = request.plan(plan.policy, modes)
    trained = {g.name for g, mode in zip(part.groups, modes, strict=True) if not mode.is_frozen}
    layers = plan.lean_layers
    if layers is None:
        return part
    chosen = {name: channels for name, channels in plan.channels.items() if name in trained}
    return part.having(replace(layers, channels=chosen))


def _choosing(plan: Plan, channels: Mapping[str, tuple[int, ...]]) -> Plan:
    """Return the plan, training these channels of its groups."""
    layers = plan.lean_layers
    if layers is None and not channels:
        return plan
    # Imported here: few plans train channels.
    from fl_elastic.planning.lean_layers import LeanLayers

    return plan.having(replace(layers or LeanLayers(), channels=channels))
