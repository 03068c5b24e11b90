"""Tensor groups where the graph is odd: parametrised, shared, unused, in place, or not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import (
    chain,
    loss_fn,
    sgd,
    vectors,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fl_elastic.errors import ModelError, TrainingError
from fl_elastic.groups import TensorGroup, tensor_groups
from fl_elastic.groups.trace import trace_step
from fl_elastic.profiling import profile_model


def names_of(groups: list[TensorGroup]) -> list[str]:
    return [group.name for group in groups]


def test_parameters_that_take_no_part_keep_their_place_and_cost_nothing() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)
            self.loose = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            out: Tensor = self.used(x)
            return out

    model = Partly()
    groups = tensor_groups(model, loss_fn, vectors()[0])
    assert names_of(groups) == ["unused", "used", "loose"]
    assert groups[1].parameters == ("used.weight", "used.bias")
    profile = profile_model(model, loss_fn, vectors()[0], optimizer_fn=sgd)
    assert profile.graph.unused == (0, 2) and profile.graph.head == 1
    assert profile.graph.cuts == () and profile.graph.blocks == ()
    owners = profile.graph.group_nodes()
    for group in profile.graph.unused:
        assert profile.node_update_seconds[list(owners[group])].sum() == 0
        assert profile.node_saved_bytes[list(owners[group])].sum() == 0


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


def test_an_output_that_the_loss_ignores_keeps_its_place() -> None:
    groups = tensor_groups(
        TwoHeads("tuple"), lambda out, targets: loss_fn(out[1], targets), vectors()[0]
    )
    assert names_of(groups) == ["right", "left", "body"]


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


@pytest.mark.parametrize("penalties", [1, 2])
@pytest.mark.parametrize("on", ["", "weight"])
def test_a_penalty_on_many_weights_in_the_loss_joins_no_layers(on: str, penalties: int) -> None:
    model = chain()

    def penalised(out: Tensor, targets: Tensor) -> Tensor:
        loss = loss_fn(out, targets)
        for _ in range(penalties):
            squares = [each.pow(2).sum() for name, each in model.named_parameters() if on in name]
            loss = loss + 0.1 * torch.stack(squares).sum()
        return loss

    batch = vectors()[0]
    assert tensor_groups(model, penalised, batch) == tensor_groups(model, loss_fn, batch)


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
