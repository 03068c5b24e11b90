"""Round zero with differential privacy: each client clips and adds noise, and sends once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, Strategy
from small_federation import arrays_of, as_weights, plain_sgd, quiet, run
from torch import nn

from fl_elastic import Budget
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.sums_privacy import SumsPrivacy, encode_noisy_sums
from fl_elastic.flower import ElasticClient, PartialUpdates, RoundConfig, elastic_client_app
from fl_elastic.flower.records import train_reply
from fl_elastic.flower.round import RoundRecord
from fl_elastic.losses import classification_loss
from fl_elastic.update import Manifest

PRIVACY = SumsPrivacy(epsilon=20.0, clip=4.0)
TERMS = RoundConfig(read="last", solve_every=0, sums_privacy=PRIVACY)
NODES = range(1, 5)


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def data(node: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(node)
    places = torch.randn(3, 8, generator=torch.Generator().manual_seed(99)) * 2
    y = torch.randint(0, 3, (600,), generator=generator)
    x = places[y] + torch.randn(600, 8, generator=generator)
    return list(zip(x.split(50), y.split(50), strict=True))


def start(
    terms: RoundConfig = TERMS,
    *,
    rounds: int = 0,
    alter: Callable[[Message], Message] = lambda reply: reply,
    inner: Strategy | None = None,
    loaders: Callable[[int], Any] = data,
) -> tuple[list[float], list[RoundRecord]]:
    seen: list[float] = []
    records: list[RoundRecord] = []

    def client(node: int) -> ElasticClient:
        return ElasticClient(
            build(), loaders(node), data(0), budget=Budget(), loss_fn=classification_loss,
            optimizer_fn=plain_sgd,
        )  # fmt: skip

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        own = client(0)
        found = own.evaluate(list(as_weights(arrays).values()), {})[2]
        seen.append(float(found["accuracy"]))
        return MetricRecord({"accuracy": seen[-1]})

    strategy = PartialUpdates(inner or quiet(), config=terms, on_round=records.append)
    apps = {n: elastic_client_app(lambda _, n=n: client(n)) for n in NODES}
    run(strategy, apps, arrays_of(build()), rounds, alter=alter, evaluate_fn=evaluate)
    return seen, records


def test_the_head_is_there_and_everybody_counts() -> None:
    (found,), records = start()
    (without,), _ = start(RoundConfig())
    assert found > 0.8 > without + 0.2
    (zero,) = records
    assert len(zero.accepted) == 4 and not zero.rejected
    # How many examples a client has is not said.
    assert {each.num_examples for each in zero.accepted} == {1}


def test_under_a_strategy_with_privacy_it_is_allowed() -> None:
    private = DifferentialPrivacyServerSideFixedClipping(quiet(), 0.01, 1.0, 4)
    seen, records = start(rounds=1, inner=private)
    assert seen[0] > 0.8 and [each.server_round for each in records] == [0, 1]


def test_two_runs_draw_other_noise() -> None:
    sent: list[bytes] = []

    def keep(message: Message) -> Message:
        arrays = message.content.array_records["fitres.parameters"]
        sent.append(arrays["0"].numpy().tobytes())
        return message

    start(alter=keep)
    start(alter=keep)
    assert len(sent) == 8 and len(set(sent)) == 8


def test_who_sends_no_sums_of_clipped_examples_is_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manifest = Manifest.of(build())

    def alter(message: Message) -> Message:
        if message.metadata.src_node_id == 2:
            products, targets = np.eye(9) * 1e6, np.zeros((9, 3))
            lie = HeadSums("2.weight", products, targets, np.zeros(3), True)
            packed = np.frombuffer(encode_noisy_sums(lie, manifest), np.uint8)
            message.content = train_reply([packed], 1, {})
        if message.metadata.src_node_id == 3:
            products, targets = np.zeros((9, 9)), np.zeros((9, 3))
            products[-1, -1], targets[-1, 0] = 1e5, 1e5
            lie = HeadSums("2.weight", products, targets, np.zeros(3), True)
            packed = np.frombuffer(encode_noisy_sums(lie, manifest), np.uint8)
            message.content = train_reply([packed], 1, {})
        return message

    with caplog.at_level(logging.WARNING, "fl_elastic"):
        (found,), (zero,) = start(alter=alter)
    assert found > 0.75
    assert {each.node_id for each in zero.rejected} == {2, 3}
    assert "longer than the clip" in caplog.text and "claims 100000 examples" in caplog.text


def test_what_has_no_known_length_sends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def numbers(node: int) -> Any:
        return [(x, torch.rand(len(x), 3)) for x, _ in data(node)] if node else data(0)

    with caplog.at_level(logging.WARNING, "fl_elastic"):
        _, (zero,) = start(loaders=numbers)
    assert len(zero.rejected) == 4 and "to the sums is not bounded" in caplog.text
