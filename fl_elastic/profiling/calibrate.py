"""Time a few real steps, and scale a profile so that it predicts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from torch import nn

from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import compute_loss
from fl_elastic.groups.torch_private import BatchNorm
from fl_elastic.optimizers import OptimizerFn, made_by, state_bytes
from fl_elastic.profiling.clock import Clock
from fl_elastic.profiling.profile import CostProfile, Mask, Seconds

_REPEATS = 3


@dataclass(frozen=True)
class StepTimes:
    """Measured times of real steps, one row per mask; in seconds.

    Attributes
    ----------
    masks : list of array
        The groups that each kind of step trained.
    forward, backward, optimizer : array, shape (K,)
        Forward pass with loss; backward pass; optimiser step with clearing of gradients.
    state_bytes_per_weight : float
        Optimiser state per scalar weight.
    """

    masks: list[Mask]
    forward: Seconds
    backward: Seconds
    optimizer: Seconds
    state_bytes_per_weight: float


def time_steps(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    raw: CostProfile,
    optimizer_fn: OptimizerFn | None,
    clock: Clock,
) -> StepTimes:
    """Time real steps that train a few different sets of groups in turn; restore the weights afterwards."""
    masks = _calibration_masks(raw)
    rows = np.full((_REPEATS, len(masks), 3), np.inf)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with _weights_kept(trainable):
        optimizer = None if optimizer_fn is None else made_by(optimizer_fn, model)
        for repeat in range(_REPEATS):
            for column, mask in enumerate(masks):
                _train_only(model, raw, mask)
                rows[repeat, column] = _time_step(model, loss_fn, batch, optimizer, clock)
        state_bytes = _state_bytes_per_weight(optimizer, trainable)
    _train_only(model, raw, np.ones(len(raw), dtype=bool))
    forward, backward, optimizer_seconds = rows.min(axis=0).T
    return StepTimes(masks, forward, backward, optimizer_seconds, state_bytes)


def _calibration_masks(raw: CostProfile) -> list[Mask]:
    """Return masks: the head; the groups down to one third and to two thirds of the backward time; all groups."""
    reach = np.cumsum(raw.path_seconds + raw.update_seconds)
    masks = []
    for share in (0.0, 1 / 3, 2 / 3, 1.0):
        mask = reach <= share * reach[-1]
        mask[raw.graph.head] = True
        masks.append(mask)
    masks[-1][:] = True
    return masks


def _train_only(model: nn.Module, raw: CostProfile, mask: Mask) -> None:
    for group, on in zip(raw.graph.groups, mask, strict=True):
        for name in group.parameters:
            parameter = model.get_parameter(name)
            parameter.requires_grad_(bool(on))
            parameter.grad = None
    for module in model.modules():
        if isinstance(module, BatchNorm) and (own := list(module.parameters())):
            # As in training: a frozen BatchNorm runs in eval mode, which is cheaper.
            module.training = any(parameter.requires_grad for parameter in own)


def _time_step(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None,
    clock: Clock,
) -> tuple[float, float, float]:
    start = clock()
    loss = compute_loss(model, loss_fn, batch)
    forward = clock()
    loss.backward()  # type: ignore[no-untyped-call]
    backward = clock()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return forward - start, backward - forward, clock() - backward


@contextmanager
def _weights_kept(parameters: list[nn.Parameter]) -> Iterator[None]:
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def _state_bytes_per_weight(
    optimizer: torch.optim.Optimizer | None, parameters: list[nn.Parameter]
) -> float:
    if optimizer is None:
        return 0.0
    return state_bytes(optimizer) / max(sum(parameter.numel() for parameter in parameters), 1)


def calibrate(raw: CostProfile, steps: StepTimes) -> CostProfile:
    """Scale the node times so that their sums fit the measured steps.

    Hooks time each node alone; the scale and a constant account for the time that they miss (the engine's own work,
    cache effects). The forward time at each depth is interpolated by the path cost down to this depth.
    """
    predicted = np.array([raw.step_seconds(mask) for mask in steps.masks])
    scale, fixed = nonnegative_fit(
        np.stack([predicted, np.ones_like(predicted)], 1), steps.backward
    )
    if scale == 0.0:
        scale, fixed = steps.backward[-1] / max(predicted[-1], 1e-12), 0.0
    depths = np.array([np.flatnonzero(mask)[-1] for mask in steps.masks])
    reach = np.cumsum(raw.path_seconds)
    forward = np.interp(reach, reach[depths], np.maximum.accumulate(steps.forward))
    return replace(
        raw,
        node_update_seconds=raw.node_update_seconds * scale,
        node_path_seconds=raw.node_path_seconds * scale,
        optimizer_seconds=_per_group_optimizer_seconds(raw, steps),
        forward_seconds=forward,
        fixed_seconds=fixed + _optimizer_fit(raw, steps)[2],
        optimizer_bytes_per_weight=steps.state_bytes_per_weight,
    )


def _optimizer_fit(raw: CostProfile, steps: StepTimes) -> Seconds:
    """Return the optimiser's seconds per scalar weight, per tensor, and per step."""
    sizes = np.array([group.numel for group in raw.graph.groups], dtype=float)
    counts = np.array([len(group.parameters) for group in raw.graph.groups], dtype=float)
    features = np.array([[sizes[mask].sum(), counts[mask].sum(), 1.0] for mask in steps.masks])
    return nonnegative_fit(features, steps.optimizer)


def _per_group_optimizer_seconds(raw: CostProfile, steps: StepTimes) -> Seconds:
    per_weight, per_tensor, _ = _optimizer_fit(raw, steps)
    return np.array(
        [
            per_weight * group.numel + per_tensor * len(group.parameters)
            for group in raw.graph.groups
        ]
    )


def nonnegative_fit(features: Seconds, targets: Seconds) -> Seconds:
    """Return the non-negative coefficients with the least relative squared error.

    The result is exact: every subset of the (few) features is tried, and the best non-negative solution is the
    unconstrained one on its own support.

    Examples
    --------
    >>> nonnegative_fit(np.array([[1.0, 1.0], [2.0, 1.0]]), np.array([3.0, 5.0])).round(6).tolist()
    [2.0, 1.0]
    """
    weights = 1.0 / np.maximum(np.abs(targets), 1e-12)
    best, best_error = np.zeros(features.shape[1]), np.inf
    for size in range(1, features.shape[1] + 1):
        for support in combinations(range(features.shape[1]), size):
            columns = features[:, support] * weights[:, None]
            found, *_ = np.linalg.lstsq(columns, targets * weights, rcond=None)
            error = float(np.square(columns @ found - targets * weights).sum())
            if (found >= 0).all() and error < best_error - 1e-15:
                best, best_error = np.zeros(features.shape[1]), error
                best[list(support)] = found
    return best
