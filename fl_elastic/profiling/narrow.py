"""What a step costs that runs a part of some inner widths, or of the tokens, by its share of the operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fl_elastic.groups import TensorGroup
from fl_elastic.groups.graph import BackwardGraph, Width
from fl_elastic.groups.token_blocks import TokenBlock, is_attention
from fl_elastic.profiling.profile import CostProfile, SavedTensors, Seconds

__all__ = ["fewer_tokens_profile", "narrow_profile", "narrow_shapes"]


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
        saved=None if profile.saved is None else _smaller_saved(profile.saved, nodes, outputs),
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


def _smaller_saved(saved: SavedTensors, nodes: Seconds, outputs: Seconds) -> SavedTensors:
    """Return the kept tensors at their new sizes: by the node that puts them out, else by those that keep them."""
    share = np.zeros(len(saved.tensor_bytes))
    np.maximum.at(share, saved.tensors, nodes[saved.nodes])
    known = saved.outputs >= 0
    share[saved.outputs[known]] = outputs[known]
    return replace(saved, tensor_bytes=saved.tensor_bytes * share)


def fewer_tokens_profile(
    profile: CostProfile, drops: Sequence[tuple[TokenBlock, int]]
) -> CostProfile:
    """Return the cost profile of the model whose blocks hand on fewer tokens.

    What works on tokens costs its share of them, attention the square of that. The forward pass is spread over the
    nodes as the backward pass is. Finding out which tokens stay is not counted: it is a row of one attention.

    Parameters
    ----------
    profile : CostProfile
        Of all tokens.
    drops : sequence of (TokenBlock, int)
        Blocks of its graph, in the order of the forward pass, and how many tokens go on behind each.
    """
    nodes: Seconds = np.ones(len(profile.graph.nodes))
    for block, count in drops:
        share = count / block.tokens
        batch, tokens, _ = profile.graph.nodes[block.node].shape
        for index, node in enumerate(profile.graph.nodes[: block.node]):
            shape = node.shape
            if is_attention(node, tokens):
                nodes[index] = share**2
            elif tokens in shape[1:] or shape[:1] == (batch * tokens,):
                nodes[index] = share
    backward = profile.node_update_seconds + profile.node_path_seconds
    running = float(backward.sum())
    ratio = float(profile.forward_seconds[-1]) / running if running else 0.0
    saved = ratio * float((backward * (1 - nodes)).sum())
    return replace(
        profile,
        node_update_seconds=profile.node_update_seconds * nodes,
        node_path_seconds=profile.node_path_seconds * nodes,
        forward_seconds=np.maximum(profile.forward_seconds - saved, 0.05 * profile.forward_seconds),
        node_saved_bytes=profile.node_saved_bytes * nodes,
        saved=None if profile.saved is None else _smaller_saved(profile.saved, nodes, nodes),
    )
