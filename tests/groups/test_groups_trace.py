"""Tensor groups of small models, found from the autograd graph alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small_models import (
    Attention,
    Batch,
    Inception,
    Recurrent,
    Residual,
    TiedEmbedding,
    TiedLinears,
    chain,
    conv_net,
    images,
    loss_fn,
    vectors,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fl_elastic.errors import ModelError, TrainingError
from fl_elastic.groups import GroupKind, TensorGroup, tensor_groups, trace_step
from fl_elastic.testing import Snapshot


def tokens() -> Batch:
    return torch.randint(11, (5, 7)), torch.randint(11, (5,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "chain": (chain, lambda: vectors()[0]),
    "batch norm": (conv_net, lambda: images()[0]),
    "group norm": (lambda: conv_net("group"), lambda: images()[0]),
    "residual": (Residual, lambda: images()[0]),
    "inception": (Inception, lambda: images()[0]),
    "tied linears": (TiedLinears, lambda: vectors()[0]),
    "tied embedding": (TiedEmbedding, tokens),
    "attention": (Attention, lambda: vectors()[0]),
    "recurrent": (Recurrent, lambda: vectors()[0]),
}
every_model = pytest.mark.parametrize("name", MODELS)


def build(name: str) -> tuple[nn.Module, Batch]:
    make, batch = MODELS[name]
    return make(), batch()


def names_of(groups: list[TensorGroup]) -> list[str]:
    return [group.name for group in groups]


def group_named(groups: list[TensorGroup], name: str) -> TensorGroup:
    return next(group for group in groups if group.name == name)


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


def test_a_chain_runs_from_output_to_input() -> None:
    groups = tensor_groups(chain(), loss_fn, vectors()[0])
    assert names_of(groups) == ["6", "4", "2", "0"]
    assert all(group.kind is GroupKind.LINEAR for group in groups)
    assert groups[0].parameters == ("6.weight", "6.bias")
    assert groups[0].vectors() == ("6.bias",)


def test_convolution_and_norm_are_groups_of_their_own() -> None:
    groups = tensor_groups(conv_net(), loss_fn, images()[0])
    assert names_of(groups) == ["11", "7", "6", "4", "3", "1", "0"]
    kinds = [GroupKind.LINEAR] + 3 * [GroupKind.NORM, GroupKind.CONV]
    assert [group.kind for group in groups] == kinds


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
    graph = trace_step(TiedEmbedding(), loss_fn, tokens()).graph
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


def test_parameters_that_take_no_part_belong_to_no_group() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)
            self.loose = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            out: Tensor = self.used(x)
            return out

    groups = tensor_groups(Partly(), loss_fn, vectors()[0])
    assert names_of(groups) == ["used"]
    assert groups[0].parameters == ("used.weight", "used.bias")


def test_parameters_without_gradient_belong_to_no_group() -> None:
    model = chain()
    model[2].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    groups = tensor_groups(model, loss_fn, vectors()[0])
    assert names_of(groups) == ["6", "4", "0"]
    assert groups[1].parameters == ("4.weight",)
    assert not model[2].weight.requires_grad


class Transposed(nn.Module):
    """A linear layer whose input and weight are turned round first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Mix examples rather than features."""
        mixed: Tensor = self.mix(x.t()).t() @ torch.randn(6, 3)
        return mixed + x[:, :3] @ self.weight[:, :3].t()


def test_a_weight_used_through_transposes_has_a_group() -> None:
    groups = tensor_groups(Transposed(), loss_fn, vectors()[0])
    assert {p for g in groups for p in g.parameters} == {"weight", "mix.weight", "mix.bias"}


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrised_weights_belong_to_the_layer_that_uses_them(
    parametrize: Callable[[nn.Module], nn.Module],
) -> None:
    model = chain()
    parametrize(model[2])
    groups = tensor_groups(model, loss_fn, vectors()[0])
    assert len(groups) == 4
    own = {name for name, _ in model.named_parameters() if name.startswith("2.")}
    assert set(groups[2].parameters) == own
    assert groups[2].name == "2"


def test_old_style_weight_norm_is_looked_through() -> None:
    model = chain()
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model[2])
    groups = tensor_groups(model, loss_fn, vectors()[0])
    assert set(groups[2].parameters) == {"2.bias", "2.weight_g", "2.weight_v"}


class TwoHeads(nn.Module):
    """Returns a dict, a tuple or a list of two outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body = nn.Linear(6, 5)
        self.left = nn.Linear(5, 3)
        self.right = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        """Apply both heads."""
        x = torch.relu(self.body(x))
        pair = self.left(x), self.right(x)
        if self.kind == "dict":
            return dict(zip("ab", pair, strict=True))
        return list(pair) if self.kind == "list" else pair


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_models_with_several_outputs(kind: str) -> None:
    def loss(outputs: Any, targets: Tensor) -> Tensor:
        left, right = outputs.values() if isinstance(outputs, dict) else outputs
        return loss_fn(left, targets) + loss_fn(right, targets)

    groups = tensor_groups(TwoHeads(kind), loss, vectors()[0])
    assert sorted(names_of(groups)) == ["body", "left", "right"]
    assert groups[-1].name == "body"


def test_an_output_that_the_loss_ignores_has_no_group() -> None:
    groups = tensor_groups(
        TwoHeads("tuple"), lambda out, targets: loss_fn(out[1], targets), vectors()[0]
    )
    assert names_of(groups) == ["right", "body"]


class InPlace(nn.Module):
    """Overwrites its input before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Clip in place."""
        out: Tensor = self.linear(x.clamp_(min=0).mul_(2.0))
        return out


def test_a_model_may_overwrite_its_input() -> None:
    inputs, targets = vectors()[0]
    before = inputs.clone()
    groups = tensor_groups(InPlace(), loss_fn, (inputs, targets))
    assert names_of(groups) == ["linear"]
    assert torch.equal(inputs, before)


def test_integer_inputs_start_at_the_embedding() -> None:
    model = nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(28, 3))
    batch = torch.randint(11, (5, 7)), torch.randint(3, (5,))
    graph = trace_step(model, loss_fn, batch).graph
    assert names_of(list(graph.groups)) == ["2", "0"]
    assert graph.nodes[-1].group == 1 and graph.nodes[-1].inputs == ()


def test_a_model_of_parameters_alone_has_groups() -> None:
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Parameter(torch.randn(5, 4))
            self.right = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.left @ self.right

    batch = torch.zeros(5, dtype=torch.long), torch.randint(3, (5,))
    grouped = [p for g in tensor_groups(Prototypes(), loss_fn, batch) for p in g.parameters]
    assert sorted(grouped) == ["left", "right"]


def test_layers_used_twice_are_one_group() -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(6, 3))
    graph = trace_step(model, loss_fn, vectors()[0]).graph
    assert names_of(list(graph.groups)) == ["4", "0"]
    assert [len(nodes) for nodes in graph.group_nodes()] == [1, 2]


def test_two_uses_with_different_partners_merge_all_that_are_linked() -> None:
    class Linked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight
            self.three.bias = self.two.bias
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.three(self.two(self.one(x).relu()).relu()).relu())
            return out

    groups = tensor_groups(Linked(), loss_fn, vectors()[0])
    assert len(groups) == 2
    assert set(groups[1].parameters) == {"one.weight", "one.bias", "two.bias", "three.weight"}


def test_no_trainable_parameter_is_an_error_with_advice() -> None:
    model = chain().requires_grad_(False)
    with pytest.raises(ModelError, match="requires_grad"):
        tensor_groups(model, loss_fn, vectors()[0])
    detached = nn.Sequential(nn.Linear(6, 3))
    with pytest.raises(ModelError, match="no trainable parameter"):
        tensor_groups(detached, lambda out, t: loss_fn(out.detach(), t), vectors()[0])


@pytest.mark.parametrize("batch", [torch.randn(4, 6), (torch.randn(4, 6),), [1, 2, 3], None])
def test_a_batch_that_is_no_pair_is_explained(batch: Any) -> None:
    with pytest.raises(TrainingError, match="a batch must be a pair"):
        tensor_groups(chain(), loss_fn, batch)


@pytest.mark.parametrize("result", [torch.zeros(2), 3.5, None])
def test_a_loss_that_is_no_number_is_explained(result: Any) -> None:
    with pytest.raises(ModelError, match="loss_fn must return one number"):
        tensor_groups(chain(), lambda out, targets: result, vectors()[0])


def test_tracing_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        groups = tensor_groups(chain(), loss_fn, vectors()[0])
    assert names_of(groups) == ["6", "4", "2", "0"]
