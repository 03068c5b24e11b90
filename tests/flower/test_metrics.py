"""What clients say besides their updates: kept under any name that can be shown, or refused aloud."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from small_federation import arrays_of, as_record, elastic_client, quiet, run
from small_models import conv_net
from torch import nn

from fl_elastic import Budget
from fl_elastic.flower import ElasticClient, PartialUpdates, elastic_client_app
from fl_elastic.flower.metrics import believed_metrics, left_out_of
from fl_elastic.flower.records import as_asked, evaluate_reply
from fl_elastic.flower.tracking import round_metrics

NAMES = [
    "val/AR@100", "mAP_0.5:0.95", "F1 (macro)", "précision", "a.b", "a_b", "a-b", "精度", "[bold]x", "x" * 200,
]  # fmt: skip


def test_metrics_of_any_name_that_can_be_shown_are_kept() -> None:
    metrics = {name: float(number) for number, name in enumerate(NAMES)}
    assert believed_metrics(metrics) == metrics and not left_out_of(metrics)


def of_a_test_with(
    metrics_of: Callable[[int], dict[str, Any]],
) -> tuple[dict[str, Any], list[float]]:
    """What the fleet says of its test with these metrics, and the examples of the clients."""
    counts: list[float] = []

    def app(node: int) -> ClientApp:
        def made(_: Any) -> ElasticClient:
            return elastic_client(
                conv_net(), node, metrics_fn=lambda outputs, targets: metrics_of(node)
            )

        return elastic_client_app(made)

    def note(reply: Message) -> Message:
        if reply.metadata.message_type == "evaluate":
            counts.append(reply.content["evaluateres.num_examples"]["num_examples"])
        return reply

    strategy = PartialUpdates(quiet(fraction_evaluate=1.0))
    apps = {node: app(node) for node in range(1, 5)}
    result, _ = run(strategy, apps, arrays_of(conv_net()), 1, alter=note)
    return dict(result.evaluate_metrics_clientapp.get(1, {})), counts


def test_such_metrics_reach_the_server_of_many_clients() -> None:
    found, _ = of_a_test_with(lambda node: {name: float(node) for name in NAMES})
    assert {name: found[name] for name in NAMES} == dict.fromkeys(NAMES, pytest.approx(2.5))


def test_a_metric_that_a_client_lacks_is_the_mean_over_the_others() -> None:
    found, counts = of_a_test_with(
        lambda node: {"map": float(node)} if node != 3 else {"other": 7.0}
    )
    assert len({*counts}) == 1
    assert found["map"] == pytest.approx((1 + 2 + 4) / 3) and found["map-clients"] == 3
    assert found["other"] == 7.0 and found["other-clients"] == 1
    assert "accuracy-clients" not in found


@pytest.mark.parametrize(
    "metrics", [{f"m{i}": 1.0 for i in range(257)}, {"new\nline": 1.0}, {"x" * 201: 1.0}, {"fl_elastic.have": 1.0}],
    ids=["many", "line", "long", "own"],
)  # fmt: skip
def test_what_no_server_would_keep_is_refused_on_the_device(
    metrics: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    found, _ = of_a_test_with(lambda node: metrics if node == 2 else {})
    assert "could not evaluate: metrics that no server would keep" in caplog.text
    assert found["accuracy"] >= 0 and not {*found} & {*metrics}


@pytest.mark.parametrize("name", ["loss", "num-examples"])
def test_a_metric_cannot_take_the_place_of_the_loss_or_the_examples(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    found, _ = of_a_test_with(lambda node: {name: 77.0} if node == 2 else {})
    assert f"metrics that no server would keep: {name!r} (the library's own)" in caplog.text
    assert found["loss"] < 5


def test_training_metrics_are_kept_and_completed_as_well() -> None:
    def alter(reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            told = reply.content["fitres.metrics"]
            told["précision"] = 0.1 * reply.metadata.src_node_id
            if reply.metadata.src_node_id == 1:
                del told["précision"]
        return reply

    records: list[Any] = []
    apps = {
        n: elastic_client_app(lambda _, n=n: elastic_client(conv_net(), n)) for n in range(1, 5)
    }
    strategy = PartialUpdates(quiet(), on_round=records.append)
    result, _ = run(strategy, apps, arrays_of(conv_net()), 1, alter=alter)
    weights = {each.node_id: each.num_examples for each in records[0].accepted}
    expected = sum(0.1 * node * weights[node] for node in (2, 3, 4)) / sum(
        weights[n] for n in (2, 3, 4)
    )
    found = dict(result.train_metrics_clientapp[1])
    assert found["précision"] == pytest.approx(expected) and found["précision-clients"] == 3
    logged = round_metrics(records[0])
    assert logged["train/précision"] == pytest.approx(expected)
    assert logged["train/précision-clients"] == 3


def test_a_strategy_of_flowers_own_gets_them_too() -> None:
    record = MetricRecord({"num-examples": 3})
    asked = RecordDict({"arrays": as_record({"w": np.zeros(2)}), "config": ConfigRecord({})})
    told = as_asked(asked, evaluate_reply(0.5, 3, dict.fromkeys(NAMES, 1.0)))["metrics"]
    assert {*told} == {*NAMES, "loss", *record}


def test_what_a_fit_reports_leaves_nothing_to_complain_of() -> None:
    """A warning for each client in each round hid all others."""
    model = nn.Linear(3, 2)
    data = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))]
    client = ElasticClient(model, data, data, budget=Budget(), policy="full")
    _, _, metrics = client.fit(client.get_parameters({}), {})
    assert isinstance(metrics["based-on"], str) and not left_out_of(metrics)
    assert left_out_of({**metrics, "note": "text"}) == "'note' (no finite number)"


def test_what_a_device_says_it_can_do_leaves_nothing_to_complain_of() -> None:
    model = nn.Linear(3, 2)
    data = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))]
    client = ElasticClient(model, data, data, budget=Budget(), policy="full", device="pi")
    said = client.capabilities().to_metrics()
    assert isinstance(said["group-costs"], str) and not left_out_of(said)
