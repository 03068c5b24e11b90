"""What every peer keeps to: valid updates, reproducible, no trace outside of the model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from peer_tasks import known_costs, task_of, weights
from plain_loop import plain_steps
from slow_ones import slow_unless
from small_models import Residual, chain, conv_net, images, loss_fn, sgd, vectors
from torch import nn

from fl_elastic.aggregation import RULES
from fl_elastic.errors import BudgetError, RegistryError, TrainingError
from fl_elastic.profiling import CostProfile
from fl_elastic.update import Manifest
from fl_elastic.update.checks import check_update
from fl_elastic_simulations.peers import PEERS, LocalResult

MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": chain,
    "batch_norm": conv_net,
    "group_norm": lambda: conv_net("group"),
    "residual": Residual,
}
every_peer = pytest.mark.parametrize("name", PEERS.names())


def with_dropout() -> nn.Module:
    model = conv_net()
    model[2] = nn.Sequential(nn.Dropout(0.3), nn.ReLU())
    return model


def data_for(model: nn.Module) -> list[Any]:
    return vectors(4) if next(model.parameters()).dim() == 2 else images(4)


@lru_cache
def costs(kind: str) -> CostProfile:
    """Costs of the model without exits, as the server measures them once."""
    model = (MODELS | {"dropout": with_dropout})[kind]()
    return known_costs(model, data_for(model)[0])


def run(
    name: str, kind: str, model: nn.Module, share: float = math.inf, **settings: Any
) -> LocalResult:
    """One round with this share of the time of full training."""
    batches, profile = data_for(model), costs(kind)
    allowed = share * profile.full_step_seconds * len(batches)
    task = task_of(
        model, batches, profile=profile, allowed_seconds=allowed, optimizer_fn=sgd, **settings
    )
    return PEERS.make(name).train(task)


def prepared(name: str, kind: str) -> nn.Module:
    torch.manual_seed(3)
    model = (MODELS | {"dropout": with_dropout})[kind]()
    return PEERS.make(name).prepare(model, loss_fn, data_for(model)[0])


def test_the_published_methods_are_all_there() -> None:
    assert PEERS.names() == ["fedel", "fedel_free_probe", "random_layers", "timelyfl"]
    for name in PEERS.names():
        peer = PEERS.make(name)
        assert peer.name == name
        RULES.check(peer.rule)
        assert peer.weighting in ("examples", "uniform")
    with pytest.raises(RegistryError, match="did you mean 'fedel'"):
        PEERS.make("fedell")


@every_peer
@pytest.mark.parametrize("kind", slow_unless({"batch_norm", "residual"}.__contains__, MODELS))
@pytest.mark.parametrize("share", [math.inf, 0.5, 0.02])
def test_an_update_is_valid_and_says_what_changed(name: str, kind: str, share: float) -> None:
    model = prepared(name, kind)
    before = weights(model)
    try:
        result = run(name, kind, model, share)
    except BudgetError:
        # Too little for one step: no update, and nothing has moved.
        assert share == 0.02
        assert all(
            np.array_equal(value, weights(model)[tensor]) for tensor, value in before.items()
        )
        return
    update = result.update
    check_update(update, Manifest.of(model))
    assert update.num_examples == len(data_for(model)) * len(data_for(model)[0][0])
    assert update.base_version == 3
    assert result.steps >= 1 and result.requested_steps == 4
    assert result.host_seconds > 0 and result.step_seconds > 0 and math.isfinite(result.loss)
    assert set(update.steps.values()) <= set(range(1, result.steps + 1))
    assert any(np.any(delta) for delta in update.deltas.values())
    after = weights(model)
    for tensor, value in before.items():
        if not tensor.endswith("num_batches_tracked"):
            expected = value + update.deltas.get(tensor, 0)
            np.testing.assert_allclose(after[tensor], expected, rtol=1e-5, atol=1e-6)


@every_peer
def test_the_same_seed_gives_the_same_round_and_leaves_randomness_alone(name: str) -> None:
    costs("dropout")
    base = prepared(name, "dropout")
    results = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        np.random.seed(noise)
        torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].tolist()
        results.append(run(name, "dropout", deepcopy(base), 0.5, client=1))
        assert torch.equal(torch_state, torch.get_rng_state())
        assert numpy_state == np.random.get_state()[1].tolist()
    first, second = (result.update for result in results)
    assert first.deltas.keys() == second.deltas.keys() and first.steps == second.steps
    assert all(np.array_equal(first.deltas[n], second.deltas[n]) for n in first.deltas)
    assert results[0].host_seconds == results[1].host_seconds


@every_peer
def test_notes_survive_json_and_the_model_its_settings(name: str) -> None:
    model = prepared(name, "batch_norm")
    memory: dict[str, Any] = {}
    for number in range(1, 5):
        run(name, "batch_norm", model, 0.4, memory=memory, server_round=number)
        memory = json.loads(json.dumps(memory))
    own = [p for name, p in model.named_parameters() if not name.startswith("early_exits")]
    assert all(parameter.requires_grad for parameter in own)
    assert all(module.training for module in model.modules())


@every_peer
def test_all_the_time_in_the_world_is_plain_training(name: str) -> None:
    model = prepared(name, "group_norm")
    plain = deepcopy(model)
    optimizer = sgd(plain.parameters())
    plain_steps(plain, optimizer, data_for(plain))
    result = run(name, "group_norm", model, math.inf)
    assert result.steps == 4
    assert result.host_seconds == pytest.approx(
        4 * known_costs(model, images()[0]).full_step_seconds
    )
    for tensor, value in plain.state_dict().items():
        if "early_exits" not in tensor:
            assert torch.equal(model.state_dict()[tensor], value), tensor


@every_peer
def test_the_loss_is_the_mean_over_examples(name: str) -> None:
    """Batches of 6 and of 1, in steps that move nothing."""
    model = prepared(name, "group_norm")
    inputs, targets = images(1)[0]
    batches = [(inputs, targets), (inputs[:1] * 9.0, targets[:1])]
    task = task_of(
        model, batches, profile=costs("group_norm"), epochs=2,
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=1e-30),
    )  # fmt: skip
    result = PEERS.make(name).train(task)
    with torch.no_grad():
        sums = [float(loss_fn(model(x), y)) * len(y) for x, y in batches]
    assert result.loss == pytest.approx(sum(sums) / 7, rel=1e-5)


@every_peer
def test_a_loss_that_is_not_finite_is_refused_and_the_model_put_back(name: str) -> None:
    model = prepared(name, "batch_norm")
    before = weights(model)
    batches = images(3)
    batches[1][0][0] = math.nan
    with pytest.raises(TrainingError):
        PEERS.make(name).train(task_of(model, batches, profile=costs("batch_norm")))
    after = weights(model)
    assert all(np.array_equal(before[n], after[n]) for n in before if "tracked" not in n)


@every_peer
def test_no_data_is_an_error(name: str) -> None:
    model = prepared(name, "chain")
    with pytest.raises(TrainingError, match="no batch"):
        PEERS.make(name).train(task_of(model, [], profile=costs("chain")))


@pytest.mark.parametrize(
    "settings", [{"epochs": 0}, {"allowed_seconds": 0.0}, {"allowed_seconds": math.nan}]
)
def test_a_task_that_means_nothing_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match="must be"):
        task_of(chain(), vectors(), **settings)


@every_peer
@pytest.mark.parametrize("kind", slow_unless("residual".__eq__, ["batch_norm", "residual"]))
def test_a_fit_keeps_to_its_time_or_there_is_none(name: str, kind: str) -> None:
    """With budgets from nothing to plenty, choosing and probes included, in rounds that follow each other."""
    generator, trained, refused = np.random.default_rng(7), 0, 0
    full = costs(kind).full_step_seconds
    memory: dict[str, Any] = {}
    for number, share in enumerate(generator.uniform(0.01, 0.6, 16), start=1):
        model, choosing = prepared(name, kind), float(generator.uniform(0, 0.3)) * full
        before = weights(model)
        try:
            result = run(
                name, kind, model, share, server_round=number, memory=memory,
                choosing_seconds=choosing,
            )  # fmt: skip
        except BudgetError:
            refused += 1
            assert all(np.array_equal(before[n], value) for n, value in weights(model).items())
            continue
        trained += 1
        assert result.host_seconds <= share * 4 * full * (1 + 1e-9)
        assert result.choosing_seconds <= result.host_seconds
        if PEERS.make(name).needs_costs:
            assert result.choosing_seconds >= choosing
    assert trained and refused


@pytest.mark.parametrize("name", [name for name in PEERS.names() if PEERS.make(name).needs_costs])
def test_a_dearer_choice_leaves_less_time_for_steps(name: str) -> None:
    full = costs("batch_norm").full_step_seconds
    results = [
        run(name, "batch_norm", prepared(name, "batch_norm"), 0.9, choosing_seconds=taken)
        for taken in (0.0, 2.4 * full)
    ]
    training = [result.host_seconds - result.choosing_seconds for result in results]
    assert training[1] <= (0.9 * 4 - 2.4) * full
    # Without time for it FedEL takes no probe, and that time is there for steps.
    assert training[1] < training[0] or name == "fedel"
    plenty = run(name, "batch_norm", prepared(name, "batch_norm"), 1.0, choosing_seconds=9 * full)
    # Where everything fits there is nothing to choose.
    assert plenty.steps == 4 and plenty.choosing_seconds == 0.0


@every_peer
def test_a_choice_can_be_rehearsed_without_a_trace(name: str) -> None:
    model = prepared(name, "residual")
    before, state = weights(model), torch.get_rng_state()
    full, memory = costs("residual").full_step_seconds, {}
    PEERS.make(name).rehearse(
        task_of(model, data_for(model), profile=costs("residual"), allowed_seconds=2 * full,
                memory=memory)
    )  # fmt: skip
    assert memory == {} and torch.equal(state, torch.get_rng_state())
    assert all(np.array_equal(before[n], value) for n, value in weights(model).items())
