"""Adapters above a frozen embedding: nothing that reaches the loss from the tokens has a gradient by itself."""

from __future__ import annotations

import pytest
import torch
from adapters import adapted, tokens
from torch import nn

from fl_elastic.groups import tensor_groups
from fl_elastic.groups.trace import trace_step

LOSS = nn.functional.cross_entropy


def test_adapters_are_groups_in_backward_order() -> None:
    expected = [f"blocks.{n}.lora_{side}" for n in (3, 2, 1, 0) for side in "BA"]
    groups = tensor_groups(adapted(), LOSS, tokens(1)[0])
    assert [group.name for group in groups] == expected
    assert [group.parameters for group in groups] == [(f"{name}.weight",) for name in expected]


@pytest.mark.parametrize("fixed_a", [False, True])
def test_the_fleet_can_cut_between_blocks(fixed_a: bool) -> None:
    """The whole path from tokens to loss is in the graph, as if the embedding were trained."""
    model = adapted(fixed_a=fixed_a)
    graph = trace_step(model, LOSS, tokens(1)[0]).graph
    per_block = 1 if fixed_a else 2
    for number in range(4):
        assert graph.groups_above(f"blocks.{number}") == per_block * (4 - number)
    assert "TanhBackward0" in {node.name for node in graph.nodes}
    # Of every node but those that work on the embedding's output something on the path is an input.
    assert sum(not node.inputs for node in graph.nodes) <= 3
    model.embed.requires_grad_(True)
    trained = trace_step(model, LOSS, tokens(1)[0]).graph
    assert [n.name for n in trained.nodes if n.name != "EmbeddingBackward0"] == [
        node.name for node in graph.nodes
    ]


def test_a_frozen_embedding_is_left_as_it_was() -> None:
    model = adapted()
    hooks, before = len(model.embed._forward_hooks), model(tokens(1)[0][0])
    tensor_groups(model, LOSS, tokens(1)[0])
    assert len(model.embed._forward_hooks) == hooks
    assert torch.equal(model(tokens(1)[0][0]), before)
    assert not model.embed(tokens(1)[0][0]).requires_grad
