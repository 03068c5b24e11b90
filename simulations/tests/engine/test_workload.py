"""What a scenario gives each client to do."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_elastic_simulations.data.batches import Batches
from fl_elastic_simulations.engine import workload as workload_module
from fl_elastic_simulations.engine.workload import (
    at_speed,
    client_batches,
    measure_profile,
    measured_beside,
    optimizer_fn,
    scenario_dataset,
    scenario_model,
)
from fl_elastic_simulations.scenario import Scenario

SCENARIO: dict[str, Any] = {
    "methods": ["full"],
    "data": {"dataset": "digits", "partition": "dirichlet", "alpha": 0.3, "train_limit": 200,
             "test_limit": 50, "min_examples": 10},
    "model": {"name": "digits_cnn"},
    "training": {"rounds": 2, "batch_size": 16},
    "fleet": [{"device": "pi_4b", "count": 4}],
}  # fmt: skip


def scenario(**changes: Any) -> Scenario:
    return Scenario.from_json(json.dumps(SCENARIO | changes))


def examples(batches: Batches) -> tuple[np.ndarray, np.ndarray]:
    read = list(batches)
    return (
        torch.cat([inputs for inputs, _ in read]).numpy(),
        torch.cat([targets for _, targets in read]).numpy(),
    )


def as_set(inputs: np.ndarray) -> set[bytes]:
    return {each.tobytes() for each in inputs}


def test_clients_share_the_limited_training_set_out_among_them() -> None:
    parts = [examples(client_batches(scenario(), None, 0, client, 1)) for client in range(4)]
    assert sum(len(targets) for _, targets in parts) == 200
    assert min(len(targets) for _, targets in parts) >= 10
    everything = as_set(scenario_dataset(scenario(), None).train_x)
    seen = [as_set(inputs) for inputs, _ in parts]
    assert set.union(*seen) <= everything
    # Distinct images are nobody's twice; a few of the dataset's own are alike.
    assert len(set.union(*seen)) >= sum(len(each) for each in seen) - 2


def test_a_limit_beyond_the_dataset_is_no_limit() -> None:
    data = {"dataset": "digits", "train_limit": 10**6, "test_limit": 10**6}
    made, dataset = scenario(data=data), scenario_dataset(scenario(), None)
    sizes = [client_batches(made, None, 0, client, 1).dataset_size for client in range(4)]
    assert sum(sizes) == len(dataset.train_y)
    assert workload_module.test_batches(made, None).dataset_size == len(dataset.test_y)


def test_the_same_round_gives_the_same_batches() -> None:
    one = examples(client_batches(scenario(), None, 0, 2, 5))
    other = examples(client_batches(scenario(), None, 0, 2, 5))
    assert np.array_equal(one[0], other[0])
    assert np.array_equal(one[1], other[1])


def test_another_round_gives_the_same_examples_in_another_order() -> None:
    one = examples(client_batches(scenario(), None, 0, 2, 1))
    other = examples(client_batches(scenario(), None, 0, 2, 2))
    assert as_set(one[0]) == as_set(other[0])
    assert not np.array_equal(one[0], other[0])


def test_another_seed_gives_another_split() -> None:
    one = examples(client_batches(scenario(), None, 0, 2, 1))
    other = examples(client_batches(scenario(), None, 1, 2, 1))
    assert as_set(one[0]) != as_set(other[0])


def test_batches_have_the_scenarios_size() -> None:
    sizes = [len(targets) for _, targets in client_batches(scenario(), None, 0, 0, 1)]
    assert set(sizes[:-1]) <= {16}
    assert 2 <= sizes[-1] <= 17


def test_the_test_set_does_not_depend_on_anything_but_its_limit() -> None:
    one = examples(workload_module.test_batches(scenario(), None))
    other = examples(workload_module.test_batches(scenario(seeds=[5]), None))
    assert len(one[1]) == 50
    assert np.array_equal(one[0], other[0])
    batches = workload_module.test_batches(scenario(), None)
    assert np.array_equal(examples(batches)[0], examples(batches)[0])


def test_the_first_weights_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> bytes:
        torch.rand(seed + 1)
        model = scenario_model(scenario(), None, seed)
        return b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())

    assert weights(0) == weights(0)
    assert weights(0) != weights(1)


def test_the_model_fits_the_dataset() -> None:
    dataset = scenario_dataset(scenario(), None)
    outputs = scenario_model(scenario(), None, 0)(torch.as_tensor(dataset.train_x[:3]))
    assert outputs.shape == (3, dataset.classes)


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.2, "momentum": 0.7, "weight_decay": 0.01}),
        ("adam", torch.optim.Adam, {"lr": 0.2, "weight_decay": 0.01}),
        ("adamw", torch.optim.AdamW, {"lr": 0.2, "weight_decay": 0.01}),
    ],
)
def test_the_optimizer_is_the_scenarios(
    name: str, kind: type[torch.optim.Optimizer], expected: dict[str, float]
) -> None:
    training = {
        "rounds": 1, "optimizer": name, "learning_rate": 0.2, "momentum": 0.7,
        "weight_decay": 0.01,
    }  # fmt: skip
    made = optimizer_fn(scenario(training=training).training)(nn.Linear(2, 2).parameters())
    assert type(made) is kind
    assert {key: made.param_groups[0][key] for key in expected} == expected


def test_the_profile_is_of_the_scenarios_step() -> None:
    profile = measure_profile(scenario(), None)
    assert profile.key.batch_shape == (16, 1, 8, 8)
    assert profile.key.threads == torch.get_num_threads()
    assert profile.full_step_seconds > profile.floor_step_seconds > 0
    parameters = sum(p.numel() for p in scenario_model(scenario(), None, 0).parameters())
    assert profile.parameter_bytes.sum() == 4 * parameters


def test_costs_measured_while_the_host_is_busy_are_those_of_the_host_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = scenario()
    model = scenario_model(made, None, seed=0).train()
    known = measure_profile(made, None)
    passes = itertools.count()
    # Each pass takes a second by this clock; the costs of the other model were measured on a host a third as fast.
    monkeypatch.setattr(workload_module, "clock_for", lambda *_: lambda: float(next(passes)))
    monkeypatch.setattr(workload_module, "measure_profile", lambda *_: at_speed(known, 3.0))
    found = measured_beside(made, None, known, model)
    assert found.full_step_seconds == pytest.approx(known.full_step_seconds, rel=0.02)
    assert found.forward_seconds == pytest.approx(known.forward_seconds, rel=0.02)
