"""Round zero under SecAgg+: the server sees the total of all sums, and that of a fifth of the examples."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from secure_rounds import begins_with, run_securely
from torch import nn

from fl_elastic import Budget
from fl_elastic.closed_form.head import closed_form_head
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.secret_sums import FixedPoint, with_held_out
from fl_elastic.closed_form.sums_privacy import SumsPrivacy, noised
from fl_elastic.errors import SettingError, UpdateError
from fl_elastic.flower import ElasticClient, RoundConfig, SecurePartialUpdates
from fl_elastic.flower._compat import (
    parameters_to_ndarrays,
)
from fl_elastic.flower.private_round_zero import SUMS_OF, secret_head
from fl_elastic.losses import classification_loss
from fl_elastic.training.head_pass import sums_apart
from fl_elastic.update import Manifest

TERMS = RoundConfig(plan="server", read="last", solve_every=0)
NODES = (1, 2, 3, 4, 5)
STEP = 2.0**-27


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 4))


def data(node: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As many examples as the node's number says, and of few classes."""
    generator = torch.Generator().manual_seed(node)
    x = torch.randn(20 + 10 * node, 8, generator=generator)
    y = x[:, :4].argmax(dim=1)
    some = y != node % 4
    return list(zip(x[some].split(8), y[some].split(8), strict=True))


MANIFEST = Manifest.of(build())


class Seen(SecurePartialUpdates):
    """Keeps what the server hears of a round, and each round's model."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.metrics = [dict(fit.metrics) for _, fit in results]
        self.counts = [fit.num_examples for _, fit in results]
        merged, metrics = super().aggregate_fit(server_round, results, failures)
        self.models = [*getattr(self, "models", []), merged]
        return merged, metrics


def secured(
    rounds: int = 1,
    *,
    dropped: Collection[int] = (),
    terms: RoundConfig = TERMS,
    loaders: Any = data,
    **options: Any,
) -> tuple[Seen, list[Message]]:
    """Run the workflow; nodes of ``dropped`` fail when they are to send."""
    clients = {}
    for node in NODES:
        clients[node] = ElasticClient(
            build(), loaders(node), data(9), budget=Budget(), loss_fn=classification_loss, policy="full",
            optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        )  # fmt: skip
        if node in dropped:
            clients[node].train_loader = []
    workflow = SecAggPlusWorkflow(5, 3, timeout=30.0, **options)
    strategy = Seen(begins_with(build(), 5), config=terms, workflow=workflow)
    return strategy, run_securely(strategy, workflow, clients, rounds)[1]


def totals(nodes: Collection[int] = NODES) -> tuple[HeadSums, HeadSums]:
    parts = [sums_apart(build(), data(node)) for node in nodes]
    total, held = parts[0]
    for one, other in parts[1:]:
        total, held = total + one, held + other
    return total, held


def head_of(strategy: Seen, number: int = 0) -> tuple[np.ndarray, np.ndarray]:
    arrays = parameters_to_ndarrays(strategy.models[number])
    return arrays[MANIFEST.index["2.weight"]], arrays[MANIFEST.index["2.bias"]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_weight": 20.0},
        {"quantization_range": 2**28},
        {"quantization_range": 3_000_000, "clipping_range": 3.0},
    ],
)
@pytest.mark.parametrize("dropped", [(), (2,)])
def test_the_head_is_that_of_the_total(dropped: tuple[int, ...], options: dict[str, Any]) -> None:
    strategy, _ = secured(dropped=dropped, **options)
    there = [node for node in NODES if node not in dropped]
    total, held = totals(there)
    assert 0.1 < held.num_examples / total.num_examples < 0.35
    expected = closed_form_head(with_held_out(total, held))
    weight, bias = head_of(strategy)
    np.testing.assert_allclose(weight, expected.weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bias, expected.bias, rtol=1e-5, atol=1e-6)
    model, right, count = build(), 0, 0
    with torch.no_grad():
        model[2].weight.copy_(torch.from_numpy(weight))
        model[2].bias.copy_(torch.from_numpy(bias))
        for node in NODES:
            for x, y in data(node):
                right, count = right + int((model(x).argmax(dim=1) == y).sum()), count + len(y)
    assert right / count > 0.8


def test_the_server_hears_nothing_of_a_single_client() -> None:
    strategy, replies = secured()
    said = json.dumps([MANIFEST.index["2.weight"], MANIFEST.index["2.bias"], 1])
    assert strategy.metrics == [{SUMS_OF: said}] * 5 and strategy.counts == [1] * 5
    own = {node: sums_apart(build(), data(node))[0].num_examples for node in NODES}
    assert len(set(own.values())) > 1
    # Masked numbers are spread over the whole range, whatever is in them.
    masked = [
        np.frombuffer(each, np.uint8)
        for reply in replies
        for record in reply.content.config_records.values()
        for value in record.values()
        for each in (value if isinstance(value, list) else [])
        if isinstance(each, bytes) and len(each) > 2000
    ]
    assert len(masked) == 5


def test_rounds_go_on_from_it() -> None:
    strategy, _ = secured(rounds=3)
    assert len(strategy.models) == 3
    (before, _), (after, _) = head_of(strategy, 0), head_of(strategy, 2)
    assert 0 < np.abs(after - before).max() < 1.0


def test_where_there_is_no_head_rounds_begin_as_without(caplog: pytest.LogCaptureFixture) -> None:
    def halves(node: int) -> Any:
        return data(node) if node < 4 else [(x, torch.zeros(len(x), 4)) for x, _ in data(node)]

    with caplog.at_level(logging.WARNING, "fl_elastic"):
        strategy, _ = secured(rounds=1, loaders=halves)
    assert strategy.models == [None] and "2 different layers" in caplog.text


def test_a_total_of_no_examples_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who lies is not seen, but that somebody does."""
    import fl_elastic.flower.private_round_zero as module

    plain = module.as_vector
    monkeypatch.setattr(module, "as_vector", lambda sums: -plain(sums))
    with caplog.at_level(logging.WARNING, "fl_elastic"):
        strategy, _ = secured()
    assert strategy.models == [None] and "cannot be a sum over examples" in caplog.text


def test_sums_of_more_clients_than_the_workflow_has_room_for_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "fl_elastic"):
        strategy, _ = secured(quantization_range=2**28, modulus_range=2**30)
    assert strategy.models == [None]
    assert "the sum of 5 clients does not fit" in caplog.text


def test_noise_is_on_the_total_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import fl_elastic.flower.private_round_zero as module

    given: list[tuple[HeadSums, float]] = []

    def watched(sums: HeadSums, noise: float, rng: Any) -> HeadSums:
        given.append((sums, noise))
        return noised(sums, noise, rng)

    monkeypatch.setattr(module, "noised", watched)
    privacy = SumsPrivacy(epsilon=8.0, clip=2.0)
    terms = RoundConfig(plan="server", read="last", solve_every=0, sums_privacy=privacy)
    strategy, _ = secured(terms=terms)
    ((total, noise),) = given
    assert noise == privacy.noise and np.isfinite(head_of(strategy)[0]).all()
    parts = [sums_apart(build(), data(node), clip=2.0)[0] for node in NODES]
    np.testing.assert_allclose(
        total.products, sum(each.products for each in parts), atol=5 * len(NODES) * STEP
    )
    np.testing.assert_allclose(
        total.targets, sum(each.targets for each in parts), atol=5 * len(NODES) * STEP
    )


def test_what_cannot_be_done_is_said_before_a_run() -> None:
    workflow = SecAggPlusWorkflow(5, 3)
    with pytest.raises(SettingError, match="solved for once"):
        terms = RoundConfig(plan="server", read="last")
        SecurePartialUpdates(FedAvg(), config=terms, workflow=workflow)
    with pytest.raises(UpdateError, match="too coarse"):
        SecurePartialUpdates(
            FedAvg(), config=TERMS, workflow=SecAggPlusWorkflow(5, 3, quantization_range=16)
        )


WEIGHT, BIAS = MANIFEST.index["2.weight"], MANIFEST.index["2.bias"]


@pytest.mark.parametrize(
    "said",
    [
        "no json", "7", "[1, 2]", "[1, 2, 3, 4]", "[null, 0, 1]", "[1e400, 0, 1]", "[" * 9999,
        f"[{WEIGHT}, 99, 1]", f"[{WEIGHT}, -2, 1]", f"[99, {BIAS}, 1]", "[99, -1, 1]", f"[-1, {BIAS}, 1]",
        f"[{BIAS}, {WEIGHT}, 1]",
    ],
)  # fmt: skip
def test_clients_that_name_no_layer_of_the_model_are_one_error(said: str) -> None:
    arrays = [np.zeros(shape, np.float32) for shape in MANIFEST.shapes]
    with pytest.raises(UpdateError, match="of which layer"):
        secret_head([said] * 3, np.zeros(1), 3, FixedPoint(2**22, 8.0, 1000.0), arrays, None)
