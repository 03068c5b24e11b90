"""What a step costs that goes on with some of a transformer's tokens, by its share of the operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fl_elastic.methods.tokens.blocks import TokenBlock, is_attention
from fl_elastic.profiling.profile import CostProfile, Seconds

__all__ = ["fewer_tokens_profile"]


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
        saved=None if profile.saved is None else profile.saved.scaled(nodes, nodes),
    )
