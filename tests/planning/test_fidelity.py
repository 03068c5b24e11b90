"""Fidelity is the cosine between a mode's gradient and the exact one."""

from __future__ import annotations

import numpy as np
import torch
from small_models import Batch, conv_net, images, loss_fn, same_weights, vectors, weights_of
from torch import nn

from fl_elastic.groups import Mode
from fl_elastic.groups.graph import BackwardGraph
from fl_elastic.groups.trace import trace_step
from fl_elastic.groups.untouched import untouched
from fl_elastic.ops.lean import lean
from fl_elastic.planning.importance.fidelity import (
    Fidelity,
    gradient_cosine,
    measure_fidelity,
    visit_layers,
)

MODES = [
    Mode.channels(0.5),
    Mode.channels(0.25, axis="out"),
    Mode.filtered(2),
    Mode.filtered(4, inputs=True),
]


def measured(model: nn.Module, batch: Batch) -> tuple[BackwardGraph, Fidelity]:
    with untouched(model):
        graph = trace_step(model, loss_fn, batch).graph
    return graph, measure_fidelity(model, loss_fn, batch, graph, MODES)


def test_the_cosine_is_that_of_the_whole_step_where_only_that_layer_differs() -> None:
    model = conv_net(norm="none").train()
    batch = images(size=6)[0]
    graph, found = measured(model, batch)
    names = [group.name for group in graph.groups]
    loss_fn(model(batch[0]), batch[1]).backward()
    exact = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for name, mode in (("3", MODES[2]), ("6", MODES[2]), ("6", MODES[3]), ("3", MODES[3])):
        model.zero_grad(set_to_none=True)
        with lean(model, {name: mode}):
            loss_fn(model(batch[0]), batch[1]).backward()
        gradient = model.get_parameter(f"{name}.weight").grad
        assert gradient is not None
        expected = gradient_cosine(gradient, exact[f"{name}.weight"])
        row, column = names.index(name), MODES.index(mode)
        assert abs(found.weights[row, column] - expected) < 1e-5
        assert 0 < found.weights[row, column] < 1


def test_the_square_for_channels_is_their_share_of_the_gradient() -> None:
    model = conv_net(norm="none").train()
    batch = images(size=6)[0]
    graph, found = measured(model, batch)
    loss_fn(model(batch[0]), batch[1]).backward()
    gradient = model.get_parameter("6.weight").grad
    assert gradient is not None
    energy = gradient.square().sum((0, 2, 3)).sort(descending=True).values
    row = [group.name for group in graph.groups].index("6")
    share = float(energy[:4].sum() / energy.sum())
    assert np.isclose(found.weights[row, 0] ** 2, share, rtol=1e-4)


def test_layers_that_no_mode_fits_have_none() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    batch = vectors()[0]
    with untouched(model):
        graph = trace_step(model, loss_fn, batch).graph
    assert np.isnan(measure_fidelity(model, loss_fn, batch, graph, MODES).weights).all()


def test_measuring_leaves_no_trace() -> None:
    model = conv_net().train()
    batch = images()[0]
    with untouched(model):
        graph = trace_step(model, loss_fn, batch).graph
    before, state = weights_of(model), torch.get_rng_state()
    measure_fidelity(model, loss_fn, batch, graph, MODES)
    assert same_weights(before, model) and torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_layers_are_visited_with_what_went_in_and_what_came_back() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    inputs, targets = vectors()[0]
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    visit_layers(
        model, loss_fn, (inputs, targets), {0: model[0], 1: model[2]},
        lambda key, layer, given, gradient: seen.update({key: (given, gradient)}),
    )  # fmt: skip
    assert list(seen) == [1, 0] and torch.equal(seen[0][0], inputs)
    loss_fn(model(inputs), targets).backward()
    for key, layer in ((0, model[0]), (1, model[2])):
        given, gradient = seen[key]
        torch.testing.assert_close(gradient.T @ given, layer.weight.grad)  # type: ignore[arg-type]


def test_a_first_layer_with_one_channel_has_none_to_choose_from() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    batch = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    graph, found = measured(model, batch)
    row = [group.name for group in graph.groups].index("0")
    assert np.isnan(found.weights[row, 0]) and np.isfinite(found.weights[row, 1])
