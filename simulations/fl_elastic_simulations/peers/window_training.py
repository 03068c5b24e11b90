"""Train groups of a window of blocks under the exit at its front, in plain steps."""

from __future__ import annotations

from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import GroupKind
from fl_elastic.planning import Plan
from fl_elastic.profiling.profile import Mask
from fl_elastic.training.changes import changes
from fl_elastic.training.frozen import frozen_outside, training_statistics
from fl_elastic.update import Manifest, weights_of
from fl_elastic_simulations.peers.base import LocalResult, LocalTask
from fl_elastic_simulations.peers.early_exits import EarlyExits
from fl_elastic_simulations.peers.plain_steps import put_back_on_error, take_steps
from fl_elastic_simulations.peers.task_data import steps_in_time
from fl_elastic_simulations.peers.window import Window
from fl_elastic_simulations.peers.window_costs import WindowCosts

__all__ = ["train_window"]


def train_window(
    task: LocalTask,
    model: EarlyExits,
    costs: WindowCosts,
    window: Window,
    mask: Mask,
    probe_seconds: float = 0.0,
) -> LocalResult:
    """Train the groups in ``mask`` and the exit at the window's front, in as many steps as the time allows.

    Nothing behind the front is run, and only what was trained is in the update.

    Parameters
    ----------
    task : LocalTask
        What to train on.
    model : EarlyExits
        The task's model.
    costs : WindowCosts
        Of it.
    window : Window
        Of blocks; its front decides which exit is taken.
    mask : array of bool, shape (N,)
        Groups of the window, in backward order.
    probe_seconds : float
        What is gone of the task's time for choosing them.

    Raises
    ------
    BudgetError
        If the time does not pay for one step.
    """
    step_seconds = costs.step_seconds(window, mask)
    steps = steps_in_time(task, step_seconds, probe_seconds)
    manifest = Manifest.of(model)
    base = weights_of(model, manifest)
    plan = _plan(task, model, window, mask)
    with (
        put_back_on_error(model),
        frozen_outside(plan, model),
        model.left_after(window.front),
    ):
        statistics = training_statistics(model)
        taken = take_steps(task, model, task.loss_fn, steps)
        names = dict.fromkeys([*plan.trained_parameters, *statistics], taken.count)
        deltas = changes(model, manifest, base, names)
    return taken.result(task, deltas, step_seconds, choosing_seconds=probe_seconds)


def _plan(task: LocalTask, model: EarlyExits, window: Window, mask: Mask) -> Plan:
    """Return what is trained as a plan: the selected groups, and the exit if the window has one."""
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
