"""Which tensors each node of a step keeps for the backward pass, recorded by hooks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from fl_elastic.profiling.part import part_of
from fl_elastic.profiling.profile import SavedTensors, Seconds

# Identity of a storage, and its size in bytes.
_Storage = tuple[int, int]


class _Gone(Exception):
    """A backward pass inside the forward pass needs a tensor that was not kept."""


def saved_tensors(
    run_forward: Callable[[], Trace], model: nn.Module, parts: Sequence[CheckpointedPart] = ()
) -> SavedTensors:
    """Return which tensors each node keeps for the backward pass, identified by their storage.

    Tensors are recorded but not kept, so that the pass takes no more memory than inference. A model that computes
    gradients in its forward pass, for example for forces, runs a second time and keeps all of them.

    Inputs of the checkpointed ``parts``, which are recorded during the pass, count for each node of their part.
    """
    try:
        return _recorded(run_forward, model, parts, keeping=False)
    except _Gone:
        return _recorded(run_forward, model, parts, keeping=True)


def _storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    return [part.untyped_storage() for part in dense_parts(tensor)]


class _Recorder:
    """Records the storages that nodes keep in a forward pass.

    Attributes
    ----------
    kept : dict of int to list
        Storages that nodes keep, by the nodes' numbers; without the model's own tensors.
    laid : dict of int to list
        Its keys are the numbers of nodes that keep a map or filter stored channels last.
    """

    def __init__(self, model: nn.Module, *, keeping: bool) -> None:
        self._model, self._keeping = model, keeping
        owned = (*model.parameters(), *model.buffers())
        self._own = {each.data_ptr() for tensor in owned for each in _storages_of(tensor)}
        # Marks are kept alive, because otherwise another storage could get the same mark.
        self._marks: dict[int, Any] = {}
        self.kept: dict[int, list[_Storage]] = {}
        self.laid: dict[int, list[_Storage]] = {}

    @contextmanager
    def recording(self) -> Iterator[dict[Any, _Storage]]:
        """Record the forward pass inside the block; yield storages of the outputs of modules, by node."""
        # Not an attribute: nodes refer to the hooks below, and these to this object, which must not refer to nodes.
        outputs: dict[Any, _Storage] = {}

        def note(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                for storage in _storages_of(output)[:1]:
                    outputs.setdefault(output.grad_fn, self._marked(storage))

        handles = [each.register_forward_hook(note) for each in self._model.modules()]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield outputs
        finally:
            for handle in handles:
                handle.remove()

    def foreign(self, tensor: Tensor) -> list[_Storage]:
        """Return the storages of a tensor that are not the model's own."""
        storages = _storages_of(tensor)
        return [self._marked(each) for each in storages if each.data_ptr() not in self._own]

    def _marked(self, storage: torch.UntypedStorage) -> _Storage:
        mark = mark_of(storage)
        self._marks.setdefault(mark.cdata, mark)
        return mark.cdata, storage.nbytes()

    def _pack(self, tensor: Tensor) -> Tensor | None:
        # The node that saves this tensor got its number just before.
        number = next_number() - 1
        if found := self.foreign(tensor):
            self.kept.setdefault(number, []).extend(found)
        if _is_channels_last(tensor):
            self.laid[number] = []
        # Detached: if a hook returned an operation's own output, the reference cycle would never be freed.
        return tensor.detach() if self._keeping else None

    @staticmethod
    def _unpack(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            raise _Gone
        return tensor


def _recorded(
    run_forward: Callable[[], Trace],
    model: nn.Module,
    parts: Sequence[CheckpointedPart],
    *,
    keeping: bool,
) -> SavedTensors:
    recorder = _Recorder(model, keeping=keeping)
    with recorder.recording() as outputs:
        trace = run_forward()
    places = _places_by_number(trace)
    by_number = _by_known_number(recorder.kept, places, trace)
    for part in parts:
        held = [each for tensor in part.inputs for each in recorder.foreign(tensor)]
        for number in places:
            if part.first <= number < part.end:
                by_number.setdefault(number, []).extend(held)
    ids: dict[int, int] = {}
    sizes: list[int] = []

    def id_of(mark: int, size: int) -> int:
        if mark not in ids:
            ids[mark] = len(sizes)
            sizes.append(size)
        return ids[mark]

    pairs = sorted(
        {
            (index, id_of(*storage))
            for number, index in places.items()
            for storage in by_number.get(number, ())
        }
    )
    made = [id_of(*outputs[node]) if node in outputs else -1 for node in trace.nodes]
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    last = np.zeros(len(made), dtype=np.int64)
    last[[places[number] for number in _by_known_number(recorder.laid, places, trace)]] = 1
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
    """Return each node's index by its number; nodes computed from a group's parameters alone get its owner's index.

    Such nodes exist, for example, if learned queries attend to each other before they attend to the input.
    """
    owners = trace.graph.group_nodes()
    found = {number_of(node): owners[group][-1] for node, group in trace.weight_nodes}
    return found | {number_of(node): i for i, node in enumerate(trace.nodes) if node is not None}


def _by_known_number(
    kept: dict[int, list[_Storage]], places: dict[int, int], trace: Trace
) -> dict[int, list[_Storage]]:
    """Return the kept storages by the numbers of the graph's nodes.

    An in-place operation first copies the tensor that it keeps. The copy takes a number that no node of the graph
    has, so the storage is assigned to the node with the next lower number. For an in-place operation on a view, the
    graph has a ``CopySlices``, made just after the operation's own node and the copy: it gets what both keep.
    """
    ordered = sorted(places)
    slices = {
        number_of(node)
        for node in trace.nodes
        if node is not None and node.name().endswith("CopySlices")
    }
    found: dict[int, list[_Storage]] = {}
    for number, tensors in kept.items():
        place = bisect_right(ordered, number) - 1
        if ordered[place] != number and (later := slices & {number + 1, number + 2}):
            found.setdefault(min(later), []).extend(tensors)
        elif place >= 0:
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
    """Return which tensors each node keeps; nodes of recomputed parts keep those of their second run.

    All such parts are counted as if they ran again at the same time, because the graph does not show when they do.
    So a step never takes more memory than this. The parts are examined on a small part of the batch, because the
    whole batch may not fit into memory without recomputation.

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
