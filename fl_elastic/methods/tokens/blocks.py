"""Blocks of a transformer that pass tokens on, and the costs of a step with fewer tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from fl_elastic.groups.graph import BackwardGraph, BackwardNode
from fl_elastic.profiling.profile import CostProfile, Seconds


@dataclass(frozen=True)
class TokenBlock:
    """A module whose output, a sequence of tokens, is the only input of the rest of the model.

    Attributes
    ----------
    module : str
        Its name.
    node : int
        Index of the node that made its output.
    groups_above : int
        Number of groups between its output and the loss, which are the first ones in backward order.
    tokens, width : int
        Tokens per example, and numbers per token.
    """

    module: str
    node: int
    groups_above: int
    tokens: int
    width: int


def token_blocks(graph: BackwardGraph) -> tuple[TokenBlock, ...]:
    """Return the blocks in the order of the forward pass; empty if the model is not a chain of blocks.

    A block's output has shape (N, T, D) and is the only input of the rest of the model. Between it and the next
    deeper such tensor, exactly one operation attends from all T tokens to all T.
    """
    deepest = [nodes[-1] for nodes in graph.group_nodes()]
    places = {block.output_node: block.module for block in reversed(graph.blocks)}
    places |= {cut.node: cut.module for cut in graph.cuts if not cut.at_input}
    # If a recomputable block spans exactly these two nodes, its name is used.
    exact = {(block.output_node, block.input_node): block.module for block in graph.blocks}
    ends = sorted({*places, *(cut.node for cut in graph.cuts), len(graph.nodes)})
    found: list[TokenBlock] = []
    for node, end in pairwise(ends):
        shape = graph.nodes[node].shape
        if node not in places or len(shape) != 3:
            continue
        attending = [each for each in graph.nodes[node:end] if is_attention(each, shape[1])]
        alike = not found or (found[0].tokens, found[0].width) == shape[1:]
        if len(attending) == 1 and alike:
            above = sum(each < node for each in deepest)
            name = exact.get((node, end), places[node])
            found.append(TokenBlock(name, node, above, *shape[1:]))
    return tuple(reversed(found))


def is_attention(node: BackwardNode, tokens: int) -> bool:
    """Return whether an operation attends from each token to all: a fused attention, or an attention's softmax."""
    if len(node.shape) != 4:
        return False
    fused = node.name.startswith("ScaledDotProduct") and node.shape[2] == tokens
    softmax = node.name.startswith(("Softmax", "SafeSoftmax"))
    return fused or (softmax and node.shape[2:] == (tokens, tokens))


def fewer_tokens_profile(
    profile: CostProfile, drops: Sequence[tuple[TokenBlock, int]]
) -> CostProfile:
    """Return the cost profile of the model if its blocks pass on fewer tokens.

    Operations on tokens cost the share of the tokens that is left, attention the square of it. Forward time is
    assumed to be distributed over the nodes like backward time. Choosing the tokens is not charged: it costs one
    row of one attention.

    Parameters
    ----------
    profile : CostProfile
        Profile with all tokens.
    drops : sequence of (TokenBlock, int)
        Blocks of its graph, in the order of the forward pass, and the number of tokens after each.
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
