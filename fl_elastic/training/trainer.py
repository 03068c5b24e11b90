"""The trainer: measure, choose, train, hold the budget, hand over what changed."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, ModelError, TrainingError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.finite import all_finite
from fl_elastic.groups.forward import batch_shape, compute_loss
from fl_elastic.ops.split import MissedCut
from fl_elastic.planning import Plan
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.clock import Clock, clock_for
from fl_elastic.profiling.estimate import refined
from fl_elastic.profiling.in_flight import in_flight
from fl_elastic.profiling.measure import OptimizerFn, model_device
from fl_elastic.profiling.prefix import elastic_forward, prefix_seconds
from fl_elastic.training.apply_plan import realised
from fl_elastic.training.batches import epochs_of, first_batches, loader_size
from fl_elastic.training.changes import changes, stepped, trained_parts, under_every_name
from fl_elastic.training.channel_guard import ChannelGuard
from fl_elastic.training.chooser import PlanChooser
from fl_elastic.training.costs import costs_for
from fl_elastic.training.elastic_forward import ElasticForward
from fl_elastic.training.fit_start import FitStart
from fl_elastic.training.free_memory import FreeMemory
from fl_elastic.training.kept_optimizer import KeptOptimizer
from fl_elastic.training.measured import full_pass_ratio
from fl_elastic.training.options import TrainerOptions
from fl_elastic.training.pace import Pace, StepLog
from fl_elastic.training.proximal import ProximalPull
from fl_elastic.training.report import FitReport
from fl_elastic.training.selection import SelectionState
from fl_elastic.training.step_importance import StepImportance
from fl_elastic.update import Manifest, PartialUpdate

__all__ = ["ElasticTrainer"]

_READ_ONCE = (
    "the loader gave no batch when it was read again: pass a list or a DataLoader, not an iterator"
)


_LOG = logging.getLogger("fl_elastic")


class ElasticTrainer:
    """Trains the best part of a model that fits a budget.

    Parameters
    ----------
    model : nn.Module
        Trained in place, on the device it is on. Parameters that do not require a gradient stay out.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` returning a scalar tensor.
    optimizer_fn : callable
        ``optimizer_fn(parameters)`` returning a torch optimiser; called once, and once per probe.
    budget : Budget
        What one fit may spend.
    policy : str
        Registered policy, see `fl_elastic.planning.policies`.
    profile : CostProfile, optional
        Measured costs; when missing or of another case they are estimated on the first batch, for about one and a
        half steps that are charged to the budget, and corrected while training.
    options : TrainerOptions, optional
        Everything else.
    state : SelectionState, optional
        Scores remembered from earlier fits of the same client.

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
        policy: str = "elastic",
        profile: CostProfile | None = None,
        options: TrainerOptions | None = None,
        state: SelectionState | None = None,
    ) -> None:
        if not isinstance(budget, Budget):
            raise BudgetError(
                f"budget {budget!r} is a {type(budget).__name__}, not a Budget: say for example "
                "Budget(speedup=2.0)"
            )
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer_fn = optimizer_fn
        self.budget = budget
        self.options = options or TrainerOptions()
        self.profile = profile
        self.state = state or SelectionState()
        self.manifest = Manifest.of(model)
        self.plan: Plan | None = None
        self._optimizing = KeptOptimizer(model, optimizer_fn)
        self.chooser = PlanChooser(
            model, loss_fn, optimizer_fn, policy=policy, budget=budget, options=self.options,
            state=self.state, optimizer=self._optimizing,
        )  # fmt: skip
        self._forward: ElasticForward | None = None
        self._guard: ChannelGuard | None = None
        self._pull = ProximalPull()
        self._worth: StepImportance | None = None
        self._whole: tuple[int, ...] = ()
        self._free = FreeMemory(None)
        self._base: dict[str, NDArray[Any]] | None = None
        self._start: FitStart
        self._tensor_steps: Counter[str] = Counter()
        self._trained: tuple[Plan, ...] = ()
        self._num_examples = 0

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimiser, kept from fit to fit; None before the first."""
        return self._optimizing.made

    def fit(self, loader: Iterable[Batch], epochs: int = 1) -> FitReport:
        """Train for ``epochs`` passes over ``loader``, or for as many steps as the budget pays for.

        Raises
        ------
        TrainingError
            If the loader is empty or can be read only once, a batch does not fit the model, or a loss or a trained
            tensor is not finite.
        ModelError
            If the model cannot be trained here at all.
        BudgetError
            If memory or uplink do not even admit the head, or the time not even one step.

        Notes
        -----
        Whatever fails, also in the loader or the loss function, leaves model and optimiser as before the fit.
        """
        if epochs < 1:
            raise TrainingError(f"epochs {epochs} must be at least 1")
        _refuse_untrainable(self.model)
        batches = first_batches(loader, self.chooser.batches_needed, model_device(self.model))
        per_epoch, self._num_examples = loader_size(loader, batches[0])
        if per_epoch == 0:
            raise TrainingError(_READ_ONCE)
        self._start = FitStart(self.model, self.manifest, self._optimizing)
        self._base = self._start.weights
        self._free = FreeMemory(self.budget.memory)
        self._pull = ProximalPull.towards_present(self.model, self.options.proximal)
        self._tensor_steps.clear()
        try:
            return self._fit(loader, epochs, per_epoch * epochs, batches)
        except BaseException:
            # Also a loader's error, or Ctrl-C: half-trained weights would be taken for the model's.
            self._start.restore()
            raise
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None
            if self._forward is not None:
                self._forward.close()
                self._forward = None

    def _fit(
        self, loader: Iterable[Batch], epochs: int, requested: int, batches: list[Batch]
    ) -> FitReport:
        clock = clock_for(model_device(self.model), self.options.clock)
        began, known = clock(), self.profile
        self._optimizing()
        profile = self._profile_for(batches[0])
        measuring = self.options.profile_seconds
        if self.options.closed_loop:
            measuring = clock() - began if profile is not known else 0.0
        budget = self.budget.after(measuring, profile.full_step_seconds, requested)
        forward = self._forward = self._elastic_forward(epochs, clock)
        self.chooser.begin(self._planned_with(profile), requested, batches, budget)
        allowed = budget.allowed_step_seconds(profile.full_step_seconds, requested) * requested
        pace = Pace(
            allowed,
            requested,
            correct=self.options.closed_loop,
            relative=self.budget.deadline is None,
            estimated=profile.estimated,
            full_seconds=profile.full_step_seconds,
            fits_memory=self.chooser.full_step_fits_memory,
        )
        log = StepLog(batch_shape(batches[0]), clock)
        log.selection_seconds += measuring
        log.predicted_seconds += 0.0 if self.options.closed_loop else measuring
        self._worth = (
            StepImportance(self.model, self._start.weights, profile.graph.groups)
            if self.chooser.learns_from_steps
            else None
        )
        deep = self.chooser.deep_plan(pace.steps_left)
        plan = deep or self._select(batches, pace, log, current=None)
        plans = [(0, plan)]
        if pace.steps_left(plan) == 0:
            raise self._no_step(plan, requested, pace.left_seconds(plan))
        stream = epochs_of(loader, epochs, model_device(self.model))
        batch = next(stream, None)
        while batch is not None and pace.steps_left(plan) > 0:
            batch = self._train(plan, batch, stream, pace, log, to_the_end=plan is deep)
            if batch is not None and pace.reference_due():
                # Outside the frozen block: a full step also trains the norms that the plan freezes.
                pace.reference(*self._time_full_pass(batch, pace, log))
            due = plan is not deep and (pace.corrected or self._probe_due(plan, pace))
            if batch is not None and due and pace.steps_left(plan) > 0:
                plan = self._select([batch, *batches[1:]], pace, log, current=plan)
                plans.append((pace.steps, plan))
        if pace.steps == 0:
            if batch is not None:
                raise self._no_step(plan, requested, pace.left_seconds(plan))
            raise TrainingError(_READ_ONCE)
        taken = stepped(plans, pace.steps)
        plan = taken[-1][1]
        if profile.estimated and self.options.closed_loop and forward is None:
            self.profile = refined(
                profile, pace.full_ratio, plan.predicted_step_seconds, pace.recent_step_seconds
            )
        step_seconds = log.median_step_seconds
        rest = self._rest_plan(plan, batch, pace, log)
        if rest is not None and batch is not None:
            taken = (*taken, (pace.steps, rest))
            self._train(rest, batch, stream, pace, log, to_the_end=True)
        self._refuse_overflow(log.tensor_steps)
        self.plan = plan
        self._tensor_steps = log.tensor_steps
        self._trained = tuple(each for _, each in taken)
        self._learn()
        self.state.trained(np.any([each.mask for _, each in taken], axis=0).tolist())
        return FitReport(
            plan=plan,
            plans=taken,
            steps=pace.steps,
            requested_steps=requested,
            seconds=log.seconds,
            selection_seconds=log.selection_seconds,
            predicted_seconds=log.predicted_seconds,
            step_seconds=step_seconds,
            full_step_seconds=profile.full_step_seconds,
            loss=statistics.fmean(log.losses[-(requested // max(epochs, 1)) :]),
            losses=tuple(log.losses),
            importance={
                name: score
                for name, score in zip(self.state.names, self.state.scores, strict=False)
                if score is not None
            },
            num_examples=self._num_examples,
            forward=None if forward is None else forward.report(),
            full_ratio=pace.full_ratio,
            choosing_seconds=log.choosing_seconds,
            based_on=self.chooser.based_on,
        )

    def _train(
        self,
        plan: Plan,
        batch: Batch,
        stream: Iterator[Batch],
        pace: Pace,
        log: StepLog,
        *,
        to_the_end: bool,
    ) -> Batch | None:
        """Train by one plan until the data or the budget ends, or a full step or new selection is due."""
        next_batch: Batch | None = batch
        graph, forward = self._profiled().graph, self._forward
        expected = self._expected_prefix_seconds(plan)
        with ExitStack() as stack:
            started = log.clock()
            stack.enter_context(realised(plan, self.model))
            if forward is not None:
                stack.enter_context(forward.splitting(graph, plan.depth, batch))
            self._whole = tuple(i for i, mode in enumerate(plan.modes) if mode.kind == "full")
            stack.enter_context(self._free.watching(self.model, in_flight(graph).inference))
            tensors = {name: self.model.get_parameter(name) for name in plan.trained_parameters}
            self._start.about_to_train(tensors.values())
            unmoved = {n: w for n, w in self._start.weights.items() if n not in log.tensor_steps}
            self._guard = ChannelGuard(plan, self.model, unmoved)
            statistics = self._statistics()
            self._charge(log.clock() - started, pace, log)
            steps_before = pace.steps
            while next_batch is not None and pace.steps_left(plan) > 0:
                before = 0.0 if forward is None else forward.prefix_seconds
                seconds, whole = log.step(next_batch, plan, tensors, self._step)
                # Filling a cache makes the first epoch dearer; the pace goes by what a step takes on average.
                steady = seconds
                if forward is not None and forward.terms is not None:
                    steady += expected * pace.drift - (forward.prefix_seconds - before)
                pace.record(
                    seconds,
                    whole_batch=whole,
                    steady_seconds=steady,
                    predicted_seconds=plan.predicted_step_seconds,
                )
                self.state.steps_since_probe += 1
                next_batch = next(stream, None)
                if next_batch is None:
                    break
                if pace.reference_due():
                    break
                if not to_the_end and (self._probe_due(plan, pace) or pace.wants_replan(plan)):
                    break
            now = self._statistics()
            moved = [
                name
                for name, value in now.items()
                if not torch.equal(value, statistics[name]) and _can_travel(name, value, statistics)
            ]
            log.tensor_steps.update(dict.fromkeys(moved, pace.steps - steps_before))
        return next_batch

    def _statistics(self) -> dict[str, Tensor]:
        """Return copies of the float buffers that travel: what else than a gradient training may change."""
        return {
            name: buffer.detach().clone()
            for name, buffer in self.model.named_buffers()
            if name in self.manifest.index and buffer.is_floating_point()
        }

    def _refuse_overflow(self, steps: Counter[str]) -> None:
        """Raise TrainingError if a tensor that was trained is no longer finite."""
        state = self.model.state_dict()
        for name in steps:
            if not all_finite(state[name]):
                raise TrainingError(
                    f"tensor {name!r} is no longer finite after training: lower the learning rate; "
                    "the model was put back to where the fit started"
                )

    def _no_step(self, plan: Plan, requested: int, left: float) -> BudgetError:
        """Return the error of a budget that does not pay for one step."""
        said = (
            f"deadline {self.budget.deadline:.3g} s"
            if self.budget.deadline is not None
            else f"speedup {self.budget.speedup:.6g} over {requested} steps"
        )
        return BudgetError(
            f"{said} does not pay for one step: choosing and sending leave {max(left, 0.0):.3g} s, policy "
            f"{plan.policy!r} takes {plan.predicted_step_seconds:.3g} s a step, the cheapest there is takes "
            f"{plan.floor_step_seconds:.3g} s; allow more time, or leave this device out of the round"
        )

    def update(self, base_version: int = 0) -> PartialUpdate:
        """Return what the last fit changed, against the weights it started from.

        Holds each parameter that was trained for at least one step, and each running statistic that
        the training steps updated, with the number of those steps. Of a weight that every plan of the fit trained
        by channels alone, ``parts`` says which.

        Raises
        ------
        TrainingError
            If nothing was fitted yet, or a weight is no longer finite.
        """
        if self._base is None:
            raise TrainingError("there is no update before the first fit")
        steps = under_every_name(self.model, self._tensor_steps)
        deltas = changes(self.model, self.manifest, self._base, steps)
        parts = trained_parts(self._trained, self.model)
        return PartialUpdate(
            deltas=deltas,
            steps={name: steps[name] for name in deltas},
            num_examples=self._num_examples,
            base_version=base_version,
            parts={n: part for n, part in parts.items() if n in deltas},
        )

    def _profile_for(self, batch: Batch) -> CostProfile:
        """Return the given profile if it fits this model and device, else an estimate."""
        self.profile = costs_for(
            self.chooser.policy, self.profile, self.model, self.loss_fn, batch,
            optimizer_fn=self.optimizer_fn, budget=self.budget, options=self.options,
        )  # fmt: skip
        return self.profile

    def _elastic_forward(self, epochs: int, clock: Clock) -> ElasticForward | None:
        if self.options.forward is None:
            return None
        return ElasticForward(
            self.model, self.options.forward,
            examples=self._num_examples, epochs=epochs, clock=clock,
        )  # fmt: skip

    def _planned_with(self, profile: CostProfile) -> CostProfile:
        """Return the costs that plans are made with: those of the forward pass as it will run."""
        forward = self._forward
        if forward is None:
            return profile
        return elastic_forward(profile, forward.terms, at_least=forward.locked_groups or 0)

    def _expected_prefix_seconds(self, plan: Plan) -> float:
        forward = self._forward
        if forward is None:
            return 0.0
        locked = forward.locked_groups or 0
        return prefix_seconds(self._profiled(), plan.depth, forward.terms, at_least=locked)

    def _profiled(self) -> CostProfile:
        if self.profile is None:
            raise TrainingError("there is no cost profile before the first fit")
        return self.profile

    def _step(self, batch: Batch) -> float:
        """Take one training step and return its loss."""
        optimizer = self._optimizing()
        optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        value = loss.item()
        if not np.isfinite(value):
            raise TrainingError(
                f"the loss is {value}: check the batch for NaN and the learning rate; "
                "the model was put back to where the fit started"
            )
        if not loss.requires_grad:
            # Nothing that the plan trains took part, as with routing: the batch is passed over.
            return value
        loss.backward()  # type: ignore[no-untyped-call]
        if self._worth is not None:
            self._worth.observe(self._whole)
        self._pull.add_to_gradients()
        optimizer.step()
        if self._guard is not None:
            self._guard.put_back()
        return value

    def _loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, on the features at the cut where there is one."""
        if self._forward is not None:
            try:
                with self._forward.step(batch):
                    return compute_loss(self.model, self.loss_fn, batch)
            except MissedCut as error:
                self._forward.go_whole(str(error))
        return compute_loss(self.model, self.loss_fn, batch)

    def _select(self, batches: list[Batch], pace: Pace, log: StepLog, current: Plan | None) -> Plan:
        """Return the plan to go on with; importance is probed first if that is due."""
        started = log.clock()
        keep = False
        if self._forward is not None:
            self.chooser.go_on(self._planned_with(self._profiled()), self._forward.locked_groups)
        self._learn()
        if self._probe_due(current, pace):
            drifted = self.chooser.measure_importance(batches)
            keep = not drifted and not pace.corrected
            probe = self.chooser.batches_needed * self._profiled().full_step_seconds
            log.charge(probe)
            if self.options.charge_probes:
                pace.predicted += probe
        if keep and current is not None:
            plan = current
        else:
            planning = self.chooser.pay_for_plan()
            log.charge(planning)
            pace.predicted += planning
            began = log.clock()
            plan = self.chooser.plan(pace.correction)
            self.state.planning_seconds = (
                log.clock() - began if self.options.closed_loop else planning
            )
        pace.replanned()
        self._charge(log.clock() - started, pace, log)
        return plan

    def _charge(self, seconds: float, pace: Pace, log: StepLog) -> None:
        """Count time that went into choosing, copying or timing instead of into steps."""
        log.selection_seconds += seconds
        if self.options.charge_probes:
            pace.spent += seconds

    def _probe_due(self, plan: Plan | None, pace: Pace) -> bool:
        """Whether to probe importance now; without a plan as yet, or within the time that it leaves."""
        left = np.inf if plan is None else pace.left_seconds(plan)
        return self.chooser.probe_due(pace.correction, left)

    def _rest_plan(self, plan: Plan, batch: Batch | None, pace: Pace, log: StepLog) -> Plan | None:
        """Return what to train in the rest of a deadline that is too short for one more step of the plan."""
        if batch is None:
            return None
        started = log.clock()
        rest = self.chooser.rest_plan(plan, pace.rest_seconds(plan))
        self._charge(log.clock() - started, pace, log)
        pace.replanned()
        return rest if rest is not None and pace.steps_left(rest) > 0 else None

    def _learn(self) -> None:
        """Remember what the steps so far told of the worth of what they trained."""
        if self._worth is not None:
            self.chooser.learn(self._worth.scores())

    def _time_full_pass(self, batch: Batch, pace: Pace, log: StepLog) -> tuple[float, float]:
        started = log.clock()
        ratio = full_pass_ratio(self.model, self.loss_fn, batch, self._profiled(), log.clock)
        spent = log.clock() - started
        self._charge(spent, pace, log)
        return ratio, spent


def _refuse_untrainable(model: nn.Module) -> None:
    """Raise ModelError for what no plan can train: nothing at all, no values, sparse gradients."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "the model has no trainable parameter: set requires_grad on what shall train"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"tensor {name!r} is on the meta device, without values: load the model's weights first"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ModelError(
                f"layer {name!r} has sparse=True, whose gradients cannot be compared or merged: use sparse=False"
            )


def _can_travel(name: str, now: Tensor, before: Mapping[str, Tensor]) -> bool:
    """Whether a buffer that has changed has a difference: one that began at infinity stays the device's own.

    Raises
    ------
    TrainingError
        If it has another shape now.
    """
    if now.shape != before[name].shape:
        raise TrainingError(
            f"buffer {name!r} grew from shape {tuple(before[name].shape)} to {tuple(now.shape)} while training, as "
            "that of an observer does at its first batch: run the model on a batch before it is trained or sent"
        )
    if not all_finite(before[name]):
        _LOG.warning("buffer %r began at infinity: what it is now stays on this device", name)
        return False
    return True
