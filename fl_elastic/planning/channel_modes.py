"""Which layers may be trained by channels, and how many channels each of them can choose from."""

from __future__ import annotations

from fl_elastic.errors import PlanError
from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph, GroupKind
from fl_elastic.groups.mode import Axis
from fl_elastic.ops.lean_kind import LeanKind
from fl_elastic.profiling import CostProfile
from fl_elastic.profiling.layer_shapes import LayerShape, group_layers

RATIOS = (1.0, 1 / 2, 1 / 4, 1 / 8)


def known_layers(profile: CostProfile) -> dict[int, LayerShape]:
    """Return the shape of each convolution and linear layer of a profile by group index, in backward order."""
    return group_layers(profile.graph, profile.key.batch_shape)


def trainable_layers(profile: CostProfile) -> list[int]:
    """Return the groups that are convolutions or linear layers, besides the head, in backward order."""
    return _layers(profile.graph)


def has_operations(profile: CostProfile, group: int) -> bool:
    """Return whether the library has operations that replace a layer, for training by channels or filtering.

    The layer must be one two-dimensional convolution or linear layer that is used once a step and whose weight is a
    parameter of its own, not computed (weight norm, pruning). Transposed convolutions, and padding with non-zeros,
    are not supported.
    """
    graph = profile.graph
    owners = graph.group_nodes()[group]
    name, kind = graph.groups[group].name, graph.groups[group].kind
    own = {f"{name}.weight", f"{name}.bias"}.issuperset(graph.groups[group].parameters)
    if not own or len(owners) != 1 or graph.nodes[owners[0]].module != name:
        return False
    if kind is not GroupKind.CONV:
        return kind is GroupKind.LINEAR
    if len(profile.node_lean):
        return bool(profile.node_lean[owners[0]] == LeanKind.CONVOLUTION)
    return all(len(shape) in (1, 4) for shape in graph.groups[group].shapes)


def refuse_without_layers(policy: str, graph: BackwardGraph) -> None:
    """Raise PlanError if there is no convolution or linear layer besides the head."""
    if not _layers(graph):
        raise PlanError(
            f"policy {policy!r} chooses among convolutions and linear layers, and this model has none besides "
            f"its head {graph.groups[graph.head].name!r}: use policy 'elastic'"
        )


def _layers(graph: BackwardGraph) -> list[int]:
    kinds = (GroupKind.CONV, GroupKind.LINEAR)
    return [i for i, g in enumerate(graph.groups) if g.kind in kinds and i != graph.head]


def channel_modes(profile: CostProfile, axis: Axis) -> dict[int, tuple[Mode, ...]]:
    """Return the modes in which each of the `trainable_layers` can be trained, most expensive first.

    A share of channels is offered if the layer `has_operations` for it and the share leaves out at least one
    channel. A grouped layer offers output channels only, unless it is depthwise.
    """
    layers = known_layers(profile)
    return {
        group: _modes(profile, group, layers.get(group), axis)
        for group in trainable_layers(profile)
    }


def _modes(
    profile: CostProfile, group: int, layer: LayerShape | None, axis: Axis
) -> tuple[Mode, ...]:
    channels = 0 if layer is None else _channels(profile, group, layer, axis)
    modes = [Mode.FULL if ratio == 1 else Mode.channels(ratio, axis) for ratio in RATIOS]
    return tuple(
        mode for mode in modes if mode == Mode.FULL or mode.channel_count(channels or 1) < channels
    )


def _channels(profile: CostProfile, group: int, layer: LayerShape, axis: Axis) -> int:
    """Return the number of channels to choose from; 0 if the layer cannot be trained by channels."""
    plain = layer.groups == 1 or (layer.is_depthwise and layer.in_channels == layer.out_channels)
    if not has_operations(profile, group) or not (plain or axis == "out"):
        return 0
    return layer.in_channels if axis == "in" else layer.out_channels
