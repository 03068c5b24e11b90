"""Secure aggregation of partial updates: the server sees a sum of the same tensors of all, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from secure_rounds import begins_with, legacy_app, message_app, run_securely
from small_federation import EXAMPLES, build, elastic_client, local_data, plain_sgd
from small_models import flat_profile
from torch import nn

from fl_elastic import Budget
from fl_elastic.errors import SettingError
from fl_elastic.flower import ElasticClient, RoundConfig, SecurePartialUpdates
from fl_elastic.flower._compat import (
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from fl_elastic.flower.records import TENSORS
from fl_elastic.flower.tasks.task import config_key
from fl_elastic.profiling import CostProfile
from fl_elastic.training import Timing, TrainerOptions
from fl_elastic.update import Manifest, weights_of

GROUPS = config_key("groups")
NODES = (1, 2, 3)
QUANTUM = 2e-5
"""Secure aggregation rounds weights, multiplied by examples over ``max_weight``, to 16 / 2**22."""


MANIFEST = Manifest.of(build())


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return flat_profile(build(), local_data(4)[0], plain_sgd)


def client(profile: CostProfile, node: int, speedup: float) -> ElasticClient:
    return elastic_client(
        build(), node, "elastic", budget=Budget(speedup=speedup), profile=profile,
        options=TrainerOptions(seed=node, timing=Timing(closed_loop=False)),
    )  # fmt: skip


def secured(
    profile: CostProfile,
    speedups: dict[int, float],
    rounds: int = 1,
    app: Callable[[ElasticClient], ClientApp] = legacy_app,
    **options: Any,
) -> tuple[Any, ...]:
    """Run the legacy workflow; return strategy, models and the grid with all messages."""
    clients = {node: client(profile, node, speedup) for node, speedup in speedups.items()}
    workflow = SecAggPlusWorkflow(3, 2, timeout=30.0, **{"max_weight": 20.0, **options})
    strategy = SecurePartialUpdates(begins_with(build(), 3), workflow=workflow)
    models: list[list[np.ndarray]] = []
    aggregate = strategy.aggregate_fit

    def noted(*arguments: Any, **options: Any) -> Any:
        merged, metrics = aggregate(*arguments, **options)
        if merged is not None:
            models.append(parameters_to_ndarrays(merged))
        return merged, metrics

    strategy.aggregate_fit = noted  # type: ignore[method-assign]
    grid, replies = run_securely(strategy, workflow, clients, rounds, app)
    return strategy, models, grid, replies, clients


@pytest.mark.parametrize("app", [legacy_app, message_app])
def test_the_secure_sum_is_the_weighted_mean_of_what_all_trained(
    profile: CostProfile, app: Callable[[ElasticClient], ClientApp]
) -> None:
    speedups = {1: 1.0, 2: 2.0, 3: 1.4}
    strategy, (model,), _, _, _ = secured(profile, speedups, app=app)
    groups = strategy.fleet.training(1).groups
    assert groups
    start = weights_of(build(), MANIFEST)
    # The same clients once more, each on its own and without masks.
    plain = {}
    for node, speedup in speedups.items():
        arrays, examples, metrics = client(profile, node, speedup).fit(
            list(start.values()), {GROUPS: groups}
        )
        assert examples == EXAMPLES[node - 1]
        plain[node] = (metrics[TENSORS], arrays)
    (named,) = {tensors for tensors, _ in plain.values()}
    indices = list(map(int, named.strip("[]").split(",")))
    assert 0 < len(indices) < len(MANIFEST) - 3
    for index, (name, old) in enumerate(start.items()):
        if index not in indices:
            assert np.array_equal(model[index], old), name
            continue
        place = indices.index(index)
        mean = sum(EXAMPLES[n - 1] * plain[n][1][place].astype(float) for n in NODES)
        mean = mean / sum(EXAMPLES[n - 1] for n in NODES)
        np.testing.assert_allclose(model[index], mean, atol=QUANTUM, err_msg=name)
        assert model[index].dtype == old.dtype
    moved = max(np.abs(model[i] - array).max() for i, array in enumerate(start.values()))
    assert moved > 100 * QUANTUM


@pytest.mark.slow
def test_over_rounds_everything_is_trained_and_no_update_is_seen_in_the_clear(
    profile: CostProfile,
) -> None:
    strategy, models, _, replies, clients = secured(profile, {1: 1.0, 2: 1.3, 3: 1.5}, rounds=10)
    assert len(models) == 10
    names = MANIFEST.names
    moved = {
        name
        for before, after in pairwise(models)
        for name, one, other in zip(names, before, after, strict=True)
        if not np.array_equal(one, other)
    }
    assert {name for name in names if "num_batches" not in name} <= moved
    assert strategy.fleet.importance
    # Masked vectors are integers all over the range; the head's weights in the clear would be small floats.
    head = clients[1].get_parameters({})[names.index("11.weight")].tobytes()
    for reply in replies:
        for record in reply.content.array_records.values():
            assert all(head not in array.data for array in record.values())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        # A client of 18 examples is multiplied by 360, and its weights are clipped to 0.02.
        ({"max_weight": 0.05}, "a client with 18 examples the workflow clips weights to 0.0222"),
        ({"clipping_range": 0.2}, "clips weights to 0.222, and the model has some up to"),
        ({"modulus_range": 2**23}, "the sum of 3 clients does not fit"),
        ({"modulus_range": 2**24, "max_weight": 5.0, "clipping_range": 64.0}, "does not fit"),
    ],
)
def test_a_sum_that_the_workflow_cannot_take_changes_nothing(
    options: dict[str, Any], told: str, profile: CostProfile, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fl_elastic"):
        _, models, *_ = secured(profile, {1: 1.0, 2: 1.0, 3: 1.0}, **options)
    assert not models and told in caplog.text


@pytest.mark.parametrize(
    "config",
    [RoundConfig(delta_downlink=True), RoundConfig(cut="fixed:11"), RoundConfig(forget=True)],
)
def test_a_config_that_cannot_be_kept_is_refused(config: RoundConfig) -> None:
    with pytest.raises(SettingError, match="secure aggregation"):
        SecurePartialUpdates(FedAvg(), workflow=SecAggPlusWorkflow(3, 2), config=config)


class Fit:
    """A result of a round as the workflow hands it over."""

    def __init__(self, tensors: Any, arrays: list[np.ndarray], examples: int = 3) -> None:
        self.metrics = {TENSORS: tensors}
        self.parameters = ndarrays_to_parameters(arrays)
        self.num_examples = examples


GOOD = np.ones((2, 3), np.float32)
BAD: dict[str, list[Any]] = {
    "different tensors": [Fit("[0]", [GOOD]), Fit("[1]", [GOOD])],
    "nothing said": [Fit(None, [GOOD])],
    "no JSON": [Fit("[", [GOOD])],
    "too few": [Fit("[0, 1]", [GOOD])],
    "twice": [Fit("[0, 0]", [GOOD, GOOD])],
    "outside": [Fit("[7]", [GOOD])],
    "negative": [Fit("[-1]", [GOOD])],
    "another shape": [Fit("[0]", [GOOD.T])],
    "NaN": [Fit("[0]", [GOOD * np.nan])],
    "nobody": [],
}


@pytest.mark.parametrize("what", BAD)
def test_a_sum_that_does_not_fit_changes_nothing(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = SecurePartialUpdates(FedAvg(), workflow=SecAggPlusWorkflow(3, 2))
    strategy._arrays = [np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)]
    with caplog.at_level(logging.WARNING):
        results: Any = [(None, each) for each in BAD[what]]
        assert strategy.aggregate_fit(1, results, []) == (None, {})
    assert "round 1 changes nothing" in caplog.text


class Scaled(nn.Module):
    """A linear layer under a learned scale, as that of logits, and a count: both without dimensions."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2).to(dtype)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1.0
        return self.scale * self.linear(x.to(self.linear.weight.dtype)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_numbers_without_dimensions_and_halves_are_summed_as_any_others(dtype: torch.dtype) -> None:
    def batches(node: int) -> list[Any]:
        generator = torch.Generator().manual_seed(node)
        return [
            (torch.randn(4, 3, generator=generator), torch.randint(2, (4,), generator=generator))
            for _ in range(node)
        ]

    def trained(node: int) -> dict[str, np.ndarray]:
        model = Scaled(dtype).train()
        optimizer = plain_sgd(model.parameters())
        for inputs, targets in batches(node):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return weights_of(model, Manifest.of(model))

    clients = {
        node: ElasticClient(
            Scaled(dtype), batches(node), [], budget=Budget(), policy="full", optimizer_fn=plain_sgd
        )
        for node in NODES
    }
    workflow = SecAggPlusWorkflow(3, 2, timeout=30.0, max_weight=1000.0)
    strategy = SecurePartialUpdates(begins_with(Scaled(dtype), 3), workflow=workflow)
    merged: list[Any] = []
    aggregate = strategy.aggregate_fit

    def noted(*arguments: Any, **options: Any) -> Any:
        found, metrics = aggregate(*arguments, **options)
        merged.append(None if found is None else parameters_to_ndarrays(found))
        return found, metrics

    strategy.aggregate_fit = noted  # type: ignore[method-assign]
    run_securely(strategy, workflow, clients, 1)
    assert merged[0] is not None
    apart = {node: trained(node) for node in NODES}
    begun = weights_of(Scaled(dtype), Manifest.of(Scaled(dtype)))
    for (name, old), array in zip(begun.items(), merged[0], strict=True):
        mean = sum(4 * n * apart[n][name].astype(float) for n in NODES) / 24
        # Weights are rounded to 16 / 2**22 times 1,000 over the examples; halves to a thousandth.
        np.testing.assert_allclose(array, mean, atol=2e-3, err_msg=name)
        assert array.dtype == old.dtype and array.shape == old.shape
