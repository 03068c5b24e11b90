"""Tensor groups of small models, found from the autograd graph alone."""

from __future__ import annotations

from functools import partial

import torch
from model_cases import build, every_model
from small_models import (
    Attention,
    Batch,
    Inception,
    Recurrent,
    Residual,
    TiedLinears,
    images,
    loss_fn,
    vectors,
)
from torch import Tensor, nn

from fl_elastic.groups import TensorGroup, tensor_groups
from fl_elastic.groups.graph import GroupKind
from fl_elastic.groups.trace import trace_step
from fl_elastic.testing.probes import Snapshot


def names_of(groups: list[TensorGroup]) -> list[str]:
    return [group.name for group in groups]


def arrival_of_gradients(model: nn.Module, batch: Batch) -> list[str]:
    """Names of the parameters in the order in which a real backward pass gives their gradients."""
    arrived: list[str] = []

    def note(name: str, _: Tensor) -> None:
        arrived.append(name)

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(note, name))  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    torch.autograd.backward(loss_fn(model(batch[0]), batch[1]))
    for handle in handles:
        handle.remove()
    return arrived


@every_model
def test_each_trainable_parameter_is_in_exactly_one_group(name: str) -> None:
    model, batch = build(name)
    grouped = [p for group in tensor_groups(model, loss_fn, batch) for p in group.parameters]
    assert sorted(grouped) == sorted(name for name, _ in model.named_parameters())


@every_model
def test_groups_are_in_the_order_in_which_gradients_arrive(name: str) -> None:
    model, batch = build(name)
    groups = tensor_groups(model, loss_fn, batch)
    arrival = arrival_of_gradients(model, batch)
    complete = [max(arrival.index(p) for p in group.parameters) for group in groups]
    assert complete == sorted(complete)


@every_model
def test_names_are_unique_and_shapes_are_the_parameters(name: str) -> None:
    model, batch = build(name)
    groups = tensor_groups(model, loss_fn, batch)
    assert len(set(names_of(groups))) == len(groups)
    for group in groups:
        shapes = tuple(tuple(model.get_parameter(p).shape) for p in group.parameters)
        assert group.shapes == shapes
        assert group.numel == sum(model.get_parameter(p).numel() for p in group.parameters)


@every_model
def test_nothing_of_the_model_is_changed(name: str) -> None:
    model, batch = build(name)
    arrival_of_gradients(model, batch)
    gradients = [parameter.grad for parameter in model.parameters()]
    before = Snapshot(model)
    tensor_groups(model, loss_fn, batch)
    assert before.differences() == []
    assert all(g is p.grad for g, p in zip(gradients, model.parameters(), strict=True))


@every_model
def test_nodes_point_deeper_and_every_group_has_a_node(name: str) -> None:
    model, batch = build(name)
    graph = trace_step(model, loss_fn, batch).graph
    for index, node in enumerate(graph.nodes):
        assert all(index < below < len(graph.nodes) for below in node.inputs)
    owners = graph.group_nodes()
    assert all(owners)
    deepest = [nodes[-1] for nodes in owners]
    assert deepest == sorted(deepest)
    first = next(node.group for node in graph.nodes if node.group is not None)
    assert graph.head == first


def test_branches_rejoin_in_a_residual_graph() -> None:
    graph = trace_step(Residual(), loss_fn, images()[0]).graph
    assert sorted(names_of(list(graph.groups))) == ["first", "head", "second", "short"]
    joins = [node for node in graph.nodes if len(node.inputs) == 2]
    assert len(joins) == 1
    left, right = joins[0].inputs
    assert {graph.nodes[left].group, graph.nodes[right].group} == {
        names_of(list(graph.groups)).index(name) for name in ("second", "short")
    }


def test_a_concatenation_has_one_edge_per_branch() -> None:
    graph = trace_step(Inception(), loss_fn, images()[0]).graph
    cat = next(node for node in graph.nodes if node.name.startswith("Cat"))
    assert len(cat.inputs) == 3
    assert names_of(list(graph.groups))[-1] == "stem"


def test_a_shared_weight_makes_one_group_at_its_deepest_use() -> None:
    model = TiedLinears()
    graph = trace_step(model, loss_fn, vectors()[0]).graph
    groups = list(graph.groups)
    assert names_of(groups)[0] == "head"
    assert len(groups) == 2
    assert set(groups[1].parameters) == {"first.weight", "first.bias", "second.bias"}
    assert len(graph.group_nodes()[1]) == 2


def test_an_embedding_tied_to_the_output_is_next_to_the_loss_and_deepest() -> None:
    model, batch = build("tied embedding")
    graph = trace_step(model, loss_fn, batch).graph
    assert names_of(list(graph.groups)) == ["middle", "embedding"]
    assert graph.groups[1].parameters == ("embedding.weight",)
    assert graph.head == 1
    assert graph.groups[1].kind is GroupKind.EMBEDDING


def test_learned_token_and_positions_belong_to_where_they_join() -> None:
    groups = tensor_groups(Attention(), loss_fn, vectors()[0])
    names = names_of(groups)
    assert {"token", "positions", "attention.out_proj", "norm"} <= set(names)
    assert names.index("positions") < names.index("token") < names.index("embed")


def test_an_lstm_is_found_whole() -> None:
    groups = tensor_groups(Recurrent(), loss_fn, vectors()[0])
    assert groups[0].name == "head"
    owned = [p for group in groups[1:] for p in group.parameters]
    assert len(owned) == 8 and all(p.startswith("lstm.") for p in owned)
