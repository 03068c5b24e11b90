"""Clients of Flower's own in a fleet of elastic ones, and elastic ones under a strategy of Flower's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result
from in_process_grid import InProcessGrid
from small_federation import (
    arrays_of,
    as_weights,
    assert_close,
    build,
    elastic_client,
    local_data,
    plain_sgd,
    quiet,
    run,
)
from small_models import loss_fn
from torch import nn

from fl_elastic.flower import PartialUpdates, RoundRecord, elastic_client_app
from fl_elastic.flower._compat import NumPyClient
from fl_elastic.flower.downlink import MessagePacker


def trained(model: nn.Module, node: int, rate: float = 0.05) -> int:
    """One local epoch as everybody writes it; returns examples."""
    model.train()
    optimizer = plain_sgd(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = rate
    examples = 0
    for inputs, targets in local_data(node):
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        examples += len(targets)
    return examples


class Stock(NumPyClient):
    """As Flower's examples have it."""

    def __init__(self, node: int) -> None:
        self.node, self.model = node, build()

    def load(self, arrays: list[np.ndarray]) -> None:
        keys = self.model.state_dict().keys()
        state = {key: torch.tensor(array) for key, array in zip(keys, arrays, strict=False)}
        self.model.load_state_dict(state, strict=True)

    def fit(self, parameters: Any, config: Any) -> Any:
        self.load(parameters)
        examples = trained(self.model, self.node, float(config.get("lr", 0.05)))
        return [v.numpy() for v in self.model.state_dict().values()], examples, {"train_loss": 0.5}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        self.load(parameters)
        return 0.25, 10, {"accuracy": 0.5}


def numpy_app(node: int) -> ClientApp:
    return ClientApp(lambda context: Stock(node).to_client())


def message_app(node: int) -> ClientApp:
    """As Flower's PyTorch quickstart has it."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = build()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        examples = trained(model, node, float(message.content["config"].get("lr", 0.05)))
        metrics = MetricRecord({"train_loss": 0.5, "num-examples": examples})
        arrays = ArrayRecord(model.state_dict())
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        build().load_state_dict(message.content["arrays"].to_torch_state_dict())
        metrics = MetricRecord({"eval_loss": 0.25, "eval_acc": 0.5, "num-examples": 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def elastic(node: int) -> ClientApp:
    return elastic_client_app(lambda context: elastic_client(build(), node))


def fedavg_of(rounds: int, rate: float = 0.05) -> dict[str, np.ndarray]:
    """What Flower's own FedAvg over its own clients gives."""
    apps = {node: message_app(node) for node in (1, 2, 3, 4)}
    config = ConfigRecord({"lr": rate})
    result, _ = run(quiet(), apps, arrays_of(build()), rounds, train_config=config)
    return as_weights(result.arrays)


def assert_as_fedavg(result: Result, rounds: int, rate: float = 0.05) -> None:
    dense = fedavg_of(rounds, rate)
    expected = {n: w for n, w in dense.items() if not n.endswith("num_batches_tracked")}
    found = {n: w for n, w in as_weights(result.arrays).items() if n in expected}
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def beside_an_elastic_one(
    app: ClientApp, rounds: int, **options: Any
) -> tuple[list[RoundRecord], InProcessGrid]:
    """Records of rounds of an elastic client and this one."""
    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(nodes=2), on_round=records.append)
    _, grid = run(strategy, {1: elastic(1), 2: app}, arrays_of(build()), rounds, **options)
    return records, grid


MIXED: dict[str, Callable[[int], ClientApp]] = {"NumPyClient": numpy_app, "ClientApp": message_app}


@pytest.mark.parametrize("kind", MIXED)
def test_stock_clients_are_merged_as_full_updates_beside_elastic_ones(kind: str) -> None:
    records: list[RoundRecord] = []
    apps = {1: elastic(1), 2: MIXED[kind](2), 3: MIXED[kind](3), 4: elastic(4)}
    strategy = PartialUpdates(quiet(), on_round=records.append)
    result, grid = run(strategy, apps, arrays_of(build()), 2)
    assert [len(record.accepted) for record in records] == [4, 4]
    assert not any(record.rejected for record in records)
    # Everybody trains everything in the same way: the same as FedAvg.
    assert_as_fedavg(result, 2)
    # Each stock client was asked twice in the first round alone, and then in its own words.
    assert len(grid.sent) == 4 + 2 + 4
    families = {message.metadata.dst_node_id: set(message.content) for message in grid.sent[-4:]}
    own = {"fitins.parameters", "fitins.config"}
    assert families[2] == families[3] == (own if kind == "NumPyClient" else {"arrays", "config"})
    sizes = {each.node_id: each.uplink_bytes for each in records[1].accepted}
    assert sizes[2] == sum(array.nbytes for array in as_weights(result.arrays).values())


def counted_as_float(node: int) -> ClientApp:
    """A ClientApp that sends its number of examples as a sum of floats."""
    app, counted = message_app(node), ClientApp()

    def as_float(message: Message, context: Context) -> Message:
        reply = app(message, context)
        metrics = reply.content.metric_records["metrics"]
        metrics["num-examples"] = float(metrics["num-examples"])  # type: ignore[arg-type]
        return reply

    counted.train()(as_float)
    counted.evaluate()(as_float)
    return counted


def test_a_whole_number_of_examples_may_come_as_a_float() -> None:
    apps = {1: elastic(1), **{node: counted_as_float(node) for node in (2, 3, 4)}}
    inner = FedAvg(min_available_nodes=4)
    result, _ = run(PartialUpdates(inner), apps, arrays_of(build()), 2)
    assert_as_fedavg(result, 2)
    assert result.evaluate_metrics_clientapp[2]["eval_loss-clients"] == 3


@pytest.mark.parametrize("kind", MIXED)
def test_the_servers_settings_reach_stock_clients(kind: str) -> None:
    apps = {node: MIXED[kind](node) for node in (1, 2, 3, 4)}
    config = ConfigRecord({"lr": 0.2})
    result, _ = run(PartialUpdates(quiet()), apps, arrays_of(build()), 1, train_config=config)
    assert_as_fedavg(result, 1, 0.2)


@pytest.mark.parametrize("kind", MIXED)
def test_stock_clients_test_the_model_too(kind: str) -> None:
    apps = {1: elastic(1), 2: MIXED[kind](2)}
    inner = FedAvg(min_available_nodes=2)
    result, _ = run(PartialUpdates(inner), apps, arrays_of(build()), 1)
    metrics = result.evaluate_metrics_clientapp[1]
    assert {"loss", "accuracy"} <= set(metrics)


def test_who_cannot_answer_in_any_words_is_left_out() -> None:
    broken = ClientApp()

    @broken.train()
    def train(message: Message, context: Context) -> Message:
        raise RuntimeError("no battery")

    records, _ = beside_an_elastic_one(broken, 2)
    assert [[each.node_id for each in record.rejected] for record in records] == [[2], [2]]
    assert [len(record.accepted) for record in records] == [1, 1]
    assert "no battery" in records[0].rejected[0].reason


def test_an_elastic_client_that_failed_once_is_not_taken_for_a_stock_one() -> None:
    calls: list[int] = []

    def make(context: Context) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return elastic_client(build(), 2)

    records, grid = beside_an_elastic_one(elastic_client_app(make), 3)
    assert [len(record.accepted) for record in records] == [2, 1, 2]
    assert len(grid.sent) == 6


def test_an_error_of_the_users_own_is_said_and_makes_no_stock_client() -> None:
    class Unplugged:
        def __iter__(self) -> Any:
            raise KeyError("speed")

        def __len__(self) -> int:
            return 2

    def make(context: Context) -> Any:
        client = elastic_client(build(), 2)
        client.train_loader = Unplugged()
        return client

    records, grid = beside_an_elastic_one(elastic_client_app(make), 2)
    assert [[each.node_id for each in record.rejected] for record in records] == [[2], [2]]
    assert "KeyError: 'speed'" in records[0].rejected[0].reason
    assert len(grid.sent) == 4


class Unreadable:
    def __iter__(self) -> Iterator[Any]:
        raise OSError("the disk is gone")


def test_an_error_of_the_users_own_under_a_server_of_flowers_own_is_raised() -> None:
    client = elastic_client(build(), 2)
    client.train_loader = Unreadable()
    with pytest.raises(OSError, match="the disk is gone"):
        client.fit(client.get_parameters({}), {})


def damaged(change: Callable[[RecordDict], None]) -> Any:
    def alter(reply: Message) -> Message:
        if not reply.has_error() and "arrays" in reply.content:
            change(reply.content)
        return reply

    return alter


def too_few(content: RecordDict) -> None:
    record = content.array_records["arrays"]
    del record[next(iter(record))]


def not_finite(content: RecordDict) -> None:
    record = content.array_records["arrays"]
    name = next(iter(record))
    spoilt = ArrayRecord({name: record[name]}).to_numpy_ndarrays()[0] * np.nan
    record[name] = ArrayRecord([spoilt])["0"]


def no_examples(content: RecordDict) -> None:
    del content.metric_records["metrics"]["num-examples"]


@pytest.mark.parametrize(
    ("change", "word"),
    [(too_few, "arrays, the model has"), (not_finite, "NaN"), (no_examples, "num-examples")],
)
def test_a_bad_whole_model_costs_that_reply_alone(
    change: Callable[[RecordDict], None], word: str
) -> None:
    records, _ = beside_an_elastic_one(message_app(2), 1, alter=damaged(change))
    assert [each.node_id for each in records[0].accepted] == [1]
    assert word in records[0].rejected[0].reason


def test_an_elastic_app_under_flowers_own_strategy_gives_the_whole_model_back() -> None:
    apps = {node: elastic(node) for node in (1, 2, 3, 4)}
    result, _ = run(FedAvg(min_available_nodes=4), apps, arrays_of(build()), 2)
    assert_as_fedavg(result, 2)
    assert {"loss", "accuracy"} <= set(result.evaluate_metrics_clientapp[1])
    assert result.train_metrics_clientapp[1]["train-loss"] > 0


def test_no_time_to_ask_again_costs_a_stock_client_its_first_round_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as hurried:
        hurried.setattr(MessagePacker, "whole_again", lambda self, nodes: ())
        records, _ = beside_an_elastic_one(message_app(2), 2)
    assert [[each.node_id for each in record.rejected] for record in records] == [[2], []]
    assert [len(record.accepted) for record in records] == [1, 2]


def test_a_whole_model_of_an_earlier_round_is_left_out() -> None:
    def late(reply: Message) -> Message:
        if not reply.has_error() and "arrays" in reply.content:
            reply.metadata.group_id = "fl_elastic-0"
        return reply

    records, _ = beside_an_elastic_one(message_app(2), 1, alter=late)
    assert "of an earlier round" in records[0].rejected[0].reason


def test_whole_numbers_that_a_client_changes_are_said_to_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = ArrayRecord(
        {"counts": Array(np.zeros(3, np.int64)), "batches": Array(np.zeros((), np.int64))}
    )
    begun["w"] = Array(np.zeros(2, np.float32))
    result, _ = run(PartialUpdates(quiet(nodes=2)), {1: any_record(1), 2: any_record(2)}, begun, 2)
    assert result.arrays["counts"].numpy().tolist() == [0, 0, 0]
    said = [each.getMessage() for each in caplog.records if "integer tensor" in each.getMessage()]
    assert len(said) == 1 and "'counts'" in said[0]


class AnyNumbers(NumPyClient):
    """Computes with whatever arrays it is given, as clients without a network do."""

    def __init__(self, node: int) -> None:
        self.node = node

    def fit(self, parameters: Any, config: Any) -> Any:
        return [np.asarray(each + self.node) for each in parameters], 10 * self.node, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(np.mean(parameters[0])), 10, {}


def any_record(node: int) -> ClientApp:
    """The same as a ClientApp, which takes the first record of arrays that it finds."""
    app = ClientApp()

    def given(message: Message) -> list[np.ndarray]:
        return next(iter(message.content.array_records.values())).to_numpy_ndarrays()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = ArrayRecord([np.asarray(each + node) for each in given(message)])
        metrics = MetricRecord({"num-examples": 10 * node})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"loss": float(np.mean(given(message)[0])), "num-examples": 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


@pytest.mark.parametrize("kind", ["NumPyClient", "ClientApp"])
def test_no_client_takes_the_bytes_of_a_packed_model_for_its_own(kind: str) -> None:
    """Else its updates would be lost, and its loss would be that of the bytes."""

    def app(node: int) -> ClientApp:
        lists = ClientApp(lambda context: AnyNumbers(node).to_client())
        return any_record(node) if kind == "ClientApp" else lists

    begun = ArrayRecord({"w": Array(np.zeros((2, 2), np.float32))})
    strategy = PartialUpdates(FedAvg(min_available_nodes=2))
    result, _ = run(strategy, {1: app(1), 2: app(2)}, begun, 2)
    # The mean of 1 and 2, weighted by 10 and 20 examples, in each round.
    np.testing.assert_allclose(result.arrays["w"].numpy(), 2 * 5 / 3, rtol=1e-6)
    losses = [metrics["loss"] for metrics in result.evaluate_metrics_clientapp.values()]
    assert losses == pytest.approx([5 / 3, 10 / 3])


def test_a_small_change_of_a_large_double_is_merged_too() -> None:
    """Steps of float32 around a million are a sixteenth apart."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = {n: Array(each.numpy() + 1e-3) for n, each in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    begun = ArrayRecord({"w": Array(np.full(2, 1e6))})
    result, _ = run(PartialUpdates(quiet(nodes=2)), {1: app, 2: app}, begun, 3)
    np.testing.assert_allclose(result.arrays["w"].numpy() - 1e6, 3e-3, rtol=1e-6)
