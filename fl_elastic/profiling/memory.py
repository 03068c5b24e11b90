"""What one step keeps for its backward pass, with torch's own operations and with those that keep less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fl_elastic.groups import BackwardNode, Block, Mode
from fl_elastic.profiling.profile import CostProfile, Mask, Seconds

__all__ = [
    "StepMemory",
    "group_activation_bytes",
    "mask_bytes",
    "path_activation_bytes",
    "recompute_seconds",
    "step_memory",
]

_FLOAT = 4
_GATED = ("Relu", "Hardtanh")
_POOLED = ("MaxPool2D",)


@dataclass(frozen=True)
class StepMemory:
    """Bytes that one step keeps.

    Attributes
    ----------
    activations : float
        Saved between the forward and the backward pass, recomputed blocks counted with the largest of them.
    gradients, optimizer : float
        Gradients and optimiser state of the trained parameters, whole tensors: torch gives a parameter a gradient
        and a state of its own shape, also if only some channels are trained.
    largest_block : float
        The part of the activations that the largest recomputed block keeps while it runs again.
    """

    activations: float
    gradients: float
    optimizer: float
    largest_block: float = 0.0

    @property
    def total(self) -> float:
        """All of it: what a memory budget limits."""
        return self.activations + self.gradients + self.optimizer


def step_memory(
    profile: CostProfile,
    modes: Sequence[Mode],
    *,
    lean: bool = False,
    recomputed: Sequence[Block] = (),
) -> StepMemory:
    """Return what a step of a plan keeps.

    Parameters
    ----------
    profile : CostProfile
        Of a model whose nodes have known shapes.
    modes : sequence of Mode
        How each group is trained, in backward order.
    lean : bool
        Whether layers run by `fl_elastic.ops`, which keep only what their mode needs.
    recomputed : sequence of Block
        Blocks that keep their input alone and run a second time; they do not overlap.
    """
    mask = np.array([not mode.is_frozen for mode in modes])
    weights = 0
    for group, mode in zip(profile.graph.groups, modes, strict=True):
        trained = mode.trains(group)
        pairs = zip(group.parameters, group.shapes, strict=True)
        weights += sum(math.prod(shape) for name, shape in pairs if name in trained)
    running, _ = profile.running_nodes(mask)
    kept = _Kept(profile, modes, lean=lean)
    inside = {index for block in recomputed for index in block.nodes}
    stored = [index for index in np.flatnonzero(running).tolist() if index not in inside]
    inputs = {block.input_node for block in recomputed if running[block.output_node]}
    largest = max((kept.bytes_of(_running(block, running)) for block in recomputed), default=0.0)
    return StepMemory(
        activations=kept.bytes_of(stored, inputs) + largest,
        gradients=_FLOAT * float(weights),
        optimizer=profile.optimizer_bytes_per_weight * float(weights),
        largest_block=largest,
    )


def mask_bytes(profile: CostProfile, mask: Mask, *, lean: bool = False) -> float:
    """Return what a step keeps that trains the groups in ``mask`` in full."""
    modes = [Mode.FULL if on else Mode.FROZEN for on in mask]
    return step_memory(profile, modes, lean=lean).total


def recompute_seconds(profile: CostProfile, block: Block) -> float:
    """Return the forward pass of a block, from the measured passes up to the cuts around it."""
    cuts = profile.graph.cuts
    if len(profile.cut_plain_seconds) == 0:
        share = len(block.nodes) / max(len(profile.graph.nodes), 1)
        return float(profile.forward_seconds[-1]) * share
    places = [cut.node for cut in cuts]
    deeper, shallower = np.interp(
        [block.input_node, block.output_node], places, profile.cut_plain_seconds
    )
    return float(max(shallower - deeper, 0.0))


def path_activation_bytes(profile: CostProfile, inside: set[int], *, lean: bool) -> Seconds:
    """Return the bytes kept between each group and the one before it when neither is trained, shape (N,).

    Nodes ``inside`` recomputed blocks keep nothing. Without lean layers a frozen group keeps all that it would if
    it were trained, and that is counted here.
    """
    nothing = [Mode.FROZEN] * len(profile)
    kept = _Kept(profile, nothing, lean=lean)
    path: Seconds = np.zeros(len(profile))
    group, deepest = 0, [nodes[-1] for nodes in profile.graph.group_nodes()]
    for index in range(len(profile.graph.nodes)):
        while group < len(profile) and index > deepest[group]:
            group += 1
        if group < len(profile) and index not in inside:
            path[group] += kept.bytes_of([index])
    return path


def group_activation_bytes(
    profile: CostProfile, group: int, mode: Mode, inside: set[int], *, lean: bool
) -> float:
    """Return the bytes that a group keeps in ``mode`` beyond what it keeps when it is frozen."""
    if not lean:
        return 0.0
    modes = [Mode.FROZEN] * len(profile)
    modes[group] = mode
    own = [index for index in profile.graph.group_nodes()[group] if index not in inside]
    trained = _Kept(profile, modes, lean=True).bytes_of(own)
    return trained - _Kept(profile, [Mode.FROZEN] * len(profile), lean=True).bytes_of(own)


def _running(block: Block, running: Mask) -> list[int]:
    return [index for index in block.nodes if running[index]]


class _Kept:
    """Adds up what nodes keep, each stored tensor once."""

    def __init__(self, profile: CostProfile, modes: Sequence[Mode], *, lean: bool) -> None:
        self._nodes = profile.graph.nodes
        self._saved = profile.node_saved_bytes
        self._groups = profile.graph.groups
        self._modes = modes
        self._lean = lean

    def bytes_of(self, indices: Sequence[int], inputs: set[int] | None = None) -> float:
        """Return the bytes of these nodes, and of whole tensors that ``inputs`` made."""
        if not self._lean:
            whole = {index: self._output_bytes(index) for index in inputs or ()}
            return float(self._saved[list(indices)].sum() + sum(whole.values()))
        tensors = {index: self._output_bytes(index) for index in inputs or ()}
        extra = 0.0
        for index in indices:
            source, size = self._lean_bytes(index)
            if source is None:
                extra += size
            else:
                tensors[source] = max(tensors.get(source, 0.0), size)
        return extra + sum(tensors.values())

    def _lean_bytes(self, index: int) -> tuple[int | None, float]:
        """Return what a node keeps, and the node whose output that is if it is a whole tensor."""
        node = self._nodes[index]
        mode = Mode.FROZEN if node.group is None else self._modes[node.group]
        vanilla = float(self._saved[index])
        if not node.module or not node.shape:
            whole = node.name.startswith(_GATED) and bool(node.shape)
            return (index, self._output_bytes(index)) if whole else (None, vanilla)
        if node.name.startswith("Convolution"):
            return self._convolution(node, mode, vanilla)
        if "BatchNorm" in node.name:
            whole = not mode.is_frozen and bool(node.inputs)
            return (node.inputs[0], self._output_bytes(node.inputs[0])) if whole else (None, 0.0)
        if node.name.startswith(_GATED):
            return None, math.prod(node.shape) / 8
        if node.name.startswith(_POOLED):
            return None, float(math.prod(node.shape))
        return None, vanilla

    def _convolution(
        self, node: BackwardNode, mode: Mode, vanilla: float
    ) -> tuple[int | None, float]:
        if mode.kind in ("frozen", "bias"):
            return None, 0.0
        given = self._nodes[node.inputs[0]].shape if node.inputs else ()
        if mode.kind == "full" or len(given) != 4:
            # The first layer's input is the batch itself, whose bytes were measured.
            return (node.inputs[0], _FLOAT * math.prod(given)) if given else (None, vanilla)
        if mode.kind == "channels":
            if mode.axis == "out" and not self._is_depthwise(node):
                return node.inputs[0], _FLOAT * math.prod(given)
            return None, _FLOAT * math.prod(given) / given[1] * mode.channel_count(given[1])
        stride = max(1, round(given[2] / max(node.shape[2], 1)))
        side = mode.patch * stride
        patches = math.ceil(given[2] / side) * math.ceil(given[3] / side)
        return None, _FLOAT * float(given[0] * given[1] * patches)

    def _is_depthwise(self, node: BackwardNode) -> bool:
        shapes = () if node.group is None else self._groups[node.group].shapes
        return any(len(shape) == 4 and shape[1] == 1 for shape in shapes)

    def _output_bytes(self, index: int) -> float:
        shape = self._nodes[index].shape
        return _FLOAT * float(math.prod(shape)) if shape else float(self._saved[index])
