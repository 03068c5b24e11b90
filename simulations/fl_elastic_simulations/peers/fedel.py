"""FedEL: a window of blocks moves through the model from round to round, with ElasticTrainer inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from fl_elastic.errors import ModelError
from fl_elastic.groups import Batch, LossFn, Mode, TensorGroup
from fl_elastic.groups.forward import to_device
from fl_elastic.groups.graph import GroupKind
from fl_elastic.groups.torch_private import NormWithStatistics
from fl_elastic.planning import Plan
from fl_elastic.planning.importance import IMPORTANCES, Probe
from fl_elastic.planning.importance.base import Scores
from fl_elastic.profiling.profile import Mask, model_device
from fl_elastic.training.apply_plan import frozen_outside
from fl_elastic.training.changes import changes
from fl_elastic.update import Manifest, weights_of
from fl_elastic_simulations.peers.base import (
    LocalResult,
    LocalTask,
    Peer,
    first_batch,
    register_peer,
    requested_steps,
    steps_in_time,
    task_generator,
)
from fl_elastic_simulations.peers.early_exits import EarlyExits, block_ends, with_exits
from fl_elastic_simulations.peers.training import put_back_on_error, take_steps
from fl_elastic_simulations.peers.windows import Window, WindowCosts, first_window, next_window

_BETA = 0.6
_WINDOW, _SELECTED = "window", "selected"


@register_peer("fedel")
@register_peer("fedel_free_probe", probe_passes=0)
class FedEl(Peer):
    """Train the most important tensors of a window of blocks that moves from the input to the output.

    FedEL (Zhang et al., NeurIPS 2025). Taken from the paper: blocks (layers of a chain, residual units), the first
    window, both edges and the return to the first window; a light exit at the window's front, with nothing run
    after it; ElasticTrainer's importance and selection inside the window; importance of 0.6 times the client's own
    and 0.4 times the global model's last change; averages over the clients that trained a tensor, equally weighted.

    Assumed, since the paper leaves it open: the front moves over new blocks worth one allowed step time per round;
    exits are a mean over positions and a linear layer, trained whenever used and averaged like any tensor; both
    importances are scaled to a largest of 1 before they are mixed (which cancels the learning rate by which the
    paper divides); selection is exact, and its budget is the allowed step time minus the forward pass to the front
    and the exit; if the whole window fits, all of it is trained without a probe; frozen norms run in eval mode; the
    probe, two passes over one batch at the round's start, is subtracted from the allowed time; if that does not
    suffice for the probe and a step of the group nearest to the front, only the global model's change decides; as
    many steps are taken as fit. A client without time for one step stays out, and its window moves on.

    Parameters
    ----------
    name : str
        Name under which it is registered.
    probe_passes : int
        Number of passes over a batch that are charged for a probe; with 0, importance counts as a by-product of
        steps that train anyway.
    """

    rule = "contributors"
    weighting = "uniform"
    needs_costs = True

    def __init__(self, name: str, probe_passes: int = 2) -> None:
        super().__init__(name)
        self.probe_passes = probe_passes

    uses_change = True

    def prepare(self, model: nn.Module, loss_fn: LossFn, batch: Batch) -> nn.Module:
        """Return the model with an exit after each block; its own tensors keep their names."""
        return with_exits(model, loss_fn, batch)

    def local_training(self, task: LocalTask) -> LocalResult:
        """Move the window, select, and train."""
        model = task.model
        if not isinstance(model, EarlyExits):
            raise ModelError("fedel trains a model with early exits: call prepare first")
        costs = WindowCosts(task.profile, model.ends)
        requested = requested_steps(task)
        limit = task.allowed_seconds / requested
        window = _window_of(task.memory, costs.block_seconds, limit)
        mask, probe_seconds = costs.mask(window), 0.0
        if costs.step_seconds(window, mask) > limit * (1 + 1e-9):
            probing = self._probe_seconds(task, costs, window)
            worth = (
                _change_alone(task, costs, window)
                if probing is None
                else _importance(task, model, costs, window)
            )
            probe_seconds = probing or 0.0
            mask = costs.select(window, worth, (task.allowed_seconds - probe_seconds) / requested)
        task.memory[_WINDOW] = [window.end, window.front]
        task.memory[_SELECTED] = costs.blocks_of(mask)
        return _train_window(task, model, costs, window, mask, probe_seconds)

    def rehearse(self, task: LocalTask) -> None:
        """Move the window and select, with equal importance for all groups."""
        costs = WindowCosts(task.profile, block_ends(task.profile.graph))
        limit = task.allowed_seconds / requested_steps(task)
        window = _window_of(task.memory, costs.block_seconds, limit)
        costs.select(window, np.ones(len(costs.groups(window))), limit)

    def _probe_seconds(self, task: LocalTask, costs: WindowCosts, window: Window) -> float | None:
        """Return the seconds of a probe; None if there is no time for it and the cheapest step."""
        probe = self.probe_passes * costs.step_seconds(window, costs.mask(window))
        cheapest = costs.step_seconds(window, costs.nearest(window))
        return probe if probe + cheapest <= task.allowed_seconds * (1 + 1e-9) else None


def _window_of(memory: Mapping[str, Any], seconds: Sequence[float], limit: float) -> Window:
    """Return this round's window; the first one if the notes are missing or of another model."""
    last = memory.get(_WINDOW)
    if last is None or not 0 <= last[0] <= last[1] < len(seconds):
        return first_window(seconds, limit)
    return next_window(seconds, limit, Window(*last), memory.get(_SELECTED, ()))


def _importance(task: LocalTask, model: EarlyExits, costs: WindowCosts, window: Window) -> Scores:
    """Return the adjusted importance of the window's groups, measured at its exit."""
    chosen = costs.groups(window)
    groups = task.profile.graph.groups[chosen.start : chosen.stop]
    batch = to_device(first_batch(task), model_device(model))
    probe = Probe(
        model=model,
        loss_fn=task.loss_fn,
        groups=groups,
        batches=[batch],
        shadow_optimizer=task.optimizer_fn,
        generator=task_generator(task),
    )
    with model.left_after(window.front):
        own = IMPORTANCES.make("elastic_same_batch").score(probe)
    return adjusted_importance(own, groups, task.global_change)


def _change_alone(task: LocalTask, costs: WindowCosts, window: Window) -> Scores:
    """Return the global model's change in the window's groups; equal numbers if none is known."""
    chosen = costs.groups(window)
    groups = task.profile.graph.groups[chosen.start : chosen.stop]
    change = adjusted_importance(np.zeros(len(groups)), groups, task.global_change)
    return change if change.any() else np.ones(len(groups))


def adjusted_importance(
    own: Scores, groups: Sequence[TensorGroup], global_change: Mapping[str, float]
) -> Scores:
    """Return 0.6 times the client's own importance plus 0.4 times the global model's change, both at most 1.

    Parameters
    ----------
    own : array, shape (N,)
        Importance at the client.
    groups : sequence of TensorGroup
        The scored groups.
    global_change : dict of str to float
        Squared change of each tensor in the last round; if there is none, only the own importance counts.

    Examples
    --------
    >>> from fl_elastic.groups.graph import GroupKind
    >>> groups = [TensorGroup(n, (n,), ((1,),), GroupKind.OTHER) for n in "ab"]
    >>> adjusted_importance(np.array([4.0, -1.0]), groups, {"b": 9.0}).tolist()
    [0.6, 0.25]
    """
    own = _scaled(own)
    change = np.array([sum(global_change.get(n, 0.0) for n in g.parameters) for g in groups])
    return own if not change.any() else _BETA * own + (1 - _BETA) * _scaled(change)


def _scaled(scores: Scores) -> Scores:
    largest = float(np.abs(scores).max(initial=0.0))
    return scores / largest if largest > 0 else scores


def _train_window(
    task: LocalTask,
    model: EarlyExits,
    costs: WindowCosts,
    window: Window,
    mask: Mask,
    probe_seconds: float = 0.0,
) -> LocalResult:
    """Train the groups in ``mask`` and the exit at the window's front, in as many steps as the time allows.

    Nothing after the front is run, and the update only contains what was trained.

    Parameters
    ----------
    task : LocalTask
        The task.
    model : EarlyExits
        The task's model.
    costs : WindowCosts
        Costs of the model.
    window : Window
        Window of blocks; its front determines the exit.
    mask : array of bool, shape (N,)
        Groups of the window, in backward order.
    probe_seconds : float
        Seconds of the task's time that were used for choosing the groups.

    Raises
    ------
    BudgetError
        If the time does not suffice for one step.
    """
    step_seconds = costs.step_seconds(window, mask)
    steps = steps_in_time(task, step_seconds, probe_seconds)
    manifest = Manifest.of(model)
    base = weights_of(model, manifest)
    plan = _plan_of(task, model, window, mask)
    with (
        put_back_on_error(model),
        frozen_outside(plan, model),
        model.left_after(window.front),
    ):
        statistics = _training_statistics(model)
        taken = take_steps(task, model, task.loss_fn, steps)
        names = dict.fromkeys([*plan.trained_parameters, *statistics], taken.count)
        deltas = changes(model, manifest, base, names)
    return taken.result(task, deltas, step_seconds, choosing_seconds=probe_seconds)


def _plan_of(task: LocalTask, model: EarlyExits, window: Window, mask: Mask) -> Plan:
    """Return a plan that trains the selected groups, and the exit if the window has one."""
    groups = list(task.profile.graph.groups)
    modes = [Mode.FULL if on else Mode.FROZEN for on in mask]
    if window.front < len(model.ends):
        names = model.exit_parameters(window.front)
        shapes = tuple(tuple(model.get_parameter(name).shape) for name in names)
        groups.insert(0, TensorGroup("exit", names, shapes, GroupKind.LINEAR))
        modes.insert(0, Mode.FULL)
    seconds = task.profile.full_step_seconds
    return Plan(
        policy="window",
        groups=tuple(groups),
        modes=tuple(modes),
        full_step_seconds=seconds,
        predicted_step_seconds=seconds,
        floor_step_seconds=seconds,
        allowed_step_seconds=seconds,
        predicted_step_bytes=0.0,
    )


def _training_statistics(model: nn.Module) -> list[str]:
    """Return the names of the running statistics that a training step would update in the present modes."""
    names = []
    for prefix, module in model.named_modules():
        if (
            isinstance(module, NormWithStatistics)
            and module.training
            and module.track_running_stats
        ):
            names += [
                f"{prefix}.{name}" if prefix else name
                for name, buffer in module.named_buffers(recurse=False)
                if buffer.is_floating_point()
            ]
    return names
