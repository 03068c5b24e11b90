"""Running statistics and counters of BatchNorm: merged beside the server's strategy, not by it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    Strategy,
)
from plain_loop import plain_steps
from scripted_clients import EXAMPLES, first_arrays, manifest, scripts
from small_federation import (
    UpdateOf,
    Weights,
    arrays_of,
    as_weights,
    elastic_client,
    legacy_app,
    local_data,
    plain_sgd,
    quiet,
    run,
    scripted_app,
)
from small_models import conv_net, loss_fn
from torch import nn

from fl_elastic.flower import PartialUpdates
from fl_elastic.update import PartialUpdate

NORM = {
    "norm.running_mean": np.full(2, 0.5, np.float32),
    "norm.running_var": np.full(2, 2.0, np.float32),
    "norm.num_batches_tracked": np.array(17, np.int64),
}
SHIFTS = {1: 0.25, 4: -0.5}
"""Nodes that run their norm in training mode, and how far their running mean moves."""


def norm_scripts() -> dict[int, UpdateOf]:
    plain = scripts()

    def script(node: int) -> UpdateOf:
        def update(weights: Weights, version: int) -> PartialUpdate:
            parameters = plain[node](weights, version)
            deltas, steps = dict(parameters.deltas), dict(parameters.steps)
            if node in SHIFTS:
                for name, sign in (("norm.running_mean", 1), ("norm.running_var", 2)):
                    deltas[name] = np.full(2, sign * SHIFTS[node], np.float32)
                    steps[name] = 3
            return PartialUpdate(deltas, steps, EXAMPLES[node], version)

        return update

    return {node: script(node) for node in plain}


def trained(strategy: Strategy, rule: str | None, rounds: int = 1) -> Weights:
    apps = {node: scripted_app(manifest(NORM), update) for node, update in norm_scripts().items()}
    result, _ = run(PartialUpdates(strategy, rule=rule), apps, first_arrays(NORM), rounds)
    return as_weights(result.arrays)


@pytest.mark.parametrize("rule", ["contributors", "all"])
@pytest.mark.parametrize(
    "inner",
    [
        quiet(FedAvg),
        quiet(FedAvgM, server_momentum=0.9, server_learning_rate=0.5),
        quiet(FedAdam, eta=0.3),
    ],
    ids=lambda inner: type(inner).__name__,
)
def test_statistics_are_the_mean_of_those_who_updated_them(inner: FedAvg, rule: str) -> None:
    found = trained(inner, rule, rounds=1)
    total = EXAMPLES[1] + EXAMPLES[4]
    shift = (EXAMPLES[1] * SHIFTS[1] + EXAMPLES[4] * SHIFTS[4]) / total
    np.testing.assert_allclose(found["norm.running_mean"], 0.5 + shift, rtol=1e-6)
    np.testing.assert_allclose(found["norm.running_var"], 2.0 + 2 * shift, rtol=1e-6)


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_server_optimizer_does_not_touch_statistics(rounds: int) -> None:
    """With FedAdam they are bit for bit what FedAvg makes of them; parameters are not."""
    adam = trained(quiet(FedAdam, eta=0.3), None, rounds)
    average = trained(quiet(FedAvg), None, rounds)
    for name in ("norm.running_mean", "norm.running_var"):
        assert adam[name].tobytes() == average[name].tobytes()
    assert np.abs(adam["head.weight"] - average["head.weight"]).max() > 0.01


def test_statistics_stay_under_differential_privacy() -> None:
    inner = DifferentialPrivacyServerSideFixedClipping(quiet(), 1.0, 0.5, 4)
    found = trained(inner, None, rounds=2)
    for name, array in NORM.items():
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("inner", [quiet(FedAvg), quiet(FedAdam)], ids=["average", "adam"])
def test_the_counter_keeps_the_servers_value_and_type(inner: FedAvg) -> None:
    found = trained(inner, None, rounds=2)["norm.num_batches_tracked"]
    assert found.dtype == np.int64
    assert found.shape == ()
    assert found == 17


def batch_net() -> nn.Module:
    torch.manual_seed(3)
    return conv_net("batch")


def test_a_client_with_frozen_norms_does_not_dilute_the_others() -> None:
    """Two clients train everything and one the head only; all on a real model."""
    policies = {1: "full", 2: "head", 4: "full"}
    apps = {
        index: legacy_app(
            lambda node=node, policy=policy: elastic_client(batch_net(), node, policy)
        )
        for index, (node, policy) in enumerate(policies.items(), start=1)
    }
    start = arrays_of(batch_net())
    found = as_weights(run(PartialUpdates(quiet(nodes=3), rule="all"), apps, start)[0].arrays)
    local = {node: _trained_alone(node) for node in (1, 4)}
    for name, array in found.items():
        if name.endswith(("running_mean", "running_var")):
            expected = (6 * local[1][name] + 24 * local[4][name]) / 30
            np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6, err_msg=name)
            assert np.abs(array - as_weights(start)[name]).max() > 1e-3
        if name.endswith("num_batches_tracked"):
            assert array == 0


def _trained_alone(node: int) -> Weights:
    """Train the same batches in plain torch."""
    model = batch_net().train()
    optimizer = plain_sgd(model.parameters())
    plain_steps(model, optimizer, local_data(node), loss_fn)
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
