"""A model in two parts gives what the whole gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Inception, chain, conv_net, images, loss_fn, vectors
from torch import Tensor, nn

from fl_elastic.errors import ModelError
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.ops.inference import fold, foldable_pairs
from fl_elastic.ops.split import SplitModel


def graph_of(model: nn.Module, batch: Any) -> BackwardGraph:
    with untouched(model):
        return trace_step(model, loss_fn, batch).graph


def trained_norms(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_folding_changes_nothing_but_rounding(bias: bool, affine: bool) -> None:
    pair = nn.Sequential(
        nn.Conv2d(3, 5, 3, 2, padding="valid", padding_mode="reflect", bias=bias),
        nn.BatchNorm2d(5, affine=affine),
    )
    trained_norms(pair) if affine else None
    folded = fold(pair[0], pair[1])  # type: ignore[arg-type]
    x = torch.randn(4, 3, 9, 9)
    assert folded is not None
    torch.testing.assert_close(folded(x), pair.eval()(x), rtol=1e-5, atol=1e-5)


def test_a_norm_without_running_statistics_is_not_folded() -> None:
    assert fold(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)) is None


class Forked(nn.Module):
    """A convolution whose output the norm shares with a short cut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        out: Tensor = self.head((y + self.norm(y)).mean((2, 3)))
        return out


def test_only_a_norm_that_is_alone_behind_its_convolution_is_folded() -> None:
    net = conv_net()
    assert foldable_pairs(graph_of(net, images()[0]), net) == [("6", "7"), ("3", "4"), ("0", "1")]
    forked = Forked()
    assert foldable_pairs(graph_of(forked, images()[0]), forked) == []


@pytest.mark.parametrize("make", [conv_net, Inception])
def test_both_parts_together_are_the_whole(make: Any) -> None:
    model = trained_norms(make()).eval()
    x = images(size=5)[0][0]
    whole = model(x)
    graph = graph_of(model, images()[0])
    assert len(graph.cuts) >= 2
    for cut in graph.cuts:
        with SplitModel(model, graph, cut) as split:
            split.check(x)
            features = split.features(x)
            assert not features.requires_grad
            torch.testing.assert_close(split.outputs(x, features), whole, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model(x), whole)
        assert "forward" not in vars(model.get_submodule(cut.module))
        torch.testing.assert_close(model(x), whole)


def test_the_rest_has_the_gradients_of_the_whole() -> None:
    model = trained_norms(conv_net()).train()
    batch = images(size=5)[0]
    graph = graph_of(model, batch)
    cut = graph.cuts[2]
    below = [group for group in graph.groups[cut.groups_above :] for group in group.parameters]
    for name in below:
        model.get_parameter(name).requires_grad_(False)
    for module in (model[1], model[4]):
        module.eval()
    loss_fn(model(batch[0]), batch[1]).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    with SplitModel(model, graph, cut) as split:
        features = split.features(batch[0])
        with split.given(features):
            loss_fn(model(batch[0]), batch[1]).backward()
    assert set(expected) == {n for n, p in model.named_parameters() if p.grad is not None}
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-5)


def test_skipped_modules_do_not_run() -> None:
    model = chain()
    graph = graph_of(model, vectors()[0])
    ran: list[int] = []
    for index, module in enumerate(model):
        module.register_forward_hook(lambda *_, index=index: ran.append(index))
    x = vectors()[0][0]
    cut = next(cut for cut in graph.cuts if cut.groups_above == 2)
    with SplitModel(model, graph, cut) as split:
        features = split.features(x)
        assert ran == [0, 1, 2]
        model[0].weight.data.fill_(float("nan"))
        assert bool(torch.isfinite(split.outputs(x, features)).all())


class Secretive(nn.Module):
    """Keeps a tensor for later behind the back of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        out: Tensor = self.last(self.second(y)) * y.detach().mean()
        return out


def test_a_model_that_cannot_be_split_is_refused_with_a_reason() -> None:
    model = Secretive()
    graph = graph_of(model, vectors()[0])
    with (
        SplitModel(model, graph, graph.cuts[0]) as split,
        pytest.raises(ModelError, match="'second'"),
    ):
        split.check(vectors()[0][0])


def test_code_between_modules_that_works_in_place_gets_real_tensors() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            y += 1
            out: Tensor = self.last(y)
            return out

    model = InPlace()
    graph = graph_of(model, vectors()[0])
    assert graph.cuts[0].at_input
    with SplitModel(model, graph, graph.cuts[0]) as split:
        split.check(vectors()[0][0])


def test_leaving_by_an_exception_puts_everything_back() -> None:
    model = conv_net().train()
    graph = graph_of(model, images()[0])
    with pytest.raises(RuntimeError), SplitModel(model, graph, graph.cuts[1]):
        raise RuntimeError
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(module.training for module in model.modules())


class Shared(nn.Module):
    """A layer that is the model's own and part of two blocks as well."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.blocks = nn.Sequential(
            *(nn.Sequential(self.shared, nn.Dropout(), nn.Tanh()) for _ in range(2))
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.shared(x)))
        return out


def test_a_layer_in_several_blocks_below_the_cut_is_in_train_mode_again() -> None:
    model = Shared()
    graph = graph_of(model, vectors()[0])
    for cut in graph.cuts:
        with SplitModel(model, graph, cut) as split:
            assert not any(each.training for each in split.prefix_modules)
        assert all(module.training for module in model.modules())
