"""The backward graph of one training step, in plain values without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fl_elastic.errors import PlanError
from fl_elastic.registry import closest

UNUSED = "Unused"
"""Name of the node that stands for parameters that the traced batch did not use."""


class GroupKind(StrEnum):
    """Kind of the operation that owns a tensor group."""

    CONV = "conv"
    LINEAR = "linear"
    NORM = "norm"
    EMBEDDING = "embedding"
    OTHER = "other"


@dataclass(frozen=True)
class TensorGroup:
    """The parameters owned by one autograd node: the unit of selection.

    Attributes
    ----------
    name : str
        Name of the owning module, such as ``layer4.0.conv1``.
    parameters : tuple of str
        Parameter names as in ``model.named_parameters()``.
    shapes : tuple of tuple of int
        Shape of each parameter.
    kind : GroupKind
        The operation that owns them.
    copies : tuple of int
        Number of copies of each parameter in an update: one per name of a tied parameter; empty if all are 1. 0 for
        a parameter that a forward pass changes, which is counted for the head instead.
    statistics : int
        Number of running statistics of a norm, which change and are sent if the group is trained. For the head it
        includes all other numbers that a forward pass changes, such as a queue in a buffer, because they are sent
        whatever is trained.
    """

    name: str
    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    kind: GroupKind
    copies: tuple[int, ...] = ()
    statistics: int = 0

    @property
    def numel(self) -> int:
        """Number of scalar weights in the group."""
        total = 0
        for shape in self.shapes:
            size = 1
            for length in shape:
                size *= length
            total += size
        return total

    def vectors(self) -> tuple[str, ...]:
        """Return the parameters with at most one dimension: biases, and the affine pair of a norm."""
        pairs = zip(self.parameters, self.shapes, strict=True)
        return tuple(name for name, shape in pairs if len(shape) <= 1)


@dataclass(frozen=True, slots=True)
class BackwardNode:
    """One operation of the backward pass.

    Attributes
    ----------
    name : str
        Autograd's name of the operation, such as ``ConvolutionBackward0``.
    group : int or None
        Index of the tensor group whose parameters it owns.
    inputs : tuple of int
        Nodes that receive its error gradient; they are deeper and have larger indices.
    shape : tuple of int
        Shape of the operation's output in the forward pass, batch first; empty if unknown.
    module : str
        The innermost module whose output this is; empty for an operation outside of modules.
    """

    name: str
    group: int | None
    inputs: tuple[int, ...]
    shape: tuple[int, ...] = ()
    module: str = ""


@dataclass(frozen=True)
class Cut:
    """A place where the rest of the model depends only on one tensor.

    Attributes
    ----------
    module : str
        The module whose output, or input, the tensor is.
    at_input : bool
        Whether it is the module's input.
    node : int
        Index of the node that made the tensor.
    groups_above : int
        Number of groups between the cut and the loss, which are the first ones in backward order.
    skipped : tuple of (str, shape)
        Modules that need not run if the tensor is given (besides ``module`` if it is its output), with the shape of
        each one's output, batch first.
    """

    module: str
    at_input: bool
    node: int
    groups_above: int
    skipped: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Block:
    """A module between two bottlenecks, which can be run a second time from its single input.

    Attributes
    ----------
    module : str
        The module.
    output_node, input_node : int
        Indices of the nodes that made its output and its input.
    """

    module: str
    output_node: int
    input_node: int

    @property
    def nodes(self) -> range:
        """Indices of the nodes inside it."""
        return range(self.output_node, self.input_node)


@dataclass(frozen=True)
class Reader:
    """A layer that reads the channels of a width.

    Attributes
    ----------
    module : str
        A convolution or linear layer; the second axis of its weight runs over the channels.
    repeat : int
        Number of entries of that axis per channel: more than one after flattening.
    norm : str
        The batch norm that is the only user of the layer's output, so that the scale of this output has no effect;
        empty if there is none.
    """

    module: str
    repeat: int = 1
    norm: str = ""


@dataclass(frozen=True)
class Width:
    """Channels inside a model, some of which a step may leave out, because only the layers named here use them.

    Attributes
    ----------
    name : str
        The first layer that makes them.
    size : int
        Number of units to choose among.
    unit : int
        Number of neighbouring channels that are chosen together: those of one group of a group norm, else 1.
    makers : tuple of str
        Layers that make the channels; the first axis of their tensors runs over them.
    keepers : tuple of str
        Layers that work on each channel separately: norms and depthwise convolutions.
    readers : tuple of Reader
        Layers that read the channels.
    holding, touching : tuple of int
        Nodes whose output has these channels, and all nodes that need fewer operations with fewer channels.
    """

    name: str
    size: int
    unit: int
    makers: tuple[str, ...]
    keepers: tuple[str, ...]
    readers: tuple[Reader, ...]
    holding: tuple[int, ...]
    touching: tuple[int, ...]


@dataclass(frozen=True)
class BackwardGraph:
    """Tensor groups and nodes of one step, both in backward order (index 0 is next to the loss).

    A tensor group shared by several nodes (tied weights) is placed at its deepest node, because only there is its
    gradient complete.

    Attributes
    ----------
    groups, nodes : tuple
        Tensor groups, and operations.
    cuts : tuple of Cut
        Places where a frozen prefix may end, nearest to the loss first.
    blocks : tuple of Block
        Modules that may be recomputed instead of stored; blocks may contain each other.
    widths : tuple of Width
        Channels of which a step may leave some out, in the order of the forward pass.
    """

    groups: tuple[TensorGroup, ...]
    nodes: tuple[BackwardNode, ...]
    cuts: tuple[Cut, ...] = ()
    blocks: tuple[Block, ...] = ()
    widths: tuple[Width, ...] = ()

    @property
    def is_of_second_order(self) -> bool:
        """Whether the forward pass computes gradients that are differentiated again, as for forces of molecules."""
        return any("BackwardBackward" in node.name for node in self.nodes)

    def cut_below(self, depth: int) -> Cut | None:
        """Return the cut nearest to the loss that lies below the group at ``depth``; None if there is none."""
        return next((cut for cut in self.cuts if cut.groups_above > depth), None)

    def group_of(self, parameter: str) -> str:
        """Return the name of the group that a parameter belongs to; raise PlanError if there is none."""
        for group in self.groups:
            if parameter in group.parameters:
                return group.name
        raise PlanError(f"no tensor group holds {parameter!r}: it is not trained")

    def groups_above(self, place: str) -> int:
        """Return the number of groups above the fleet's cut at ``place``, or at the next deeper possible cut.

        Parameters
        ----------
        place : str
            A group, or a module, whose deepest group counts.

        Raises
        ------
        PlanError
            If the model has no such group.

        Examples
        --------
        >>> groups = tuple(TensorGroup(name, (), (), GroupKind.LINEAR) for name in ("head", "body.1", "body.0"))
        >>> BackwardGraph(groups, ()).groups_above("body")
        3
        """
        names = [group.name for group in self.groups]
        found = [i for i, name in enumerate(names) if name == place or name.startswith(f"{place}.")]
        if not found:
            raise PlanError(f"the model has no group {place!r} to cut below{closest(place, names)}")
        cut = self.cut_below(found[-1])
        return found[-1] + 1 if cut is None else cut.groups_above

    @cached_property
    def head(self) -> int:
        """Index of the group whose node is nearest to the loss, among those that the traced batch used."""
        return next(n.group for n in self.nodes if n.group is not None and n.name != UNUSED)

    @cached_property
    def unused(self) -> tuple[int, ...]:
        """Indices of the groups that the traced batch did not use; they cost nothing until a batch uses them."""
        return tuple(n.group for n in self.nodes if n.group is not None and n.name == UNUSED)

    @cached_property
    def group_layers(self) -> tuple[tuple[str, ...], ...]:
        """For each group the modules of the nodes that own it; empty names for nodes outside of modules."""
        return tuple(
            tuple(self.nodes[index].module for index in indices) for indices in self.group_nodes()
        )

    @cached_property
    def groups_below(self) -> NDArray[np.float32]:
        """Masks of the groups at or below each node, and of those strictly below it; 0 and 1, shape (2, M, N).

        The masks are floats, because a matrix product with a mask is several times faster than selecting columns.
        """
        nodes = self.nodes
        at_or_below = np.zeros((len(nodes), len(self.groups)), dtype=bool)
        below = np.zeros_like(at_or_below)
        for index in range(len(nodes) - 1, -1, -1):
            node = nodes[index]
            if node.inputs:
                below[index] = at_or_below[list(node.inputs)].any(axis=0)
            at_or_below[index] = below[index]
            if node.group is not None:
                at_or_below[index, node.group] = True
        return np.stack([at_or_below, below]).astype(np.float32)

    def group_nodes(self) -> tuple[tuple[int, ...], ...]:
        """Return, per group, the indices of the nodes that own it."""
        owners: list[list[int]] = [[] for _ in self.groups]
        for index, node in enumerate(self.nodes):
            if node.group is not None:
                owners[node.group].append(index)
        return tuple(tuple(indices) for indices in owners)
