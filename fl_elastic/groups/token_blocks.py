"""The blocks of a transformer, found from its graph: modules that hand a sequence on, with one attention each."""

from __future__ import annotations

from dataclasses import dataclass

from fl_elastic.groups.graph import BackwardGraph, BackwardNode

__all__ = ["TokenBlock", "is_attention", "token_blocks"]


@dataclass(frozen=True)
class TokenBlock:
    """A module whose output, a sequence of tokens, is all that the rest of the model sees.

    Attributes
    ----------
    module : str
        Its name.
    node : int
        Index of the node that made its output.
    groups_above : int
        How many groups lie between its output and the loss: exactly the first ones in backward order.
    tokens, width : int
        Tokens of an example and numbers of a token.
    """

    module: str
    node: int
    groups_above: int
    tokens: int
    width: int


def token_blocks(graph: BackwardGraph) -> tuple[TokenBlock, ...]:
    """Return the blocks in the order of the forward pass; empty for a model that is no chain of them.

    A block's output is a cut of shape (N, T, D), and between it and the next deeper cut of the graph one operation
    attends from all T tokens to all T.
    """
    found = []
    for cut, deeper in zip(
        graph.cuts, [*(c.node for c in graph.cuts[1:]), len(graph.nodes)], strict=True
    ):
        shape = graph.nodes[cut.node].shape
        if cut.at_input or len(shape) != 3:
            continue
        attending = [n for n in graph.nodes[cut.node : deeper] if is_attention(n, shape[1])]
        if len(attending) == 1:
            found.append(TokenBlock(cut.module, cut.node, cut.groups_above, *shape[1:]))
    found = [
        block for block in found if (block.tokens, block.width) == (found[0].tokens, found[0].width)
    ]
    return tuple(reversed(found))


def is_attention(node: BackwardNode, tokens: int) -> bool:
    """Whether an operation weighs all tokens for each of them: a fused attention, or the softmax of one."""
    if len(node.shape) != 4:
        return False
    fused = node.name.startswith("ScaledDotProduct") and node.shape[2] == tokens
    return fused or (node.name.startswith("Softmax") and node.shape[2:] == (tokens, tokens))
