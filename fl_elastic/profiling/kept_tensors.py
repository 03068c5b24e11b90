"""Bytes that the nodes of a step keep from the forward pass until they run backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fl_elastic.groups import Mode, TensorGroup
from fl_elastic.groups.graph import BackwardGraph, BackwardNode
from fl_elastic.ops.lean_kind import LeanKind
from fl_elastic.profiling.layer_shapes import entering_shape
from fl_elastic.profiling.profile import CostProfile, Mask, SavedTensors, Seconds
from fl_elastic.profiling.reordered_copies import ReorderedBytes, reordered_bytes

_FLOAT = 4
# These operations pass the error gradient on unchanged, possibly in another shape.
_SAME_STORAGE = (
    "View", "UnsafeView", "Reshape", "Transpose", "TBackward", "Permute", "Squeeze", "Unsqueeze",
    "Add", "Clone", "Alias",
)  # fmt: skip
# These operations pass on parts of the error gradient; all of it stays in memory while any part is needed.
_PARTS = ("Cat", "Stack")
# These operations need their whole input and output at the same time, in any mode of the model.
_WHOLE_STEPS = (
    "Convolution", "Addmm", "Mm", "NativeBatchNorm", "NativeLayerNorm", "NativeGroupNorm",
    "MaxPool", "AvgPool", "Gelu",
)  # fmt: skip
# The scalar output of these losses keeps the memory of the values before the mean until the end of the step.
_LOSSES = ("MseLoss", "SmoothL1Loss", "HuberLoss")
# On CPUs dropout is a multiplication by a mask.
_DROPOUTS = ("Mul", "NativeDropout", "FusedDropout")


@dataclass(frozen=True, eq=False)
class InFlight:
    """Bytes of tensors on their way between operations; arrays have shape (M,), in backward order.

    They are neither kept for the backward pass nor gradients of weights.

    Attributes
    ----------
    passing : array
        Bytes while each node runs backward and passes the error gradient on: its incoming and outgoing error
        gradients, and the error gradients that wait for other branches. An activation that is not kept lives as
        long as its error gradient, so the forward pass holds as many bytes at the same node.
    ending : array
        The same if the node passes no error gradient on.
    dropping : array
        ``passing`` of nodes that inference may skip, 0 for others: dropouts, and with them the weights of an
        attention, which torch does not store if nothing is dropped.
    training : array
        Extra bytes of a layer while its own weights are trained.
    inference : float
        Lowest possible peak of an inference pass, which a device needs in any case.
    """

    passing: Seconds
    ending: Seconds
    dropping: Seconds
    training: Seconds
    inference: float


@lru_cache(maxsize=64)
def in_flight(
    graph: BackwardGraph,
    channels_last: tuple[int, ...] = (),
    threads: int = 1,
    batch_shape: tuple[int, ...] = (),
) -> InFlight:
    """Return the bytes on their way at each node of a graph; tensors of unknown shape count as zero.

    Parameters
    ----------
    graph : BackwardGraph
        Graph of the model.
    channels_last : tuple of int
        See `SavedTensors.channels_last`, for each node; zero by default.
    threads : int
        Number of torch threads.
    batch_shape : tuple of int
        Shape of the model's input.
    """
    count = len(graph.nodes)
    sizes = [_FLOAT * float(math.prod(node.shape)) if node.shape else 0.0 for node in graph.nodes]
    first, storage, end = list(range(count)), list(range(count)), list(range(count))
    inference, last = 0.0, channels_last or (0,) * count
    orders = [ReorderedBytes()] * count
    for index, node in enumerate(graph.nodes):
        hands_on = node.name.startswith(_SAME_STORAGE)
        for below in node.inputs:
            if first[below] != below:
                continue
            # The first node that reads this output creates its error gradient.
            first[below] = index
            if node.name.startswith(_PARTS) or (hands_on and sizes[below] == sizes[index]):
                storage[below] = storage[index]
                end[storage[index]] = max(end[storage[index]], below)
        if node.name.startswith(_WHOLE_STEPS):
            # The model's own input exists anyway.
            at_once = sizes[index] + sum(
                sizes[i] for i in node.inputs if not _is_given(graph.nodes[i])
            )
            if node.name.startswith("MaxPool"):
                # The position of each maximum, in eight bytes, is computed even if it is not needed.
                at_once += 2 * sizes[index]
            if "Convolution" in node.name:
                orders[index] = each = reordered_bytes(
                    graph, node, last[index], threads, batch_shape
                )
                at_once += each.inference
            inference = max(inference, at_once)
    started, ended, made = (np.zeros(count + 1) for _ in range(3))
    for index in range(count):
        if storage[index] == index:
            started[first[index]] += sizes[index]
            ended[end[index] + 1] += sizes[index]
            if first[index] != index:
                made[first[index]] += sizes[index]
        if graph.nodes[index].name.startswith(_LOSSES):
            started[index] += max((sizes[i] for i in graph.nodes[index].inputs), default=0.0)
    passing = np.cumsum(started - ended)[:count]
    dropping = np.where([_may_drop(node) for node in graph.nodes], passing, 0.0)
    handed = np.array([order.passing for order in orders])
    return InFlight(
        passing + handed,
        passing - made[:count] + handed,
        dropping,
        np.array([order.training for order in orders]) - handed,
        inference,
    )


def _is_given(node: BackwardNode) -> bool:
    """Return whether a node stands for a model input, which `loss_from_inputs` copies."""
    return node.name.startswith("Clone") and node.group is None and not node.inputs


def _may_drop(node: BackwardNode) -> bool:
    """Return whether a node multiplies its input by a tensor that no other node made, such as a dropout mask."""
    return node.group is None and len(node.inputs) == 1 and node.name.startswith(_DROPOUTS)


FLOAT = 4
"""Bytes of a number."""
_PROFILES = 8


@dataclass(frozen=True, eq=False)
class NodeTable:
    """Facts about a profile's M nodes and N groups that do not depend on what is trained.

    Attributes
    ----------
    saved : SavedTensors
        Tensors that nodes save.
    nodes, tensors : array
        Index pairs of a node and a tensor that it saves, sorted by node.
    owners, first, group
        Nodes of each group, the first node of each group, and the group of each node (-1 for none).
    statistics : array, shape (N,)
        Number of running statistics of each group.
    whole_if_plain, whole_if_lean : array of bool, shape (M,)
        Whether each node keeps all its tensors even if frozen: with torch's layers, and with lean layers.
    extra, work : array, shape (M,)
        Bytes that lean layers keep, and bytes of the temporary tensors into which they unpack them.
    beside : array, shape (2, M)
        Temporary bytes of each node in the forward and in the backward pass.
    flight : InFlight
        Tensors on their way between operations.
    totals : dict
        Results of `fl_elastic.profiling.memory.mask_bytes`.
    """

    saved: SavedTensors
    nodes: NDArray[np.int64]
    tensors: NDArray[np.int64]
    owners: tuple[tuple[int, ...], ...]
    first: NDArray[np.int64]
    statistics: NDArray[np.int64]
    group: NDArray[np.int64]
    whole_if_plain: Mask
    whole_if_lean: Mask
    extra: Seconds
    work: Seconds
    beside: Seconds
    flight: InFlight
    totals: dict[tuple[bytes, bool], float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Kept:
    """What nodes keep: all their tensors (``whole``), some bytes (``extra``), or further tensors (``besides``)."""

    table: NodeTable
    whole: Mask
    extra: Seconds
    besides: tuple[tuple[int, int], ...] = ()

    @property
    def bytes(self) -> float:
        """All kept bytes, each storage counted once."""
        return float(self.held_at_nodes().sum())

    def held_at_nodes(self) -> Seconds:
        """Return the bytes that each node holds; a storage counts for its deepest node, which runs last."""
        saved = self.table.saved
        deepest = np.full(len(saved.tensor_bytes), -1)
        kept = self.whole[self.table.nodes]
        # Nodes are in order, so the last assignment, which remains, is that of the deepest node.
        deepest[self.table.tensors[kept]] = self.table.nodes[kept]
        for node, tensor in self.besides:
            deepest[tensor] = max(deepest[tensor], node)
        used = deepest >= 0
        return self.extra + np.bincount(
            deepest[used], saved.tensor_bytes[used], minlength=len(self.extra)
        )


# Few profiles are cached: only those of the present fit are needed.
@lru_cache(maxsize=_PROFILES)
def node_table(profile: CostProfile) -> NodeTable:
    """Return the table of a profile."""
    nodes = profile.graph.nodes
    kinds = profile.node_lean if len(profile.node_lean) else np.zeros(len(nodes))
    sizes = np.array([float(math.prod(node.shape)) for node in nodes])
    extra = np.where(kinds == LeanKind.GATE, sizes / 8, 0.0) + np.where(
        kinds == LeanKind.POOL, sizes, 0.0
    )
    saved = profile.saved or SavedTensors.of_nodes(profile.node_saved_bytes)
    order, owners = np.argsort(saved.nodes, kind="stable"), profile.graph.group_nodes()
    return NodeTable(
        saved,
        saved.nodes[order],
        saved.tensors[order],
        owners,
        np.array([owner[0] for owner in owners]),
        np.array([group.statistics for group in profile.graph.groups]),
        np.array([-1 if node.group is None else node.group for node in nodes]),
        kinds != LeanKind.PRODUCT,
        kinds == LeanKind.NONE,
        extra,
        # One byte per unit of a gate, and eight per maximum.
        np.where(kinds == LeanKind.GATE, sizes, 0.0)
        + np.where(kinds == LeanKind.POOL, 8 * sizes, 0.0),
        saved.beside if saved.beside.size else np.zeros((2, len(nodes))),
        # Computed here once per profile, because hashing a graph goes over all of its nodes.
        in_flight(
            profile.graph,
            tuple(saved.channels_last.tolist()),
            profile.key.threads,
            tuple(profile.key.batch_shape),
        ),
    )


def kept_by(
    profile: CostProfile,
    modes: Sequence[Mode],
    nodes: Mask,
    *,
    lean: bool,
    inputs: Sequence[tuple[int, int]] = (),
) -> Kept:
    """Return what nodes keep; for each pair of nodes in ``inputs`` the second keeps the first one's output."""
    table = node_table(profile)
    whole = nodes & (table.whole_if_lean if lean else table.whole_if_plain)
    extra = np.where(nodes, table.extra, 0.0) if lean else np.zeros(len(nodes))
    for group, mode in enumerate(modes):
        if mode.is_frozen or not _needs_input(profile.graph.groups[group], mode):
            continue
        owners = table.owners[group]
        for index in owners:
            if nodes[index]:
                # A layer that runs several times is trained whole.
                own = _own_bytes(profile, index, mode) if len(owners) == 1 else None
                whole[index] = own is None
                extra[index] += own or 0.0
    known = []
    for made, reader in inputs:
        if table.saved.outputs[made] < 0:
            # The output is kept until the block that starts from it has run backward.
            extra[max(made - 1, reader)] += _output_bytes(profile, made)
        else:
            known.append((max(made - 1, reader), int(table.saved.outputs[made])))
    return Kept(table, whole, extra, tuple(known))


def _own_bytes(profile: CostProfile, index: int, mode: Mode) -> float | None:
    """Return the bytes that a trained group's node keeps with lean layers; None if it keeps as much as torch's."""
    node = profile.graph.nodes[index]
    lean = len(profile.node_lean) and profile.node_lean[index] == LeanKind.CONVOLUTION
    if not lean or mode.kind in ("full", "bias"):
        return None
    given = entering_shape(profile.graph, node, tuple(profile.key.batch_shape))
    if len(given) != 4:
        return None
    if mode.kind == "channels":
        if mode.axis != "in" and not _is_depthwise(profile, node):
            return None
        # In a depthwise layer each output channel reads one input channel.
        channels = node.shape[1] if mode.axis != "in" else given[1]
        return FLOAT * math.prod(given) / given[1] * min(given[1], mode.channel_count(channels))
    # Imported here: few plans have such modes.
    from fl_elastic.ops.mode_operation import OPERATIONS

    return FLOAT * OPERATIONS.make(mode.kind).kept_numbers(given, node.shape, mode)


def _needs_input(group: TensorGroup, mode: Mode) -> bool:
    """Return whether gradients need the layer's input: that of a bias does not, that of a norm's scale does."""
    return mode.kind != "bias" or len(group.vectors()) == len(group.parameters)


def _is_depthwise(profile: CostProfile, node: BackwardNode) -> bool:
    shapes = () if node.group is None else profile.graph.groups[node.group].shapes
    return any(len(shape) == 4 and shape[1] == 1 for shape in shapes)


def _output_bytes(profile: CostProfile, index: int) -> float:
    shape = profile.graph.nodes[index].shape
    return FLOAT * float(math.prod(shape)) if shape else float(profile.node_saved_bytes[index])
