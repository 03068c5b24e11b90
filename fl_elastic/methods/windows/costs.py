"""What a step costs that runs a part of some inner widths, by its share of the operations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fl_elastic.groups import TensorGroup
from fl_elastic.groups.graph import BackwardGraph, Width
from fl_elastic.profiling.profile import CostProfile, Seconds

__all__ = ["narrow_profile", "narrow_shapes"]


def narrow_profile(profile: CostProfile, kept: Mapping[Width, int]) -> CostProfile:
    """Return the cost profile of the model with fewer units in some of its widths.

    A node costs its share of the operations: for a layer between two such widths the product of both. The forward
    pass is spread over the nodes as the backward pass is. Groups have the shapes of their windows.

    Parameters
    ----------
    profile : CostProfile
        Of the whole model.
    kept : mapping of Width to int
        How many units each width keeps.
    """
    graph = profile.graph
    nodes: Seconds = np.ones(len(graph.nodes))
    outputs: Seconds = np.ones(len(graph.nodes))
    for width, length in kept.items():
        nodes[list(width.touching)] *= length / width.size
        outputs[list(width.holding)] *= length / width.size
    backward = profile.node_update_seconds + profile.node_path_seconds
    running = float(backward.sum())
    forward = float((backward * nodes).sum()) / running if running else 1.0
    shapes = narrow_shapes(graph, kept)
    groups = tuple(
        replace(group, shapes=tuple(shapes[name] for name in group.parameters))
        for group in graph.groups
    )
    smaller = np.array(
        [
            _numbers(new) / max(_numbers(old), 1)
            for new, old in zip(groups, graph.groups, strict=True)
        ]
    )
    return replace(
        profile,
        graph=replace(graph, groups=groups, widths=()),
        node_update_seconds=profile.node_update_seconds * nodes,
        node_path_seconds=profile.node_path_seconds * nodes,
        optimizer_seconds=profile.optimizer_seconds * smaller,
        forward_seconds=profile.forward_seconds * forward,
        node_saved_bytes=profile.node_saved_bytes * nodes,
        saved=None if profile.saved is None else profile.saved.scaled(nodes, outputs),
    )


def narrow_shapes(graph: BackwardGraph, kept: Mapping[Width, int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of the graph's groups once widths keep so many units."""
    shapes = {
        name: list(shape)
        for group in graph.groups
        for name, shape in zip(group.parameters, group.shapes, strict=True)
    }
    for width, length in kept.items():
        axes = [(module, 0, 1) for module in (*width.makers, *width.keepers)]
        axes += [(reader.module, 1, reader.repeat) for reader in width.readers]
        for module, axis, repeat in axes:
            for tensor in ("weight", "bias") if axis == 0 else ("weight",):
                shape = shapes.get(f"{module}.{tensor}" if module else tensor)
                if shape is not None:
                    shape[axis] = length * width.unit * repeat
    return {name: tuple(shape) for name, shape in shapes.items()}


def _numbers(group: TensorGroup) -> int:
    return sum(math.prod(shape) for shape in group.shapes)
