"""Measure a cost profile in about fifteen steps.

Method (after section 5 of the ElasticTrainer paper, Huang et al., MobiSys 2023, rebuilt on autograd's node hooks):
a pass with all parameters trainable measures the time of each backward node as a whole. A pass with only the input
trainable measures the time of passing the error gradient on. The difference is the cost of the node's own gradient.
Real steps at a few depths then calibrate the sum, and give the time of the optimiser, and of the forward pass at
each depth.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fl_elastic.errors import DivergedError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import compute_loss, to_device
from fl_elastic.groups.from_inputs import loss_from_inputs
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.torch_private import uncompiled
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.trainable import flags_kept
from fl_elastic.groups.untouched import same_start, untouched
from fl_elastic.ops.lean_kind import lean_kinds
from fl_elastic.optimizers import OptimizerFn, made_by
from fl_elastic.profiling.bytes_beside import optimizer_moment, with_bytes_beside
from fl_elastic.profiling.calibrate import calibrate, time_steps
from fl_elastic.profiling.clock import Clock, clock_for
from fl_elastic.profiling.node_timer import TracedEdges, time_nodes
from fl_elastic.profiling.prefix import measure_prefix
from fl_elastic.profiling.profile import CostProfile, Seconds, model_device, profile_key
from fl_elastic.profiling.saved_tensors import saved_by_step, saved_bytes_by_node

_NODE_REPEATS = 4


def profile_model(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    *,
    optimizer_fn: OptimizerFn | None = None,
    clock: str = "auto",
) -> CostProfile:
    """Measure what it costs to train every tensor group of ``model`` on this device.

    This takes about 15 training steps. Weights, buffers, gradients and RNG are left unchanged.

    Parameters
    ----------
    model : nn.Module
        The model on its device, in the mode that it will train in.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` returning a scalar tensor.
    batch : tuple
        ``(inputs, targets)`` of the shape that training will use.
    optimizer_fn : callable, optional
        ``optimizer_fn(parameters)``; without it the optimiser's step counts as free.
    clock : {"auto", "wall", "cpu"}
        See `fl_elastic.profiling.clock.clock_for`.

    Raises
    ------
    DivergedError
        If the loss on the batch is not finite.
    """
    model = uncompiled(model)
    batch = to_device(batch, model_device(model))
    timer = clock_for(model_device(model), clock)
    with untouched(model, loss_fn), same_start(model):
        _warm_up(model, loss_fn, batch)
        edges = TracedEdges.of(trace_step(model, loss_fn, batch))
        full = _time_full(model, loss_fn, batch, edges, timer)
        path = _time_path(model, loss_fn, batch, edges, timer)
        update_seconds, path_seconds = _split(edges.graph, full, path)
        saved = saved_by_step(lambda: trace_step(model, loss_fn, batch), model, loss_fn, batch)
        raw = CostProfile(
            key=profile_key(model, batch, optimizer_fn),
            graph=edges.graph,
            node_update_seconds=update_seconds,
            node_path_seconds=path_seconds,
            optimizer_seconds=np.zeros(len(edges.graph.groups)),
            forward_seconds=np.zeros(len(edges.graph.groups)),
            fixed_seconds=0.0,
            node_saved_bytes=saved_bytes_by_node(edges.graph, saved),
            optimizer_bytes_per_weight=0.0,
            saved=saved,
            node_lean=lean_kinds(edges.graph, model),
        )
        raw = with_bytes_beside(raw, edges, model, loss_fn, [batch], 1.0)
        if optimizer_fn is not None:
            moment = optimizer_moment(made_by(optimizer_fn, model), model_device(model))
            raw = replace(raw, optimizer_moment_per_weight=moment)
        # The trace is freed here: its saved activations would take the memory of the passes below.
        profile = calibrate(raw, time_steps(model, loss_fn, batch, raw, optimizer_fn, timer))
        return measure_prefix(profile, model, batch, timer)


def _warm_up(model: nn.Module, loss_fn: LossFn, batch: Batch) -> None:
    """Take one step, so that the first use of each kernel is not timed; raise if the loss is not finite."""
    loss = compute_loss(model, loss_fn, batch)
    if not torch.isfinite(loss):
        raise DivergedError(
            f"the loss on the profiling batch is {loss.item()}: check its inputs and targets"
        )
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


def _time_full(
    model: nn.Module, loss_fn: LossFn, batch: Batch, edges: TracedEdges, timer: Clock
) -> Seconds:
    """Time each node of a step that computes gradients of all parameters but not of the input, as in training."""
    repeats = []
    for _ in range(_NODE_REPEATS):
        repeats.append(time_nodes(edges, compute_loss(model, loss_fn, batch), timer))
        model.zero_grad(set_to_none=True)
    return _lowest(repeats)


def _time_path(
    model: nn.Module, loss_fn: LossFn, batch: Batch, edges: TracedEdges, timer: Clock
) -> Seconds:
    """Time each node with only the input trainable (or the deepest group, if the input has no gradient)."""
    repeats = []
    with flags_kept(model.parameters()):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if not loss_from_inputs(model, loss_fn, batch)[0].requires_grad:
            deepest = max(set(range(len(edges.graph.groups))) - set(edges.graph.unused))
            for name in edges.graph.groups[deepest].parameters:
                model.get_parameter(name).requires_grad_(True)
        for _ in range(_NODE_REPEATS):
            loss, _ = loss_from_inputs(model, loss_fn, batch)
            repeats.append(time_nodes(edges, loss, timer))
            model.zero_grad(set_to_none=True)
    return _lowest(repeats)


def _lowest(repeats: list[Seconds]) -> Seconds:
    """Return the smallest time of each node; NaN if it never ran."""
    stacked = np.stack(repeats)
    lowest = np.where(np.isnan(stacked), np.inf, stacked).min(axis=0)
    return np.where(np.isinf(lowest), np.nan, lowest)


def _split(graph: BackwardGraph, full: Seconds, path: Seconds) -> tuple[Seconds, Seconds]:
    """Split each node's time into its own gradient and passing the error gradient on."""
    full = np.nan_to_num(full)
    owner = np.array([node.group is not None for node in graph.nodes])
    ends = np.array([not node.inputs for node in graph.nodes])
    # For the few nodes that ran in only one of the passes, half is the usual share of either gradient.
    path = np.where(np.isnan(path), full / 2, np.minimum(path, full))
    path = np.where(owner, path, full)
    path = np.where(ends & owner, 0.0, path)
    return full - path, path
