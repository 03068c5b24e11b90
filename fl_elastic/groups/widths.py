"""Inner widths: channels that only a few layers use, some of which a step may leave out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fl_elastic.groups.graph import BackwardNode, Reader, TensorGroup, Width
from fl_elastic.groups.torch_private import BatchNorm, own_parameters

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
# Elementwise operations. Of those with two inputs, only a product keeps the channels inner ones: a sum is a
# residual stream, which stays whole.
_ELEMENTWISE = (
    "Relu", "Hardtanh", "Hardswish", "Hardsigmoid", "Gelu", "Silu", "Sigmoid", "Tanh", "Elu", "LeakyRelu",
    "Softplus", "Mish", "Mul", "Div", "Add", "Sub", "Neg", "Pow", "Exp", "Clone", "ToCopy", "NativeDropout",
    "FusedDropout",
)  # fmt: skip
_POOLS = (
    "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "MkldnnAdaptiveAvgPool", "Mean", "Upsample",
)  # fmt: skip
_RESHAPES = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")
_TRANSPOSES = ("Transpose", "Permute")
_ATTENTION = "ScaledDotProduct"
# Widths with fewer units are not reported: leaving units out would save little.
_FEWEST_UNITS = 4


@dataclass(frozen=True)
class _Channels:
    """The axis of a tensor that runs over the channels of a space.

    The axis has ``repeat`` entries per channel; or one entry per head, and the last axis then runs over the
    ``head`` channels of each head.
    """

    space: int
    axis: int
    repeat: int = 1
    head: int = 1


@dataclass
class _Space:
    """Channels that several tensors share, and the layers that use them; closed if anything else uses them."""

    size: int
    unit: int = 1
    makers: list[str] = field(default_factory=list)
    keepers: list[str] = field(default_factory=list)
    readers: list[tuple[str, int, int]] = field(default_factory=list)
    holding: list[int] = field(default_factory=list)
    touching: list[int] = field(default_factory=list)
    is_open: bool = True


def find_widths(
    model: nn.Module, nodes: Sequence[BackwardNode], groups: Sequence[TensorGroup]
) -> tuple[Width, ...]:
    """Return the inner widths of a model, in the order of the forward pass.

    Channels are followed from the layer that makes them to the layers that read them. On the way they may pass
    through operations on each channel separately (activations, pools, batch and group norms, depthwise
    convolutions), products with as many other channels (a gate, as in squeeze-excite), flattening, and fused
    attention, whose heads stay together. With any other user all channels are kept: a residual sum, a layer norm, a
    layer of another class or used twice, tied weights. Whether the model can run with fewer channels is not checked
    here.

    Parameters
    ----------
    model : nn.Module
        The model of the graph.
    nodes, groups : sequence of BackwardNode, sequence of TensorGroup
        In backward order.
    """
    return _Walk(model, nodes, groups).widths()


class _Walk:
    """Follows channels from the input to the loss."""

    def __init__(
        self, model: nn.Module, nodes: Sequence[BackwardNode], groups: Sequence[TensorGroup]
    ) -> None:
        self._modules = dict(model.named_modules())
        self._nodes, self._groups = nodes, groups
        self._owners = Counter(node.group for node in nodes if node.group is not None)
        every = model.named_parameters(remove_duplicate=False)
        self._uses = Counter(id(parameter) for _, parameter in every)
        self._spaces: list[_Space] = []
        self._same: list[int] = []
        self._at: dict[int, _Channels] = {}
        for index in reversed(range(len(nodes))):
            self._visit(index, nodes[index])

    def widths(self) -> tuple[Width, ...]:
        """Return a width for each inner space of channels whose users are all known."""
        readers_of = {
            index: [user for user, node in enumerate(self._nodes) if index in node.inputs]
            for space in self._spaces
            for _, _, index in space.readers
        }
        found = []
        for number, space in enumerate(self._spaces):
            units, rest = divmod(space.size, space.unit)
            inner = self._same[number] == number and space.makers and space.readers
            if not (inner and space.is_open and not rest and units >= _FEWEST_UNITS):
                continue
            readers = [
                Reader(module, repeat, self._norm_behind(readers_of[index]))
                for module, repeat, index in space.readers
            ]
            found.append(
                Width(
                    name=space.makers[0],
                    size=units,
                    unit=space.unit,
                    makers=tuple(space.makers),
                    keepers=tuple(space.keepers),
                    readers=tuple(readers),
                    holding=tuple(sorted(space.holding)),
                    touching=tuple(sorted({*space.touching, *space.holding})),
                )
            )
        return tuple(found)

    def _norm_behind(self, users: list[int]) -> str:
        """Return the batch norm that is the only user of a layer's output; empty if there is none."""
        if len(users) != 1:
            return ""
        name = self._module_of(self._nodes[users[0]])
        return name if isinstance(self._modules.get(name), BatchNorm) else ""

    def _visit(self, index: int, node: BackwardNode) -> None:
        given = [self._at.get(below) for below in node.inputs]
        known = [channels for channels in given if channels is not None]
        name = self._module_of(node)
        module = self._modules.get(name)
        norm = type(module) in _NORMS and "Norm" in node.name
        layer = node.group is not None and type(module) in _LAYERS and self._is_plain(node, name)
        result: _Channels | None = None
        if norm and len(given) == 1 and known:
            result = self._norm(
                name, module, known[0], plain=node.group is None or self._is_plain(node, name)
            )
        elif layer and len(given) <= 1:
            result = self._layer(index, node, name, known[0] if known else None)
        elif node.group is None and node.name.startswith((*_ELEMENTWISE, *_POOLS)):
            result = self._each_by_itself(node, given)
        elif node.group is None and node.name.startswith(_RESHAPES) and len(given) == 1 and known:
            result = self._reshaped(self._nodes[node.inputs[0]].shape, node.shape, known[0])
        elif node.group is None and node.name.startswith(_TRANSPOSES) and len(given) == 1 and known:
            result = _transposed(self._nodes[node.inputs[0]].shape, node.shape, known[0])
        elif node.group is None and node.name.startswith(_ATTENTION):
            result = self._attention(node, given)
        if result is None:
            for channels in known:
                # A layer recorded as reader can run on some of the channels; any other user needs all of them.
                if not layer or channels not in self._taken(index):
                    self._close(channels)
            return
        self._at[index] = result
        self._space(result).holding.append(index)
        if layer:
            return
        for channels in known:
            if self._root(channels.space) != self._root(result.space):
                self._close(channels)

    def _taken(self, index: int) -> list[_Channels]:
        return [
            channels
            for below in self._nodes[index].inputs
            if (channels := self._at.get(below)) is not None
            and any(reader[2] == index for reader in self._space(channels).readers)
        ]

    def _module_of(self, node: BackwardNode) -> str:
        """Return the name of the module whose operation a node is."""
        if node.group is None:
            return node.module
        first = self._groups[node.group].parameters[0]
        return first.rpartition(".")[0]

    def _is_plain(self, node: BackwardNode, name: str) -> bool:
        """Return whether a node's parameters are those of a torch layer that is used once and shares none."""
        assert node.group is not None
        own = own_parameters(self._modules[name])
        held = [parameter for parameter in own.values() if parameter is not None]
        mine = {f"{name}.{each}" if name else each for each in own}
        return (
            set(own) <= {"weight", "bias"}
            and self._owners[node.group] == 1
            and set(self._groups[node.group].parameters) <= mine
            and all(self._uses[id(parameter)] == 1 for parameter in held)
        )

    def _norm(self, name: str, module: Any, given: _Channels, *, plain: bool) -> _Channels | None:
        space = self._space(given)
        if not plain or given.axis != 1 or given.repeat != 1 or given.head != 1:
            return None
        if isinstance(module, nn.GroupNorm):
            space.unit = math.lcm(space.unit, space.size // module.num_groups)
        space.keepers.append(name)
        return given

    def _layer(
        self, index: int, node: BackwardNode, name: str, given: _Channels | None
    ) -> _Channels | None:
        module: Any = self._modules[name]
        axis = len(node.shape) - 1 if isinstance(module, nn.Linear) else 1
        whole = len(node.shape) == (2 if isinstance(module, nn.Linear) else module.weight.dim())
        operation = ("Addmm", "Mm") if isinstance(module, nn.Linear) else ("Convolution",)
        if not whole or not node.name.startswith(operation):
            return None
        fits = given is not None and given.axis == axis and given.head == 1
        if not isinstance(module, nn.Linear) and module.groups > 1:
            depthwise = module.groups == module.in_channels == module.out_channels
            if not (depthwise and fits and given is not None and given.repeat == 1):
                return None
            self._space(given).keepers.append(name)
            return given
        if given is not None and not fits:
            self._close(given)
        elif given is not None:
            space = self._space(given)
            space.readers.append((name, given.repeat, index))
            space.touching.append(index)
        self._spaces.append(_Space(module.weight.shape[0], makers=[name]))
        self._same.append(len(self._spaces) - 1)
        return _Channels(len(self._spaces) - 1, axis)

    def _each_by_itself(
        self, node: BackwardNode, given: Sequence[_Channels | None]
    ) -> _Channels | None:
        """Follow channels through an operation on each of them; several inputs may only be multiplied."""
        product = node.name.startswith(("Mul", "Div"))
        joined: _Channels | None = None
        for below, channels in zip(node.inputs, given, strict=True):
            before = self._nodes[below].shape
            if channels is None or (len(given) > 1 and not product):
                return None
            axis, length = channels.axis, before[channels.axis] if before else 0
            kept = len(before) == len(node.shape) and node.shape[axis] == length
            shorter = len(node.shape) < len(before) and node.shape[: axis + 1] == before[: axis + 1]
            # If axes have equal lengths, the graph does not show which ones a mean reduces.
            clear = shorter and length not in before[axis + 1 :] and channels.head == 1
            kept &= channels.head == 1 or node.shape == before
            if not kept and not (clear and node.name.startswith("Mean")):
                return None
            if joined is None:
                joined = channels
            elif replace(channels, space=joined.space) != joined or not self._unite(
                joined, channels
            ):
                return None
        return joined

    def _attention(self, node: BackwardNode, given: Sequence[_Channels | None]) -> _Channels | None:
        """Follow the heads of queries, keys and values, equal in number, into the output of attention."""
        query = given[0] if len(given) == 3 else None
        if query is None or len(node.shape) != 4 or query.axis != 1 or query.head == 1:
            return None
        for below, channels in zip(node.inputs, given, strict=True):
            alike = channels is not None and replace(channels, space=query.space) == query
            if not alike or self._nodes[below].shape[1] != node.shape[1]:
                return None
            assert channels is not None
            if not self._unite(query, channels):
                return None
        return query

    def _reshaped(
        self, before: tuple[int, ...], after: tuple[int, ...], given: _Channels
    ) -> _Channels | None:
        """Return the axis of the channels after a reshape; None if the shapes do not determine it."""
        if not before or math.prod(before) != math.prod(after):
            return None
        front, inner = math.prod(before[: given.axis]), before[given.axis]
        behind = math.prod(before[given.axis + 1 :])
        for axis, length in enumerate(after):
            if math.prod(after[:axis]) != front:
                continue
            rest = math.prod(after[axis + 1 :])
            if length == inner and rest == behind:
                return replace(given, axis=axis)
            if length == inner * behind and given.head in (1, behind):
                # Flattened heads are the original channels again.
                repeat = given.repeat * behind if given.head == 1 else 1
                return _Channels(given.space, axis, repeat)
            if length * rest == inner and axis == len(after) - 2 and behind == given.repeat == 1:
                space = self._space(given)
                space.unit = math.lcm(space.unit, rest)
                return _Channels(given.space, axis, head=rest)
        return None

    def _unite(self, one: _Channels, other: _Channels) -> bool:
        first, second = sorted((self._root(one.space), self._root(other.space)))
        if first == second:
            return True
        into, absorbed = self._spaces[first], self._spaces[second]
        if into.size != absorbed.size:
            return False
        self._same[second] = first
        into.unit = math.lcm(into.unit, absorbed.unit)
        for name in ("makers", "keepers", "readers", "holding", "touching"):
            getattr(into, name).extend(getattr(absorbed, name))
        into.is_open &= absorbed.is_open
        return True

    def _close(self, channels: _Channels) -> None:
        self._space(channels).is_open = False

    def _space(self, channels: _Channels) -> _Space:
        return self._spaces[self._root(channels.space)]

    def _root(self, space: int) -> int:
        while self._same[space] != space:
            space = self._same[space]
        return space


def _transposed(
    before: tuple[int, ...], after: tuple[int, ...], given: _Channels
) -> _Channels | None:
    """Return the axis of heads after a transposition; None if the shapes do not determine it."""
    inside = (before[:1], before[-1:]) == (after[:1], after[-1:])
    middle = before[1:-1]
    if given.head == 1 or not inside or given.axis not in range(1, len(before) - 1):
        return None
    # Examples stay first, and the channels of a head last, however many there are.
    length = before[given.axis]
    if middle.count(length) != 1 or sorted(middle) != sorted(after[1:-1]):
        return None
    return replace(given, axis=1 + after[1:-1].index(length))
