"""One fit: choose a plan, train by it until a timed full step or a new choice is due, and keep to the budget."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
from torch import Tensor, nn

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError, DivergedError, ModelError, TrainingError
from fl_elastic.groups import Batch
from fl_elastic.groups.forward import all_finite, batch_shape
from fl_elastic.groups.held_state import same_numbers
from fl_elastic.groups.loss_settings import weight_in_mean
from fl_elastic.groups.torch_private import writes_to
from fl_elastic.groups.trace import NO_GRADIENT
from fl_elastic.planning import Plan
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.memory import inference_bytes
from fl_elastic.profiling.prefix import prefix_seconds
from fl_elastic.training.apply_plan import plan_applied
from fl_elastic.training.batches import Epochs
from fl_elastic.training.budget_control import BudgetControl
from fl_elastic.training.costs import planned_with
from fl_elastic.training.fit_start import FitStart
from fl_elastic.training.free_memory import FreeMemory
from fl_elastic.training.planner import Planner
from fl_elastic.training.report import StepLog
from fl_elastic.training.step import TrainingStep

_LOG = logging.getLogger("fl_elastic")
# Share of a full step's time from which on a plan's step can stand in for a timed full step.
_NEARLY_FULL = 0.9
# Smallest share of the optimiser's time for all weights at which a plan's steps show how slow the optimiser is.
_TELLING_SHARE = 0.25


@dataclass(frozen=True)
class Phase:
    """A part of a fit that trains by one plan.

    Attributes
    ----------
    kind : {"full", "selected", "one step"}
        ``full`` trains all groups, see ``full_update_every``. ``selected`` trains the groups that fit the budget.
        ``one step`` takes one step of the cheapest plan, if choosing took all of the time.
    plan : Plan
        The plan of the phase.
    """

    kind: Literal["full", "selected", "one step"]
    plan: Plan


@dataclass(eq=False)
class Fit:
    """The parts and the state of one fit while it runs.

    Attributes
    ----------
    planner : Planner
        Makes the plans; it has begun this fit.
    step : TrainingStep
        Takes the steps.
    start : FitStart
        Remembers model and optimiser as they were before.
    profile : CostProfile
        Costs of this model, batch and device.
    control : BudgetControl
        Says how many steps the budget still pays for.
    log : StepLog
        Time of the steps, and the tensors that they trained.
    free : FreeMemory, optional
        Returns free memory to the system near the memory budget, if there is one.
    budget : Budget
        Budget of the whole fit.
    batches : list of batch
        The batches of a probe.
    groups_above : int, optional
        Number of groups above the fleet's cut; None without one.
    loading_seconds : float, optional
        Expected time to read a batch, if the loader's time counts as the steps' does.
    plans : list of (int, Plan)
        The plans by which steps were taken, each with the number of steps before it.
    plan : Plan
        The last of these plans.
    batch : batch, optional
        The next batch; None at the end of the data, or of the time for steps.
    loading, prefetched_seconds : float
        Seconds that reading the next step's batch took, if they count; and the usual time for this, if the batch
        had been read before the first step.
    stayed_here : set of str
        Parameters that the forward pass has changed and that do not travel.
    """

    planner: Planner
    step: TrainingStep
    start: FitStart
    profile: CostProfile
    control: BudgetControl
    log: StepLog
    free: FreeMemory | None
    budget: Budget
    batches: list[Batch]
    groups_above: int | None = None
    loading_seconds: float | None = None
    plans: list[tuple[int, Plan]] = field(default_factory=list)
    plan: Plan = field(init=False)
    loading: float = 0.0
    prefetched_seconds: float = 0.0
    stayed_here: set[str] = field(default_factory=set)
    batch: Batch | None = None
    _stream: Epochs = field(init=False)
    _warned_of_larger: bool = False

    def charge_start(
        self, estimating_seconds: float, copied: float, closing_seconds: float | None
    ) -> None:
        """Charge the time before the first step, and reserve the time after the last one.

        Parameters
        ----------
        estimating_seconds : float
            Time of estimating costs, which was subtracted from the budget already.
        copied : float
            Time by the log's clock at which everything that the fit may change had been copied.
        closing_seconds : float, optional
            Time that the last fit took after its steps; None in a first fit, which reserves the time that it took
            before its steps, because both go over every tensor.
        """
        log, measured = self.log, self.planner.options.timing.closed_loop
        log.selection_seconds += estimating_seconds
        log.predicted_seconds += 0.0 if measured else estimating_seconds
        starting_seconds = log.clock() - log.began - estimating_seconds * measured
        copying_seconds = copied - log.began
        self.charge(copying_seconds, preparing=True)
        self.charge(starting_seconds - copying_seconds)
        if closing_seconds is None:
            closing_seconds = starting_seconds - (log.made - log.began)
        self.control.spent += closing_seconds * measured

    def run(self, stream: Epochs) -> None:
        """Train on the batches of a stream, phase by phase, until they or the budget end.

        Raises
        ------
        BudgetError
            If the budget does not pay for one step.
        TrainingError
            If the stream is empty.
        DivergedError
            If a loss or a trained tensor is not finite.
        """
        self._stream = stream
        for phase in self._phases():
            self._train(phase)
        self.plan = self.plans[-1][1]
        self._close()
        self.log.ended = self.log.clock()
        self._refuse_no_gradient()
        self._refuse_overflow()
        self._learn()

    def _phases(self) -> Iterator[Phase]:
        """Yield the phases in order; the caller trains each phase before it asks for the next."""
        last = yield from self._planned()
        if self.control.steps == 0:
            yield from self._one_step(last)

    def _planned(self) -> Generator[Phase, None, Plan]:
        """Yield the phases planned for the budget; return the last plan."""
        control = self.control
        full = self.planner.full_update_plan(control.steps_left)
        phase = (
            Phase("selected", self._choose(self.batches, None))
            if full is None
            else Phase("full", full)
        )
        self.plans = [(0, phase.plan)]
        self._reserve_closing(phase.plan)
        self._read()
        while self.batch is not None and control.steps_left(phase.plan) > 0:
            yield phase
            if self.batch is None:
                break
            if control.reference_due():
                # Outside the frozen block: a full step also trains the norms that the plan freezes. On a batch of
                # the shape for which costs are known: a longer one would be taken for a slower device.
                control.reference(*self._time_full_pass(self.batches[0], phase.plan))
            due = phase.kind != "full" and control.steps_left(phase.plan) > 0
            if due and (self._probe_due(phase.plan) or control.corrected):
                phase = Phase("selected", self._choose([self.batch, *self.batches[1:]], phase.plan))
                self.plans.append((control.steps, phase.plan))
        self.plans = _stepped(self.plans, control.steps)
        return phase.plan

    def _one_step(self, plan: Plan) -> Iterator[Phase]:
        """Yield one step of the cheapest plan, so that a fit trains even if choosing used up the time."""
        if self._deadline_pays_for(plan):
            plan = self.planner.cheapest_plan(plan)
            self.control.grant_a_step()
            self.plans = [(0, plan)]
            yield Phase("one step", plan)
        if self.control.steps == 0:
            raise self._no_step(plan)

    def _deadline_pays_for(self, plan: Plan) -> bool:
        """Return whether the deadline allows a step of the cheapest plan, not counting the time for choosing."""
        deadline = self.budget.deadline
        if deadline is None:
            return False
        selects = self.planner.policy.reduces_uplink
        seconds = plan.floor_step_seconds if selects else plan.predicted_step_seconds
        return seconds * self.control.drift + plan.sending_seconds <= deadline

    def _learn(self) -> None:
        """Pass the importance that the steps so far have measured to the planner."""
        if self.step.worth is not None and self.control.steps:
            self.planner.learn(self.step.worth.scores())

    def _train(self, phase: Phase) -> None:
        """Train by one plan until the data or the budget ends, or a full step or new choice is due."""
        plan, batch = phase.plan, self.batch
        assert batch is not None
        control, log, step = self.control, self.log, self.step
        forward, graph, model = step.forward, self.profile.graph, step.model
        expected = self._expected_prefix_seconds(plan)
        with ExitStack() as stack:
            started = log.clock()
            stack.enter_context(plan_applied(plan, model))
            if forward is not None:
                stack.enter_context(forward.splitting(graph, plan.depth, batch, plan.transforms))
            if self.free is not None:
                stack.enter_context(self.free.watching(model, inference_bytes(self.profile)))
            # One lookup of all parameters: looking each one up takes longer than making a plan.
            known = dict(model.named_parameters(remove_duplicate=False))
            tensors = {name: known[name] for name in plan.trained_parameters}
            self.start.about_to_train(tensors.values())
            step.begin(plan, tensors, self.start.unmoved(log.tensor_steps))
            statistics = self._statistics(tensors)
            self.charge(log.clock() - started, preparing=True)
            steps_before = control.steps
            while self.batch is not None and control.steps_left(plan) > 0:
                self._take_step(self.batch, plan, tensors, expected)
                interrupted = not step.waits and self._interrupts(phase)
                # Reading the clock and checking what is due belong to the loop, and so to its time.
                control.spent += log.after_step()
                if self.loading_seconds is not None and not control.steps_left(plan):
                    # Reading a batch that no step has time for would cost time too.
                    self.batch = None
                    break
                self._read()
                if interrupted:
                    break
            started = log.clock()
            if step.finish():
                log.count(tensors)
            control.spent += log.since(started)
            moved = self._moved(statistics)
            log.tensor_steps.update(dict.fromkeys(moved, control.steps - steps_before))

    def _take_step(
        self, batch: Batch, plan: Plan, tensors: Mapping[str, nn.Parameter], expected: float
    ) -> None:
        """Take a step and record its time; ``expected`` is the time that the plan predicts for the prefix."""
        control, log, step, forward = self.control, self.log, self.step, self.step.forward
        self._warn_of_larger(batch)
        before = 0.0 if forward is None else forward.prefix_seconds
        computed = 0 if forward is None else forward.computed
        started = log.clock()
        loss = step.take(batch)
        seconds, whole = log.step(batch, plan, loss, started)
        if step.stepped:
            log.count(tensors, step.moved)
        # After the step, which refuses a batch whose targets are no classes of the model.
        log.weights.append(weight_in_mean(step.loss_fn, batch[1], self._stream.counting))
        log.seconds += self.loading
        seconds += self.loading
        # Filling a cache makes the first epoch longer; the budget counts the average time of a step.
        steady = seconds + self.prefetched_seconds
        if forward is not None and forward.terms is not None:
            steady += expected * control.drift - (forward.prefix_seconds - before)
        share = plan.predicted_step_seconds / self.profile.full_step_seconds
        control.record(
            seconds,
            whole_batch=whole,
            steady_seconds=steady,
            predicted_seconds=plan.predicted_step_seconds,
            nearly_full=forward is None and not plan.transforms and share >= _NEARLY_FULL,
        )
        self._predict_first_pass(computed)
        self.planner.state.steps_since_probe += 1

    def _warn_of_larger(self, batch: Batch) -> None:
        """Warn, once, of a batch that is larger than the first one, for which a memory budget holds."""
        if self.budget.memory is None or self._warned_of_larger:
            return
        shape, known = batch_shape(batch), batch_shape(self.batches[0])
        if math.prod(shape) > math.prod(known):
            self._warned_of_larger = True
            _LOG.warning(
                "a batch of shape %s is larger than the first one, of shape %s, for which the memory budget holds: "
                "it may take more. Let the loader begin with its largest batch, or bound the length of inputs",
                shape, known,
            )  # fmt: skip

    def _interrupts(self, phase: Phase) -> bool:
        """Return whether a full step, or another choice, is due before the next step of a phase."""
        control, plan = self.control, phase.plan
        if control.reference_due():
            return True
        if phase.kind != "selected":
            return False
        if self._probe_due(plan):
            return True
        pace = control.missed_pace(plan)
        if pace is not None:
            control.correct_pace(pace)
        return pace is not None

    def _read(self) -> None:
        """Read the next batch, None at the end; the time counts as part of the step on that batch."""
        started = self.log.clock()
        self.batch = next(self._stream, None)
        if self.loading_seconds is not None:
            self.loading = self.log.clock() - started
            # The time of reading ahead of the first step is charged already, and does not predict later reads.
            self.prefetched_seconds = self.loading_seconds if self._stream.read_before else 0.0

    def _price(self) -> None:
        """Give the planner the present costs of a step, which depend on the features stored so far."""
        forward = self.step.forward
        if forward is not None:
            kept_head = self.planner.options.part.kept_head
            costs = planned_with(self.profile, forward, self.groups_above, kept_head)
            self.planner.go_on(costs, forward.locked_groups)

    def _reserve_closing(self, plan: Plan) -> None:
        """Charge the time of the forward passes that follow the steps."""
        model, steps = self.step.model, self.control.requested_steps
        passes = sum(transform.closing_passes(model, steps) for transform in plan.transforms)
        if passes:
            seconds = passes * float(self.profile.forward_seconds[-1])
            self.control.spent += seconds
            self._predict(seconds)

    def _close(self) -> None:
        """Let the step opener finish the model, if steps trained only a part of it at a time."""
        opener = self.step.opener
        if opener is None:
            return
        with plan_applied(self.plan, self.step.model):
            before = self._statistics()
            opener.close(self.control.requested_steps)
            moved = self._moved(before)
        self.log.tensor_steps.update(dict.fromkeys(moved, self.control.steps))

    def _choose(self, batches: list[Batch], current: Plan | None) -> Plan:
        """Return the plan to go on with; importance is probed first if that is due."""
        planner, control, log = self.planner, self.control, self.log
        started = log.clock()
        keep = False
        self._price()
        self._learn()
        if self._probe_due(current):
            drifted = planner.measure_importance(batches)
            keep = not drifted and not control.corrected
            self._predict(planner.batches_needed * self.profile.full_step_seconds, choosing=True)
        if keep and current is not None:
            plan = current
            control.replanned()
        else:
            planning, began = 0.0, log.clock()
            if not planner.options.timing.closed_loop:
                planning = planner.pay_for_plan()
                self._predict(planning, choosing=True)
            plan = planner.plan(control.correction)
            if planner.options.timing.closed_loop:
                planning = log.clock() - began
            planner.state.planning_seconds = planning
            control.replanned(planning)
        self.charge(log.clock() - started)
        return plan

    def _probe_due(self, plan: Plan | None) -> bool:
        """Return whether to probe importance now; ``plan`` is the present one, None before the first."""
        left = np.inf if plan is None else self.control.left_seconds(plan)
        return self.planner.probe_due(self.control.correction, left)

    def _optimizer_ratio(self, plan: Plan) -> float:
        """Return the optimiser's measured time in steps of a plan over the profile's.

        The ratio is 1 for a plan of few weights, whose time is that of the call and says nothing about many
        weights.
        """
        seconds, taken = self.profile.optimizer_seconds, self.step.optimizer_seconds
        # The profile spreads the optimiser's time over the batches of an accumulated step.
        predicted = self.step.accumulate * float(seconds[plan.mask].sum())
        whole = all(mode.kind in ("full", "frozen") for mode in plan.modes)
        if not (whole and taken) or predicted < _TELLING_SHARE * self.step.accumulate * float(
            seconds.sum()
        ):
            return 1.0
        return statistics.median(taken) / predicted if predicted > 0 else 1.0

    def _time_full_pass(self, batch: Batch, plan: Plan) -> tuple[float, float]:
        # Imported here: short fits time no full pass.
        from fl_elastic.training.measured import full_pass_ratio

        clock, step = self.log.clock, self.step
        started = clock()
        ratio = full_pass_ratio(
            step.model, step.loss_fn, batch, self.profile, clock, self._optimizer_ratio(plan)
        )
        spent = clock() - started
        self.charge(spent)
        return ratio, spent

    def charge(self, seconds: float, *, preparing: bool = False) -> None:
        """Charge time that went into choosing, timing or preparing instead of into steps."""
        self.log.selection_seconds += seconds
        self.log.preparing_seconds += seconds * preparing
        self.control.spent += seconds

    def _predict(self, seconds: float, *, choosing: bool = False) -> None:
        """Add predicted time besides that of steps, such as of a probe or a plan."""
        self.log.predicted_seconds += seconds
        self.log.choosing_seconds += seconds * choosing
        self.control.predicted += seconds

    def _expected_prefix_seconds(self, plan: Plan) -> float:
        forward = self.step.forward
        if forward is None:
            return 0.0
        locked = forward.locked_groups or 0
        return prefix_seconds(self.profile, plan.depth, forward.terms, at_least=locked)

    def _predict_first_pass(self, computed: int) -> None:
        """Add to the prediction the time of computing a lasting prefix, which the plan's steps do not contain."""
        forward = self.step.forward
        if forward is None or not forward.lasts:
            return
        examples = forward.computed - computed
        locked, batch = forward.locked_groups or 0, self.profile.key.rows
        self._predict(examples * prefix_seconds(self.profile, 0, None, at_least=locked) / batch)

    def _statistics(self, trained: Container[str] = ()) -> dict[str, tuple[Tensor, int]]:
        """Return copies of the tensors that training may change without a gradient, with their write counts."""
        movable = self._movable(trained)
        return {name: (tensor.detach().clone(), writes_to(tensor)) for name, tensor in movable}

    def _movable(self, trained: Container[str] = ()) -> Iterable[tuple[str, Tensor]]:
        """Return tensors that training may change without a gradient: buffers that travel, `FitStart.followers`."""
        buffers = [
            (name, buffer)
            for name, buffer in self.step.model.named_buffers()
            if self.start.travels(name)
        ]
        others = [item for item in self.start.followers.items() if item[0] not in trained]
        return [item for item in (*buffers, *others) if item[1].is_floating_point()]

    def _moved(self, before: Mapping[str, tuple[Tensor, int]]) -> list[str]:
        """Return the names of the tensors that were changed since ``before`` and can travel.

        A buffer that was written but kept its value, as a running maximum may, is included: it counts in the
        server's mean.
        """
        now, known = dict(self._movable()), self.start.followers
        changed = [
            name
            for name, (value, writes) in before.items()
            if name in now
            and (
                now[name].shape != value.shape
                or not same_numbers(now[name], value)
                or (name not in known and writes_to(now[name]) != writes)
            )
            and _can_travel(name, now[name], value)
        ]
        self.stayed_here |= {n for n in changed if n in known and not self.start.travels(n)}
        return [name for name in changed if name not in self.stayed_here]

    def _refuse_no_gradient(self) -> None:
        """Raise ModelError if all parameters were to be trained, and no loss had a gradient for one of them."""
        named = self.step.model.named_parameters()
        trainable = {name for name, each in named if each.requires_grad}
        if not self.step.taken and trainable <= {*self.plan.trained_parameters}:
            raise ModelError(NO_GRADIENT)

    def _refuse_overflow(self) -> None:
        """Raise DivergedError if a tensor that was trained is no longer finite."""
        model = self.step.model
        state: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers()),
        }
        for name in self.log.tensor_steps:
            if not all_finite(state[name]):
                raise DivergedError(
                    f"tensor {name!r} is no longer finite after training: lower the learning rate; "
                    "the model was put back to where the fit started"
                )

    def _no_step(self, plan: Plan) -> BudgetError:
        """Return the error for a budget that does not pay for one step."""
        budget, left = self.budget, self.control.left_seconds(plan)
        said = (
            f"deadline {budget.deadline:.3g} s"
            if budget.deadline is not None
            else f"speedup {budget.speedup:.6g} over {self.control.requested_steps} steps"
        )
        return BudgetError(
            f"{said} does not pay for one step: choosing and sending leave {max(left, 0.0):.3g} s, policy "
            f"{plan.policy!r} takes {plan.predicted_step_seconds:.3g} s a step, the cheapest possible step takes "
            f"{plan.floor_step_seconds:.3g} s; allow more time, or leave this device out of the round"
        )


def _stepped(plans: Sequence[tuple[int, Plan]], steps: int) -> list[tuple[int, Plan]]:
    """Return the plans by which at least one of ``steps`` steps was taken, each with its first step."""
    ends = [*(at for at, _ in plans), steps]
    return [each for each, (start, end) in zip(plans, pairwise(ends), strict=True) if end > start]


def _can_travel(name: str, now: Tensor, before: Tensor) -> bool:
    """Return whether a changed buffer has a finite difference to send: one that was infinite before has not.

    Raises
    ------
    TrainingError
        If the buffer changed its shape.
    """
    if now.shape != before.shape:
        raise TrainingError(
            f"buffer {name!r} grew from shape {tuple(before.shape)} to {tuple(now.shape)} while training, like a "
            "buffer of an observer at its first batch: run the model on a batch before it is trained or sent"
        )
    if not all_finite(before):
        _LOG.warning("buffer %r began at infinity: its change is not sent", name)
        return False
    return True
