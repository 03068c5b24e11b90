"""The trainer: measure costs, choose groups, train within the budget, and return the update.

Calls of one fit::

    ElasticTrainer.fit              refuses what cannot train; restores everything if the fit fails
      FitBatches.read               batches.py: the first batches, and how many steps are asked for
      FitStart                      fit_start.py: copies of all that the fit may change
      _fit
        costs_for                   costs.py: the known cost profile, or an estimate
        Planner.begin               planner.py: these costs, steps and what is left of the budget
        TrainingStep, BudgetControl step.py, budget_control.py: take a step; count the steps that fit the budget
        Fit.run                     fit.py: phase by phase
          _phases                     Planner asks the policy for a plan, and when to choose again
          _train                      apply_plan.py: everything outside the plan is frozen
            _take_step                TrainingStep.take, timed by StepLog, counted by BudgetControl
        _take_over                  keeps the costs, scores and trained tensors of the fit
      FitReport                     report.py
    ElasticTrainer.update           changes.py: the deltas of what was trained
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fl_elastic.budget import Budget
from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.loss_settings import example_counter, is_summed
from fl_elastic.groups.trainable import flags_of
from fl_elastic.optimizers import (
    KeptOptimizer,
    OptimizerFn,
    adds_noise,
)
from fl_elastic.planning import POLICIES, Plan, Policy
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.clock import Clock, clock_for
from fl_elastic.profiling.profile import model_device
from fl_elastic.training.apply_plan import held_in_eval
from fl_elastic.training.batches import FitBatches
from fl_elastic.training.budget_control import BudgetControl
from fl_elastic.training.changes import Trained, under_every_name
from fl_elastic.training.costs import costs_for, planned_with, refined
from fl_elastic.training.fit import Fit
from fl_elastic.training.fit_start import FitStart
from fl_elastic.training.free_memory import FreeMemory
from fl_elastic.training.options import (
    ForwardOptions,
    TrainerOptions,
    check_parts,
    eager,
    refuse_untrainable,
    say_what_loss_keeps,
    whole_epochs,
)
from fl_elastic.training.planner import Planner
from fl_elastic.training.report import FitReport, StepLog
from fl_elastic.training.selection import SelectionState
from fl_elastic.training.step import ProximalPull, StepImportance, TrainingStep
from fl_elastic.update import Manifest, PartialUpdate

if TYPE_CHECKING:
    from fl_elastic.training.elastic_forward import ElasticForward


_LOG = logging.getLogger("fl_elastic")
# A fit that takes more than this multiple of its deadline logs a warning; clocks and steps vary by less.
_OVERRUN = 1.15


class ElasticTrainer:
    """Trains the best part of a model that fits a budget.

    Parameters
    ----------
    model : nn.Module
        Trained in place, on its device. Parameters that do not require a gradient are left out.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` returning a scalar tensor.
    optimizer_fn : callable
        ``optimizer_fn(parameters)`` returning a torch optimiser; called once, and once per probe.
    budget : Budget
        What one fit may spend. If it limits memory or time, torch's compiler is not loaded in this process until
        something is compiled: optimisers would otherwise load its hundred megabytes without using it.
    policy : str or Policy
        A registered name, or an object with options of its own.
    profile : CostProfile, optional
        Measured costs. If missing or of another model, batch or device, costs are estimated on the first batch,
        which takes about one and a half steps that are charged to the budget, and corrected while training.
    options : TrainerOptions, optional
        Everything else.
    state : SelectionState, optional
        Scores remembered from earlier fits of the same client.
    manifest : Manifest, optional
        The tensors that updates may hold; by default ``Manifest.of(model)`` at the beginning of a fit.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> data = [(torch.randn(4, 8), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
    >>> trainer = ElasticTrainer(
    ...     model, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1),
    ...     budget=Budget(), policy="head")
    >>> trainer.fit(data).steps
    3
    >>> sorted(trainer.update().deltas)
    ['2.bias', '2.weight']
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer_fn: OptimizerFn,
        *,
        budget: Budget,
        policy: str | Policy = "elastic",
        profile: CostProfile | None = None,
        options: TrainerOptions | None = None,
        state: SelectionState | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        check_parts(model, loss_fn, optimizer_fn, budget)
        if budget.memory is not None or budget.deadline is not None:
            # The first optimiser would load the compiler, which takes a second, and more memory than many budgets.
            from fl_elastic.training.lean_start import without_compiler

            without_compiler()
        self.model = model = eager(model)
        say_what_loss_keeps(model, loss_fn)
        self.loss_fn = loss_fn
        self.optimizer_fn = optimizer_fn
        self.budget = budget
        self.options = options or TrainerOptions()
        self.profile = profile
        self.state = state or SelectionState()
        self._given_manifest = manifest
        self._flags = flags_of(model)
        self.manifest = manifest or Manifest.of(model)
        self.plan: Plan | None = None
        self._optimizing = KeptOptimizer(model, optimizer_fn)
        self.planner = Planner(
            model, loss_fn, policy=policy, budget=budget, options=self.options,
            state=self.state, optimizer=self._optimizing,
        )  # fmt: skip
        self._trained: Trained | None = None
        # Time that the last fit took after its last step; the next fit reserves as much.
        self._closing_seconds: float | None = None
        self._held_bytes, self._began_anew = 0.0, False

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimiser, kept from fit to fit; None before the first."""
        return self._optimizing.made

    @property
    def may_train(self) -> list[str]:
        """Names of the parameters that the last fit could choose among, except those excluded from training."""
        return list(under_every_name(self.model, Counter(self.planner.parameters)))

    def fit(self, loader: Iterable[Batch], epochs: int = 1) -> FitReport:
        """Train for ``epochs`` passes over ``loader``, or for as many steps as the budget allows.

        Raises
        ------
        TrainingError
            If the loader is empty or can be read only once, a batch does not fit the model, or a loss or a trained
            tensor is not finite.
        ModelError
            If the model cannot be trained here at all.
        BudgetError
            If memory or uplink do not even suffice for the head, or the time does not suffice for one step.

        Notes
        -----
        After any failure, also in the loader or the loss function, model and optimiser are as before the fit.
        """
        if not torch.is_grad_enabled():
            raise TrainingError(
                "gradients are switched off: call fit outside of torch.no_grad() and torch.inference_mode()"
            )
        refuse_untrainable(self.model)
        epochs = whole_epochs(epochs)
        self._follow_flags()
        optimizer, policy = self._optimizing(), self.planner.policy
        if adds_noise(optimizer) and policy.reads_data:
            raise _revealing_choice(optimizer, policy)
        timing, deadline = self.options.timing, self.budget.deadline
        device, needed = model_device(self.model), self.planner.batches_needed
        # A speed-up concerns only the steps; a deadline also covers the time in which the loader reads.
        timed = deadline is not None and timing.closed_loop
        clock = clock_for(device, "wall" if timed and timing.clock == "auto" else timing.clock)
        began = clock()
        data = FitBatches.read(
            loader, epochs, device, example_counter(self.loss_fn, self.options.count_examples),
            needed, clock, deadline, timed=timed,
        )  # fmt: skip
        log = StepLog(data.shape, clock, began if timed else clock())
        start = FitStart(self.model, self.manifest, self._optimizing)
        self._trained = Trained(start.weights)
        kept = held_in_eval(self.model) if self.options.part.keep_statistics else nullcontext()
        try:
            with kept:
                return self._fit(data, start, log)
        except BaseException:
            # Also on a loader's error or Ctrl-C, so that nobody uses half-trained weights.
            start.restore()
            raise
        finally:
            data.passes.close()
            for parameter in self.model.parameters():
                parameter.grad = None

    def _follow_flags(self) -> None:
        """Adapt to the present ``requires_grad`` flags: the owner may freeze or replace layers between fits."""
        flags = flags_of(self.model)
        if flags != self._flags:
            self._flags = flags
            self.manifest = self._given_manifest or Manifest.of(self.model)
            self._optimizing.follow()

    def _hold_state(self, last: Plan) -> None:
        """Drop the optimiser's state after a fit if state and another such fit exceed the memory budget.

        A fit holds the whole state, and a copy of the part that it changes, which it restores if it fails.
        """
        memory = self.budget.memory
        if memory is None:
            return
        held = self._optimizing.state_bytes
        beside = last.predicted_step_bytes - self._held_bytes
        if held and held + beside > memory and self._optimizing.begin_anew():
            if not self._began_anew:
                _LOG.warning(
                    "the optimiser begins anew in each fit: its state of %.3g MB and a fit of %.3g MB together "
                    "exceed the memory budget of %.3g MB",
                    held / 1e6, beside / 1e6, memory / 1e6,
                )  # fmt: skip
            held, self._began_anew = 0.0, True
        self._held_bytes = held

    def _fit(self, data: FitBatches, start: FitStart, log: StepLog) -> FitReport:
        """Determine the costs of steps, train phase by phase, and keep the results."""
        options, clock, steps = self.options, log.clock, data.requested_steps
        copied, known = clock(), self.profile
        priced = self.profile = costs_for(
            self.planner.policy, known, self.model, self.loss_fn, data.first[0],
            optimizer_fn=self.optimizer_fn, budget=self.budget, options=options,
        )  # fmt: skip
        estimating_seconds = options.timing.profile_seconds
        if options.timing.closed_loop:
            estimating_seconds = clock() - copied if priced is not known else 0.0
        profile = priced.accumulated(options.accumulate)
        # Reading a batch takes the same time whatever the plan.
        loading = profile.fixed_seconds + (data.loading_seconds or 0.0)
        profile = replace(profile, fixed_seconds=loading, held_bytes=self._held_bytes)
        above = profile.graph.groups_above(options.part.cut) if options.part.cut else None
        runs_prefix = options.forward is not None or self.planner.policy.needs_eval_prefix
        with self._prefix(data, above, clock) if runs_prefix else nullcontext() as forward:
            costs = planned_with(profile, forward, above, options.part.kept_head)
            budget = self.budget.after(estimating_seconds, profile.full_step_seconds, steps)
            self.planner.begin(costs, steps, data.first, budget, profile)
            step = self._step(data, start, costs, forward, clock)
            fit = Fit(
                self.planner, step, start, profile, self._control(data, profile, budget), log,
                None if self.budget.memory is None else FreeMemory(self.budget.memory),
                self.budget, data.first, above, data.loading_seconds,
            )  # fmt: skip
            fit.charge_start(estimating_seconds, copied, self._closing_seconds)
            fit.run(data.passes)
            report = self._take_over(fit, data, priced)
            self._closing_seconds = clock() - log.ended
            self._warn_of_overrun(report, clock() - log.began, data)
            return report

    def _prefix(self, data: FitBatches, above: int | None, clock: Clock) -> closing[ElasticForward]:
        """Return the object that runs the frozen prefix as inference; closing it frees features kept in memory."""
        # Imported here: most fits run the whole model in each step.
        from fl_elastic.training.elastic_forward import ElasticForward

        return closing(
            ElasticForward(
                self.model, self.options.forward or ForwardOptions(),
                examples=data.distinct_examples, epochs=data.epochs, clock=clock,
                groups_above=above,
            )
        )  # fmt: skip

    def _step(
        self,
        data: FitBatches,
        start: FitStart,
        costs: CostProfile,
        forward: ElasticForward | None,
        clock: Clock,
    ) -> TrainingStep:
        """Return the object that takes the steps, and reads importance from them if the policy uses it."""
        planner, worth = self.planner, None
        watch = planner.after_backward if planner.policy.reads_steps else None
        if planner.learns_from_steps:
            worth = StepImportance(self.model, start.before, costs.graph.groups)
        pull = ProximalPull.towards_present(self.model, self.options.proximal)
        return TrainingStep(
            self.model, self.loss_fn, self._optimizing, pull, clock,
            forward=forward, worth=worth, accumulate=self.options.accumulate,
            watch=watch,
        )  # fmt: skip

    def _control(self, data: FitBatches, profile: CostProfile, budget: Budget) -> BudgetControl:
        """Return the object that counts for how many steps the budget pays."""
        part, full, steps = self.options.part, profile.full_step_seconds, data.requested_steps
        return BudgetControl(
            budget.allowed_step_seconds(full, steps) * steps,
            steps,
            correct=self.options.timing.closed_loop,
            open_ended=not data.size.ends,
            relative=budget.deadline is None,
            estimated=profile.estimated,
            full_seconds=full,
            # No full steps are taken if a part of the model is never trained.
            times_full_steps=not (part.cut or part.kept_head)
            and self.planner.full_step_fits_memory,
        )

    def _take_over(self, fit: Fit, data: FitBatches, priced: CostProfile) -> FitReport:
        """Keep the trained tensors, measured costs and policy memory of a fit; return its report."""
        step, part, num_examples = fit.step, self.options.part, data.counted()
        whole_model = not (part.cut or part.kept_head)
        measures = fit.profile.estimated and self.options.timing.closed_loop
        if measures and step.forward is None and whole_model:
            measured = _refined(priced.accumulated(self.options.accumulate), fit)
            self.profile = replace(
                measured,
                optimizer_seconds=measured.optimizer_seconds * step.accumulate,
                optimizer_bytes_per_weight=priced.optimizer_bytes_per_weight,
            )
        fit.start.check_moves(fit.log.tensor_steps)
        self.plan = fit.plan
        self._hold_state(fit.plan)
        plans = tuple(plan for _, plan in fit.plans)
        held = {} if step.opener is None else step.opener.held
        self._trained = Trained(
            fit.start.weights, fit.log.tensor_steps, plans, held, num_examples,
            tuple(sorted(fit.stayed_here)),
        )  # fmt: skip
        self.state.trained(np.any([plan.mask for plan in plans], axis=0).tolist())
        self.state.memory = self.planner.memory
        if step.forward is not None:
            step.forward.forget_others(data.loader)
        report = self._report(fit, num_examples, data.epochs)
        step.finalize()
        for transform in fit.plan.transforms:
            transform.finished(self.model, fit.plan, self._optimizing())
        return report

    def _warn_of_overrun(self, report: FitReport, took: float, data: FitBatches) -> None:
        """Warn if a fit took longer than its deadline."""
        deadline = self.budget.deadline
        if data.loading_seconds is not None and deadline is not None and took > _OVERRUN * deadline:
            _LOG.warning(
                "the fit took %.3g s, its deadline was %.3g s: %.3g s of it for %s steps, the rest for estimating, "
                "choosing and preparing. Allow more time; later fits of this model need no estimate",
                took, deadline, report.seconds, report.steps,
            )  # fmt: skip

    def _report(self, fit: Fit, num_examples: int, epochs: int) -> FitReport:
        control, log, forward = fit.control, fit.log, fit.step.forward
        known = zip(self.state.names, self.state.scores, strict=False)
        last_epoch = control.requested_steps // epochs
        return FitReport(
            plan=fit.plan,
            plans=tuple(fit.plans),
            steps=control.steps,
            requested_steps=max(control.requested_steps, control.steps),
            seconds=log.seconds,
            selection_seconds=log.selection_seconds,
            predicted_seconds=log.predicted_seconds,
            step_seconds=log.median_step_seconds,
            full_step_seconds=fit.profile.full_step_seconds,
            loss=log.mean_loss(last_epoch, summed=is_summed(self.loss_fn)),
            losses=tuple(log.losses),
            importance={name: score for name, score in known if score is not None},
            num_examples=num_examples,
            forward=None if forward is None else forward.report(),
            full_ratio=control.full_ratio,
            choosing_seconds=log.choosing_seconds,
            based_on=self.planner.based_on,
            preparing_seconds=log.preparing_seconds,
            mean_work=control.mean_work,
        )

    def update(self, base_version: int = 0) -> PartialUpdate:
        """Return the changes of the last fit, relative to the weights that it started from.

        The update holds each parameter that was trained for at least one step, and each running statistic that the
        training steps updated, with the number of those steps. For a tensor that every plan of the fit trained only
        in part (by channels, or in windows), ``parts`` holds masks of that part.

        Raises
        ------
        TrainingError
            If nothing was fitted yet, a weight is no longer finite, or the forward pass has changed a tensor that
            does not travel.
        """
        if self._trained is None:
            raise TrainingError("there is no update before the first fit")
        return self._trained.update(self.model, self.manifest, base_version)


def _refined(profile: CostProfile, fit: Fit) -> CostProfile:
    """Return the profile scaled to the fit's measurements; if steps run only a part, to those of full passes."""
    if not any(transform.runs_part for transform in fit.plan.transforms):
        loading = fit.profile.fixed_seconds - profile.fixed_seconds
        planned = fit.plan.predicted_step_seconds - loading
        taken = fit.control.recent_step_seconds - loading
    else:
        planned = profile.full_step_seconds
        taken = planned * (fit.control.full_ratio or 0.0)
    return refined(profile, fit.control.full_ratio, planned, taken)


def _revealing_choice(optimizer: torch.optim.Optimizer, policy: Policy) -> TrainingError:
    """Return the error for a policy that chooses by gradients, under an optimiser that adds noise for privacy."""
    return TrainingError(
        f"policy {POLICIES.name_of(policy)!r} chooses by gradients or activations before "
        f"{type(optimizer).__name__} adds noise, so that the choice would reveal something about the data: use "
        "'last_k', 'head', 'random' or 'full'"
    )
