"""Time every node of a backward pass, and see what it keeps, by hooks on autograd's nodes."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_elastic.errors import TrainingError
from fl_elastic.groups import Batch, LossFn
from fl_elastic.groups.forward import dense_parts
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.torch_private import (
    CheckpointedPart,
    checkpointed_parts,
    mark_of,
    next_number,
    number_of,
)
from fl_elastic.groups.trace import Trace, trace_step
from fl_elastic.profiling.clock import Clock
from fl_elastic.profiling.part import part_of
from fl_elastic.profiling.profile import SavedTensors, Seconds

_FEW = 64


@dataclass(frozen=True)
class TracedEdges:
    """The edges of a traced step's graph, from the loss on, without autograd's nodes, which take a kilobyte each.

    Attributes
    ----------
    graph : BackwardGraph
        The graph of the step.
    names : list of str
        Name of each node of torch's graph, the loss first.
    places : list of int
        Index of each of these nodes in ``graph``, or -1; nodes between a group's parameters and its owner have the
        owner's index.
    edges : list of tuple of int
        Nodes below each node; -1 for none.
    """

    graph: BackwardGraph
    names: list[str]
    places: list[int]
    edges: list[tuple[int, ...]]

    @classmethod
    def of(cls, trace: Trace) -> TracedEdges:
        """Record the edges of a traced step's graph, so that the trace itself can be freed."""
        place_of = {node: index for index, node in enumerate(trace.nodes) if node is not None}
        owners = trace.graph.group_nodes()
        place_of |= {node: owners[group][-1] for node, group in trace.weight_nodes}
        number_in = {trace.loss.grad_fn: 0}
        names, places, edges = list[str](), list[int](), list[tuple[int, ...]]()
        # The list grows during the loop.
        found = [trace.loss.grad_fn]
        for node in found:
            assert node is not None
            names.append(sys.intern(node.name()))
            places.append(place_of.get(node, -1))
            below = [each for each, _ in node.next_functions]
            for each in below:
                if each is not None and each not in number_in:
                    number_in[each] = len(found)
                    found.append(each)
            edges.append(tuple(-1 if each is None else number_in[each] for each in below))
        return cls(trace.graph, names, places, edges)

    def along(self, root: Any) -> Iterator[tuple[int, str, Any]]:
        """Yield the place and name of each node, and the corresponding node below ``root``."""
        seen, stack = {-1}, [(0, root)]
        while stack:
            number, node = stack.pop()
            if node is None or number in seen or node.name() != self.names[number]:
                continue
            seen.add(number)
            stack += zip(
                self.edges[number], (each for each, _ in node.next_functions), strict=False
            )
            if self.places[number] >= 0:
                yield self.places[number], self.names[number], node


def time_nodes(edges: TracedEdges, loss: Tensor, clock: Clock) -> Seconds:
    """Run ``loss.backward()`` and return the seconds spent in each node of a traced graph, shape (M,).

    ``loss`` may belong to another graph of the same step, with other ``requires_grad`` flags. Both graphs are
    walked together from the loss, and nodes missing in it get NaN. The time of nodes between a group's parameters
    and its owner is added to the owner.

    On an accelerator each reading waits for the device, which a step does not do. The time of the fastest node is
    assumed to be this wait, and is subtracted from every node.

    Of equal nodes, such as the same operation at each time of a long sequence, only a few evenly spaced ones are
    timed, and their mean is used for all: hooks on each of them would take more memory and time than the step.
    """
    kinds: dict[object, list[tuple[int, Any]]] = {}
    for place, name, node in edges.along(loss.grad_fn):
        known = edges.graph.nodes[place]
        kind = name, known.group, known.shape, known.module
        kinds.setdefault(kind, []).append((place, node))
    timed = []
    for members in kinds.values():
        seconds: list[tuple[int, float]] = []
        handles = [_attach(node, index, seconds, clock) for index, node in _few_of(members)]
        timed.append((seconds, [index for index, _ in members], handles))
    kinds.clear()
    loss.backward()  # type: ignore[no-untyped-call]
    spent: list[tuple[int, float]] = []
    for seconds, indices, handles in timed:
        for handle in (each for pair in handles for each in pair):
            handle.remove()
        if len(indices) > _FEW and seconds:
            mean = sum(each for _, each in seconds) / len(seconds)
            spent += [(index, mean) for index in indices]
        else:
            spent += seconds
    return sums_by_node(spent, len(edges.graph.nodes), less_least=loss.device.type != "cpu")


def _few_of(members: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Return a few evenly spaced members of a list of equal nodes."""
    count = min(len(members), _FEW)
    return [members[place * len(members) // count] for place in range(count)]


def sums_by_node(spent: list[tuple[int, float]], count: int, *, less_least: bool) -> Seconds:
    """Return the seconds of each of ``count`` nodes, NaN if it never ran, optionally minus the least of all."""
    least = min((each for _, each in spent), default=0.0) if less_least else 0.0
    totals: dict[int, float] = {}
    for index, each in spent:
        totals[index] = totals.get(index, 0.0) + each - least
    return np.array([totals.get(index, np.nan) for index in range(count)])


def _attach(node: Any, index: int, spent: list[tuple[int, float]], clock: Clock) -> list[Any]:
    started = [0.0]

    def before(_: Any) -> None:
        started[0] = clock()

    def after(_: Any, __: Any) -> None:
        spent.append((index, clock() - started[0]))

    return [node.register_prehook(before), node.register_hook(after)]


class _Gone(Exception):
    """A backward pass inside the forward pass needs a tensor that was not kept."""


def saved_tensors(
    run_forward: Callable[[], Trace], model: nn.Module, parts: Sequence[CheckpointedPart] = ()
) -> SavedTensors:
    """Return which tensors each node keeps for the backward pass, identified by their storage.

    They are recorded but not kept, so that the pass takes no more memory than inference. A model that computes
    gradients in its forward pass, for example for forces, runs again and keeps them all.

    Inputs that ``parts`` of the forward pass keep, as recorded while it runs, count for each node of the part.
    """
    try:
        return _noted(run_forward, model, parts, keeping=False)
    except _Gone:
        return _noted(run_forward, model, parts, keeping=True)


def _storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    return [part.untyped_storage() for part in dense_parts(tensor)]


def _noted(
    run_forward: Callable[[], Trace],
    model: nn.Module,
    parts: Sequence[CheckpointedPart],
    *,
    keeping: bool,
) -> SavedTensors:
    owned = (*model.parameters(), *model.buffers())
    own = {each.data_ptr() for tensor in owned for each in _storages_of(tensor)}
    kept: dict[int, list[tuple[int, int]]] = {}
    # A storage's mark is kept alive, or another storage could get the same one.
    marks: dict[int, Any] = {}
    outputs: dict[Any, tuple[int, int]] = {}
    laid: dict[int, list[tuple[int, int]]] = {}

    def marked(storage: torch.UntypedStorage) -> tuple[int, int]:
        mark = mark_of(storage)
        marks.setdefault(mark.cdata, mark)
        return mark.cdata, storage.nbytes()

    def pack(tensor: Tensor) -> Tensor | None:
        for storage in _storages_of(tensor):
            if storage.data_ptr() not in own:
                # The node that saves this tensor got its number just before.
                kept.setdefault(next_number() - 1, []).append(marked(storage))
        if _is_channels_last(tensor):
            laid[next_number() - 1] = []
        # Detached: a hook that returns an operation its own output makes a cycle that is never freed.
        return tensor.detach() if keeping else None

    def unpack(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            raise _Gone
        return tensor

    def note(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            for storage in _storages_of(output)[:1]:
                outputs.setdefault(output.grad_fn, marked(storage))

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            trace = run_forward()
    finally:
        for handle in handles:
            handle.remove()
    places = _places_by_number(trace)
    by_number = _by_known_number(kept, list(places))
    for part in parts:
        inputs = [each for tensor in part.inputs for each in _storages_of(tensor)]
        held = [marked(input_) for input_ in inputs if input_.data_ptr() not in own]
        for number in places:
            if part.first <= number < part.end:
                by_number.setdefault(number, []).extend(held)
    ids: dict[int, int] = {}
    sizes: list[int] = []

    def id_of(pointer: int, size: int) -> int:
        if pointer not in ids:
            ids[pointer] = len(sizes)
            sizes.append(size)
        return ids[pointer]

    pairs = sorted(
        {
            (index, id_of(pointer, size))
            for number, index in places.items()
            for pointer, size in by_number.get(number, ())
        }
    )
    made = [id_of(*outputs[node]) if node in outputs else -1 for node in trace.nodes]
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    last = np.zeros(len(made), dtype=np.int64)
    last[[places[number] for number in _by_known_number(laid, list(places))]] = 1
    return SavedTensors(
        table[:, 0], table[:, 1], np.array(sizes, dtype=np.float64),
        np.array(made, dtype=np.int64), last,
    )  # fmt: skip


def _is_channels_last(tensor: Tensor) -> bool:
    """Return whether the channels of a map or filter are contiguous; decided by strides even for one position."""
    if tensor.dim() != 4 or tensor.shape[1] == 1:
        return False
    channels, height, width = tensor.stride()[1:]
    return channels == 1 and min(height, width) >= tensor.shape[1]


def saved_bytes_by_node(graph: BackwardGraph, saved: SavedTensors) -> Seconds:
    """Return the bytes of activations that each node keeps for backward, shape (M,).

    A storage kept by several nodes counts for the one that runs at the shallowest depth, so that the sum is exact
    for every suffix of groups next to the loss.
    """
    total = np.zeros(len(graph.nodes))
    shallowest = np.array(_shallowest_groups(graph))
    order = np.lexsort((saved.nodes, shallowest[saved.nodes]))
    tensors, first = np.unique(saved.tensors[order], return_index=True)
    np.add.at(total, saved.nodes[order][first], saved.tensor_bytes[tensors])
    return total


def _places_by_number(trace: Trace) -> dict[int, int]:
    """Return the index of each node by its number; nodes made from a group's parameters alone get its owner's.

    Such nodes occur, for example, if learned queries attend to each other before they meet the input.
    """
    owners = trace.graph.group_nodes()
    found = {number_of(node): owners[group][-1] for node, group in trace.weight_nodes}
    return found | {number_of(node): i for i, node in enumerate(trace.nodes) if node is not None}


def _by_known_number(
    kept: dict[int, list[tuple[int, int]]], numbers: list[int]
) -> dict[int, list[tuple[int, int]]]:
    """Return what was kept, by the numbers of the graph's nodes.

    An in-place operation first copies what it keeps. The copy takes a number that is in no graph, so it is assigned
    to the node numbered just before.
    """
    ordered = sorted(numbers)
    found: dict[int, list[tuple[int, int]]] = {}
    for number, tensors in kept.items():
        place = bisect_right(ordered, number) - 1
        if place >= 0:
            found.setdefault(ordered[place], []).extend(tensors)
    return found


def _shallowest_groups(graph: BackwardGraph) -> list[int]:
    """Return for each node the first group whose training makes the node run: its own or one below it."""
    shallowest = [len(graph.groups)] * len(graph.nodes)
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        below = [shallowest[i] for i in node.inputs]
        own = len(graph.groups) if node.group is None else node.group
        shallowest[index] = min([own, *below])
    return shallowest


def saved_by_step(
    run_forward: Callable[[], Trace], model: nn.Module, loss_fn: LossFn, batch: Batch
) -> SavedTensors:
    """Return which tensors each node keeps; recomputed parts count with what they keep while they run again.

    All such parts are counted as if they ran again at the same time, because the graph does not show when they do;
    so a step never takes more than this. They are examined on a small part of the batch, because the whole batch
    may not fit without recomputation.

    Parameters
    ----------
    run_forward : callable
        Runs a forward pass on ``batch``.
    model, loss_fn, batch
        The model, loss and batch of the training.
    """
    with checkpointed_parts(left_out=False) as parts:
        saved = saved_tensors(run_forward, model)
    if not parts:
        return saved
    few, scale = part_of(batch)
    try:
        saved = _without_checkpoints(model, loss_fn, few)
    except TrainingError:
        if few is batch:
            raise
        # For example if time comes first, and there are as many time steps as examples.
        saved, scale = _without_checkpoints(model, loss_fn, batch), 1.0
    return replace(saved, tensor_bytes=saved.tensor_bytes * scale)


def _without_checkpoints(model: nn.Module, loss_fn: LossFn, batch: Batch) -> SavedTensors:
    with checkpointed_parts(left_out=True) as parts:
        return saved_tensors(lambda: trace_step(model, loss_fn, batch), model, parts)
