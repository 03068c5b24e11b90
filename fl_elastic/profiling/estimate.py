"""Estimate a first cost profile in the time of at most a few steps; training corrects it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.errors import DivergedError, TrainingError
from fl_elastic.groups import Batch, LossFn, Mode, TensorGroup
from fl_elastic.groups.forward import compute_loss, to_device
from fl_elastic.groups.graph import BackwardGraph, BackwardNode
from fl_elastic.groups.trace import Trace, trace_step
from fl_elastic.groups.untouched import preserved_rng, same_start, untouched
from fl_elastic.ops.lean_kind import convolution_module, lean_kinds
from fl_elastic.optimizers import OptimizerFn, alike, made_by
from fl_elastic.profiling.bytes_beside import gradients_let_go, optimizer_moment, with_bytes_beside
from fl_elastic.profiling.clock import Clock, clock_for
from fl_elastic.profiling.macs import node_macs, passing_nodes
from fl_elastic.profiling.memory import code_to_load, trial_bytes
from fl_elastic.profiling.node_timer import TracedEdges, time_nodes
from fl_elastic.profiling.part import part_of
from fl_elastic.profiling.prefix import measure_prefix
from fl_elastic.profiling.profile import (
    CostProfile,
    ModeCosts,
    ProfileKey,
    SavedTensors,
    Seconds,
    model_device,
    profile_key,
)
from fl_elastic.profiling.saved_tensors import saved_by_step, saved_bytes_by_node

# Share of the own gradient in a layer's backward time, if it also passes the error gradient on. The gradients of
# weights and inputs take equally many operations; a norm's own sums are the smaller part.
_OWN_SHARE = {"conv": 0.5, "linear": 0.5, "norm": 0.3, "embedding": 1.0, "other": 0.5}
# On a CPU the allocator returns gradients larger than this to the system, so that every step writes to new pages.
# This takes about five times as long as reading as many numbers, and the products of one row a twentieth.
_KEPT_NUMBERS, _WRITING, _ROW = 1 << 23, 5.0, 0.05
# Size of the weight on which the optimiser is timed: the least, the most, and the most under a memory limit. With
# gradient and state, a large weight must not fit into the processor's cache: half as many numbers partly fit into a
# server's cache, and a step seems a fifth cheaper.
_FEWEST_NUMBERS, _MOST_NUMBERS, _MOST_UNDER_LIMIT = 1 << 12, 1 << 23, 1 << 17
# Bytes per number of that weight, including its gradient, its state, and temporary tensors of a step of Adam.
_BYTES_OF_NUMBER = 32.0
_TENSOR_SECONDS = 5e-6
# Bytes of Python's and torch's objects for one node of the graph.
_NODE_BYTES = 3_000.0
# Bytes that the record of a step takes for one node.
_RECORD_BYTES = 15_000.0
# Most bytes of a record that is made under any budget, and of one that is made if memory allows: recording more
# operations takes as long as ten steps.
_SMALL_RECORD, _LARGE_RECORD = 2e6, 16e6
# Number of products that take as long as reading or writing one number.
_PRODUCTS_PER_NUMBER = 16.0
_TRIES = 2
_MOST_FOR_TRACING = 0.25
_TINY = 1e-6

T = TypeVar("T")


def estimate_profile(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    *,
    optimizer_fn: OptimizerFn,
    clock: str = "auto",
    memory: float | None = None,
    prefix: bool = False,
    deadline: float | None = None,
) -> CostProfile:
    """Return the costs of training every tensor group here, from one traced forward pass and one timed step.

    A node's time is split between its own gradient and the error gradient by operation counts, or by bytes for a
    very large linear layer. The forward pass is charged in full at every depth. The optimiser is timed on one
    weight. Weights, buffers, gradients and RNG are left unchanged. `profile_model` measures each of these costs
    instead. On an accelerator two more steps are taken, one of which is timed as a whole.

    Parameters
    ----------
    model, loss_fn, batch
        The model, loss and batch of the training.
    optimizer_fn : callable
        ``optimizer_fn(parameters)``.
    clock : {"auto", "wall", "cpu"}
        See `fl_elastic.profiling.clock.clock_for`.
    memory : float, optional
        Bytes that a step may keep. With this limit one step uses a sixteenth of the batch (at least two examples),
        and another one twice as many; the costs of the whole batch are extrapolated from both.
    prefix : bool
        Whether the passes up to the cuts are timed too, for an elastic forward pass.
    deadline : float, optional
        Seconds of the fit. If tracing alone takes a quarter of them, no step is timed, and costs are derived from
        the forward pass.

    Raises
    ------
    DivergedError
        If the loss on the batch is not finite.
    """
    batch = to_device(batch, model_device(model))
    timer = clock_for(model_device(model), clock)
    part, scale = part_of(batch) if memory is not None else (batch, 1.0)
    tracing = _MOST_FOR_TRACING * (math.inf if deadline is None else deadline)

    def of_part(part: Batch, scale: float) -> CostProfile:
        return _estimated(
            model, loss_fn, batch, part, scale, optimizer_fn, timer, memory, tracing, prefix
        )

    try:
        return of_part(part, scale)
    except TrainingError:
        if part is batch:
            raise
        # Some models accept only one batch size, for example those that hold a state per example.
        return of_part(batch, 1.0)


def _estimated(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    part: Batch,
    scale: float,
    optimizer_fn: OptimizerFn,
    timer: Clock,
    memory: float | None,
    tracing: float,
    prefix: bool,
) -> CostProfile:
    """Return the profile estimated on a part of the batch; the whole batch is ``scale`` times as large.

    No step is timed if it would take more than ``memory``, or if tracing took more than ``tracing`` seconds.
    """
    began = timer()
    with untouched(model, loss_fn), same_start(model), _collection_paused():
        traced: list[Trace] = []

        def run() -> Trace:
            traced.append(trace_step(model, loss_fn, part))
            return traced[0]

        saved = saved_by_step(run, model, loss_fn, part)
        trace = traced.pop()
        if not torch.isfinite(trace.loss):
            raise DivergedError(
                f"the loss on the profiling batch is {trace.loss.item()}: check its inputs and targets"
            )
        # Torch's graph is freed before the timed step builds another one.
        edges, traced_graph = TracedEdges.of(trace), trace.graph
        del trace
        profile = _without_seconds(traced_graph, profile_key(model, batch, optimizer_fn), saved)
        trial = replace(profile, code_bytes=code_to_load())
        count = len(edges.names)
        parts = [part] if part is batch else [part, part_of(batch, times=2)[0]]
        room = [
            math.inf if memory is None else memory - trial_bytes(_scaled(trial, size))
            for size in range(1, len(parts) + 1)
        ]
        objects = _NODE_BYTES * count
        steps = room[0] >= objects and timer() - began <= tracing
        timed = list[Seconds]()
        for each, left in zip(parts, room, strict=True):
            if timed and (timer() - began > tracing or (steps and left < objects)):
                break
            if steps:
                # Allocating and freeing all gradients of a large model is part of a step's time.
                with nullcontext() if memory is None else gradients_let_go(model):
                    timed.append(_time_step(model, loss_fn, each, edges, timer))
            else:
                timed.append(_by_operations(model, loss_fn, each, traced_graph, timer))
        seconds = _of_whole(timed, scale)
        profile = _scaled(profile, scale)
        if memory is not None:
            most = min(room[-1], max(trial_bytes(profile), _LARGE_RECORD))
            records = steps and room[-1] >= 0 and _RECORD_BYTES * count <= max(most, _SMALL_RECORD)
            profile = with_bytes_beside(
                profile, edges, model, loss_fn, parts if records else [], scale
            )
    graph = profile.graph
    forward, backward, nodes = seconds[0], seconds[1], seconds[2:]
    update, path = _split(graph, nodes, model_device(model))
    most = _MOST_NUMBERS
    if memory is not None:
        within = max(memory / _BYTES_OF_NUMBER, _FEWEST_NUMBERS)
        most = int(min(within, _MOST_UNDER_LIMIT))
    made = made_by(optimizer_fn, model)
    optimizer, state = _optimizer_costs(graph, made, timer, most, model_device(model))
    profile = replace(
        profile,
        node_update_seconds=update,
        node_path_seconds=path,
        optimizer_seconds=optimizer,
        forward_seconds=np.full(len(graph.groups), forward),
        fixed_seconds=max(backward - float(nodes.sum()), 0.0),
        optimizer_bytes_per_weight=state,
        optimizer_moment_per_weight=optimizer_moment(made, model_device(model)),
        node_lean=lean_kinds(graph, model),
        estimated=True,
    )
    return measure_prefix(profile, model, batch, timer, repeats=1) if prefix else profile


def _without_seconds(graph: BackwardGraph, key: ProfileKey, saved: SavedTensors) -> CostProfile:
    """Return a profile that knows the memory of a step, and no times."""
    groups, nodes = np.zeros(len(graph.groups)), np.zeros(len(graph.nodes))
    return CostProfile(
        key=key,
        graph=graph,
        node_update_seconds=nodes,
        node_path_seconds=nodes,
        optimizer_seconds=groups,
        forward_seconds=groups,
        fixed_seconds=0.0,
        node_saved_bytes=saved_bytes_by_node(graph, saved),
        optimizer_bytes_per_weight=0.0,
        saved=saved,
    )


def _of_whole(timed: list[Seconds], scale: float) -> Seconds:
    """Return the seconds of the whole batch from those of a part, and of a part twice as large if it was timed.

    Much of a small operation's time does not grow with the batch: this constant, which both parts have, is counted
    once.
    """
    if len(timed) == 1:
        return timed[0] * scale
    once, twice = timed
    return (once + (scale - 1) * (twice - once)).clip(twice, np.maximum(once * scale, twice))


def _by_operations(
    model: nn.Module, loss_fn: LossFn, batch: Batch, graph: BackwardGraph, timer: Clock
) -> Seconds:
    """Return the seconds of a forward pass (measured), a backward pass and its nodes (by operation counts).

    Used if a step would exceed the memory even on a part of the batch, or if there is no time for one. In the
    backward pass a layer's products take twice their time in the forward pass, for weights and inputs; those of the
    first layer take it once. Other operations are charged by the numbers that they read and write.
    """
    try:
        with torch.no_grad():
            forward = _seconds_of_forward(model, loss_fn, batch, timer)
    except TrainingError:
        # The model computes gradients in its forward pass, for example for forces.
        forward = _seconds_of_forward(model, loss_fn, batch, timer)
    products = node_macs(graph)
    sizes = np.array([float(math.prod(node.shape)) if node.shape else 0.0 for node in graph.nodes])
    moved = sizes + [sum(sizes[below] for below in node.inputs) for node in graph.nodes]
    once = _PRODUCTS_PER_NUMBER * moved + products
    passing = passing_nodes(graph, np.ones(len(graph.groups), dtype=bool))
    shares = np.where(passing, once + products, once)
    seconds = forward * shares / max(float(once.sum()), 1.0)
    return np.array([forward, seconds.sum(), *seconds])


def _seconds_of_forward(model: nn.Module, loss_fn: LossFn, batch: Batch, timer: Clock) -> float:
    compute_loss(model, loss_fn, batch)
    started = timer()
    compute_loss(model, loss_fn, batch)
    return timer() - started


def _time_step(
    model: nn.Module, loss_fn: LossFn, batch: Batch, edges: TracedEdges, timer: Clock
) -> Seconds:
    """Return the seconds of a forward pass, of a backward pass, and of each node in it, shape (2 + M,).

    On an accelerator one step is taken before, for the first use of each kernel, and one after, in which the passes
    are timed as a whole, because waiting for each node takes longer than most nodes run.
    """

    def time_passes(backward: Callable[[Tensor], T]) -> tuple[float, float, T]:
        started = timer()
        loss = compute_loss(model, loss_fn, batch)
        between = timer()
        found = backward(loss)
        model.zero_grad(set_to_none=True)
        return between - started, timer() - between, found

    on_accelerator = model_device(model).type != "cpu"
    if on_accelerator:
        time_passes(Tensor.backward)
    forward, backward, nodes = time_passes(
        lambda loss: np.nan_to_num(time_nodes(edges, loss, timer))
    )
    if on_accelerator:
        forward, backward, _ = time_passes(Tensor.backward)
        nodes = nodes * min(backward / max(float(nodes.sum()), _TINY), 1.0)
    return np.array([forward, backward, *nodes])


def estimated_modes(profile: CostProfile, model: nn.Module, modes: tuple[Mode, ...]) -> CostProfile:
    """Return the profile with costs of ``modes``, where they apply, estimated by their share of the operations."""
    known = () if profile.modes is None else profile.modes.modes
    if set(modes) <= set(known):
        return profile
    wanted = tuple(dict.fromkeys([*known, *modes]))
    update = np.full((len(profile), len(wanted)), np.nan)
    path = np.full_like(update, np.nan)
    for group in range(len(profile)):
        module = convolution_module(profile.graph, model, group)
        if module is None:
            continue
        for column, mode in enumerate(wanted):
            if mode.kind == "bias" and module.bias is None:
                continue
            if mode.kind == "channels" and module.groups not in (1, module.in_channels):
                continue
            share = {"bias": 0.0, "channels": mode.fraction, "filtered": 1 / mode.patch**2}
            # Gathering the kept channels, or summing patches, costs a pass over the input.
            update[group, column] = min(0.1 + share.get(mode.kind, 1.0), 1.0)
            path[group, column] = update[group, column] if mode.filters_input else 1.0
    if profile.modes is not None:
        measured = [wanted.index(mode) for mode in known]
        update[:, measured] = profile.modes.update_ratio
        path[:, measured] = profile.modes.path_ratio
    return replace(profile, modes=ModeCosts(wanted, update, path))


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Pause garbage collection, which took twice as long as everything else for a graph of thousands of nodes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _scaled(profile: CostProfile, scale: float) -> CostProfile:
    """Return the profile with shapes and bytes scaled to the whole batch."""
    graph, saved = profile.graph, profile.saved
    if scale == 1.0 or saved is None:
        return profile

    def whole(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (round(shape[0] * scale), *shape[1:]) if shape else shape

    graph = replace(
        graph,
        nodes=tuple(replace(node, shape=whole(node.shape)) for node in graph.nodes),
        cuts=tuple(
            replace(cut, skipped=tuple((name, whole(shape)) for name, shape in cut.skipped))
            for cut in graph.cuts
        ),
    )
    saved = replace(saved, tensor_bytes=saved.tensor_bytes * scale)
    of_nodes = saved_bytes_by_node(graph, saved)
    return replace(profile, graph=graph, saved=saved, node_saved_bytes=of_nodes)


def _split(graph: BackwardGraph, seconds: Seconds, device: torch.device) -> tuple[Seconds, Seconds]:
    """Split each node's time into its own gradient and passing the error gradient on."""
    own = np.zeros(len(seconds))
    for index, node in enumerate(graph.nodes):
        if node.group is not None:
            group = graph.groups[node.group]
            own[index] = _own_share(group, node, device) if node.inputs else 1.0
    return seconds * own, seconds * (1 - own)


def _own_share(group: TensorGroup, node: BackwardNode, device: torch.device) -> float:
    """Return the own gradient's share of a node's time: by operations, or by bytes for a large linear layer."""
    kind = group.kind.value
    if kind != "linear" or device.type != "cpu" or group.numel <= _KEPT_NUMBERS or not node.shape:
        return _OWN_SHARE[kind]
    products = _ROW * math.prod(node.shape[:-1])
    return (products + _WRITING) / (2 * products + _WRITING + 1)


def _optimizer_costs(
    graph: BackwardGraph,
    made: torch.optim.Optimizer,
    timer: Clock,
    most: int,
    device: torch.device,
) -> tuple[Seconds, float]:
    """Return the seconds of each group's optimiser step, and the bytes of state per weight.

    A step is timed on a weight as large as the largest group, at most ``most`` numbers; the time of the call
    itself, from a tiny weight, is subtracted.
    """
    largest = max(group.numel for group in graph.groups)
    count = min(max(largest, _FEWEST_NUMBERS), most)
    # An optimiser may draw random numbers, as for noise or rounding.
    with preserved_rng():
        seconds, state = _step_of_optimizer(made, count, timer, device)
        call, _ = _step_of_optimizer(made, 1, timer, device)
    per_number = max(seconds - call, 0.0) / count
    return np.array(
        [per_number * g.numel + _TENSOR_SECONDS * len(g.parameters) for g in graph.groups]
    ), state


def _step_of_optimizer(
    made: torch.optim.Optimizer, count: int, timer: Clock, device: torch.device
) -> tuple[float, float]:
    """Return the least seconds of a step on a weight of ``count`` numbers, and the bytes of state per number.

    An optimiser that does not accept such a weight, for example one for matrices only, is costed as Adam.
    """
    weight = nn.Parameter(torch.zeros(count, device=device))
    # Not zeros: all their pages are one shared page until written, which is read far faster than a real gradient.
    weight.grad = torch.full((count,), _TINY, device=device)
    try:
        optimizer = alike(made, weight)
        optimizer.step()
    except Exception:
        optimizer = torch.optim.Adam([weight])
        optimizer.step()
    fastest = math.inf
    for _ in range(_TRIES):
        started = timer()
        optimizer.step()
        fastest = min(fastest, timer() - started)
    values = [value for state in optimizer.state.values() for value in state.values()]
    kept = sum(value.nbytes for value in values if isinstance(value, Tensor) and value.numel() > 1)
    return fastest, kept / count
