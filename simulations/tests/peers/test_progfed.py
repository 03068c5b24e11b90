"""ProgFed: stages, what they compute, send and cost, and a stage by hand."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from peer_tasks import RATE, assert_close, known_costs, merged, task_of, weights
from small_models import Batch, chain, conv_net, images, loss_fn, vectors
from torch import Tensor, nn

from fl_elastic.errors import BudgetError, ModelError
from fl_elastic_simulations.peers import PEERS
from fl_elastic_simulations.peers.early_exits import EarlyExits
from fl_elastic_simulations.peers.progfed import stage_fronts, stage_windows

PEER = PEERS.make("progfed")
FIRST, SECOND_WARM, SECOND, LAST_WARM, LAST = 1, 16, 17, 46, 47


def exits_of(model: nn.Module, batch: Batch) -> EarlyExits:
    prepared = PEER.prepare(model, loss_fn, batch)
    assert isinstance(prepared, EarlyExits)
    return prepared


def slow_outputs(model: nn.Module, layers: int, exit_name: str, x: Tensor) -> Tensor:
    """The first children of a chain one after the other, then the mean over positions and a linear layer."""
    children = list(model._modules.items())[:layers]
    for _, child in children:
        x = child(x)
    x = x.flatten(2).mean(2) if x.dim() > 2 else x
    head = model.get_submodule(exit_name)
    return x @ head.get_parameter("linear.weight").T + head.get_parameter("linear.bias")


# Four linear layers with a ReLU behind each but the last: blocks end behind these.
@pytest.mark.parametrize(
    ("server_round", "layers", "exit_name"),
    [(1, 1, "early_exits.0"), (15, 1, "early_exits.0"), (16, 3, "early_exits.1"),
     (30, 3, "early_exits.1"), (31, 5, "early_exits.2")],
)  # fmt: skip
def test_a_stage_gives_the_scores_of_its_blocks_and_head(
    server_round: int, layers: int, exit_name: str
) -> None:
    torch.manual_seed(0)
    batch = vectors()[0]
    model = exits_of(chain(), batch)
    with PEER.as_tested(model, server_round):
        found = model(batch[0])
    # Where a block ends behind its activation or before it is the trace's affair: one of both it must be.
    slow = [slow_outputs(model, n, exit_name, batch[0]) for n in (layers, layers + 1)]
    assert any(torch.allclose(found, each, atol=1e-6) for each in slow)
    whole = batch[0]
    for _, child in list(model._modules.items())[:-1]:
        whole = child(whole)
    with PEER.as_tested(model, LAST):
        assert torch.allclose(model(batch[0]), whole, atol=1e-6)
    assert torch.allclose(model(batch[0]), whole, atol=1e-6), "a stage is left behind"


@pytest.mark.parametrize("ends", range(1, 14))
def test_stages_grow_to_the_whole_model_in_equal_parts(ends: int) -> None:
    fronts = stage_fronts(ends)
    assert fronts[-1] == ends and sorted(set(fronts)) == list(fronts) and len(fronts) <= 4
    if ends >= 4:
        assert len(fronts) == 4
        parts = np.diff([-1, *fronts[:-1], ends - 1])
        assert parts.max() - parts.min() <= 1 and parts.sum() == ends
    for number in range(1, 80):
        runs, trains = stage_windows(ends, number)
        stage = min((number - 1) // 15, len(fronts) - 1)
        first_of_its_stage = stage > 0 and (number - 1) % 15 == 0 and number <= 15 * stage + 1
        assert runs.end == 0 and runs.front == trains.front == fronts[stage]
        assert trains.end == (fronts[stage - 1] + 1 if first_of_its_stage else 0)


def by_hand(
    model: EarlyExits, batches: list[Batch], trained: list[str], server_round: int
) -> dict[str, Tensor]:
    """Gradient descent on the named tensors with the stage's scores."""
    copy = deepcopy(model)
    tensors = {name: copy.get_parameter(name).requires_grad_(True) for name in trained}
    for inputs, targets in batches:
        with PEER.as_tested(copy, server_round):
            loss = nn.functional.cross_entropy(copy(inputs), targets)
        gradients = torch.autograd.grad(loss, list(tensors.values()))
        with torch.no_grad():
            for tensor, gradient in zip(tensors.values(), gradients, strict=True):
                tensor -= RATE * gradient
    return {name: tensor.detach() for name, tensor in tensors.items()}


def named(*modules: str) -> list[str]:
    return [f"{module}.{each}" for module in modules for each in ("weight", "bias")]


STAGES = [
    (FIRST, named("0", "early_exits.0.linear")),
    (SECOND_WARM, named("2", "early_exits.1.linear")),
    (SECOND, named("0", "2", "early_exits.1.linear")),
    (LAST_WARM, named("6")),
    (LAST, named("0", "2", "4", "6")),
]


@pytest.mark.parametrize(("server_round", "trained"), STAGES)
def test_a_stage_trains_and_sends_its_blocks_and_head_alone(
    server_round: int, trained: list[str]
) -> None:
    torch.manual_seed(1)
    batches = vectors(3)
    model = exits_of(chain(), batches[0])
    before = weights(model)
    expected = by_hand(model, batches, trained, server_round)
    given = deepcopy(model)
    task = task_of(
        given, batches, profile=known_costs(chain(), batches[0]), server_round=server_round
    )
    result = PEER.train(task)
    assert set(result.update.deltas) == set(trained)
    assert set(result.update.steps.values()) == {3} and result.steps == 3
    assert_close({n: before[n] + d for n, d in result.update.deltas.items()}, expected)
    untouched = set(before) - set(trained)
    assert all(np.array_equal(weights(given)[name], before[name]) for name in untouched)


def test_what_two_clients_trained_is_averaged_by_their_data_and_all_else_stays() -> None:
    torch.manual_seed(2)
    data = [vectors(1), vectors(3)]
    model = exits_of(chain(), data[0][0])
    profile, before = known_costs(chain(), data[0][0]), weights(model)
    trained = dict(STAGES)[SECOND]
    results = [
        PEER.train(task_of(deepcopy(model), each, profile=profile, server_round=SECOND))
        for each in data
    ]
    found = merged(PEER, model, results)
    alone = [by_hand(model, each, trained, SECOND) for each in data]
    share = len(data[0][0][0]) * np.array([1, 3]) / (4 * len(data[0][0][0]))
    assert_close(found, {n: share[0] * alone[0][n] + share[1] * alone[1][n] for n in trained})
    assert all(np.array_equal(found[n], before[n]) for n in before if n not in trained)


def test_a_stage_is_charged_what_it_runs() -> None:
    """With a second per node and gradient, and two for the whole forward pass, written out for a chain of four.

    A linear layer is one node with one gradient, a ReLU one node, and the loss at least one. An exit costs what
    lies behind the last cut of the model: its head and the loss.
    """
    batches = vectors(2)
    profile = known_costs(chain(), batches[0])
    full = profile.full_step_seconds
    seconds = {}
    for server_round, _ in STAGES:
        model = exits_of(chain(), batches[0])
        task = task_of(model, batches, profile=profile, server_round=server_round)
        seconds[server_round] = PEER.train(task).host_seconds / 2
    assert seconds[FIRST] < seconds[SECOND] < seconds[LAST] == full
    assert seconds[SECOND_WARM] < seconds[SECOND] and seconds[LAST_WARM] < seconds[LAST]
    # Each block more is a part of the forward pass, and its gradients, updates and error.
    blocks = [named("0"), named("2"), named("4"), named("6")]
    places = [
        next(i for i, g in enumerate(profile.graph.groups) if g.parameters[0] == b[0])
        for b in blocks
    ]
    second = places[1]
    above_first = profile.path_seconds[places[0]]
    update = profile.update_seconds[second]
    forward = 2.0 * 1 / 4
    assert seconds[SECOND] - seconds[FIRST] == pytest.approx(above_first + update + forward)


def test_time_decides_how_many_steps_of_a_stage_fit() -> None:
    batches = vectors(4)
    model, profile = exits_of(chain(), batches[0]), known_costs(chain(), batches[0])
    task = task_of(model, batches, profile=profile)
    step = PEER.train(task).host_seconds / 4
    few = PEER.train(replace(task, allowed_seconds=2.5 * step))
    assert few.steps == 2 and few.host_seconds == pytest.approx(2 * step)
    assert few.choosing_seconds == 0
    with pytest.raises(BudgetError):
        PEER.train(replace(task, allowed_seconds=0.5 * step))


def test_statistics_of_blocks_that_do_not_run_stay_where_they_are() -> None:
    batches = images(2)
    model = exits_of(conv_net(), batches[0])
    task = task_of(model, batches, profile=known_costs(conv_net(), batches[0]))
    sent = {name.split(".")[0] for name in PEER.train(task).update.deltas}
    assert sent == {"0", "1", "early_exits"}


def test_a_model_without_exits_is_refused() -> None:
    with pytest.raises(ModelError, match="call prepare first"):
        PEER.train(task_of(chain(), vectors(1)))
