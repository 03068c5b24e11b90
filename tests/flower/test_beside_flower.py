"""Strategies, mods and clients as users of Flower write them, against Flower's own result or a mean by hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.clientapp.typing import Mod
from flwr.common import Code, FitIns, FitRes, Status
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedAvgM,
    FedMedian,
    Result,
    Strategy,
)
from in_process_grid import InProcessGrid
from small_federation import (
    Around,
    Weights,
    arrays_of,
    as_weights,
    assert_close,
    assert_identical,
    run,
)
from torch import nn
from torch.nn.functional import cross_entropy

from fl_elastic import Budget
from fl_elastic.aggregation import ModelAverage
from fl_elastic.errors import SettingError
from fl_elastic.flower import (
    Checkpointed,
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    RoundRecord,
    elastic_client_app,
)
from fl_elastic.flower._compat import NumPyClient
from fl_elastic.flower.evaluation_replies import asked_again
from fl_elastic.flower.stock_clients import RAISED, StockClients
from fl_elastic.flower.wrapped_strategy import chain

NODES = (1, 2, 3)
# The first two layers have the same shape, so that their tensors can be confused.
OTHER_ORDER = ("1.weight", "1.bias", "0.weight", "0.bias", "2.weight", "2.bias")


def net(scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(scale)
    return model


def data(node: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As many batches of four examples as the node's number."""
    generator = torch.Generator().manual_seed(node)
    return [
        (torch.randn(4, 3, generator=generator), torch.randint(0, 2, (4,), generator=generator))
        for _ in range(node)
    ]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trained(model: nn.Module, node: int) -> int:
    optimizer = sgd(model.parameters())
    for inputs, targets in data(node):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return 4 * node


def elastic(node: int, mods: Sequence[Mod] = ()) -> ClientApp:
    def client(_: Context) -> ElasticClient:
        return ElasticClient(
            net(), data(node), data(1), budget=Budget(), policy="full", optimizer_fn=sgd
        )

    return elastic_client_app(client, mods)


def plain(
    node: int,
    metrics: Callable[[int], dict[str, Any]] = lambda n: {"num-examples": n},
    tested: dict[str, Any] | None = None,
    names: Sequence[str] = (),
    mods: Sequence[Mod] = (),
    more: dict[str, Any] | None = None,
) -> ClientApp:
    """As Flower's quickstart has it; ``names`` is the order of its tensors, ``more`` is also in its replies."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, _: Context) -> Message:
        model = net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        examples = trained(model, node)
        state = model.state_dict()
        arrays = ArrayRecord({name: state[name] for name in names or state})
        content = {"arrays": arrays, "metrics": MetricRecord(metrics(examples)), **(more or {})}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, _: Context) -> Message:
        net().load_state_dict(message.content["arrays"].to_torch_state_dict())
        said = MetricRecord(tested or {"eval_loss": 0.25, "num-examples": 10})
        return Message(RecordDict({"metrics": said, **(more or {})}), reply_to=message)

    return app


def strategy_of(kind: type[FedAvg] = FedAvg, **options: Any) -> FedAvg:
    least = dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), 3)
    return kind(**(least | options))


def fleet(app: Callable[..., ClientApp], **options: Any) -> dict[int, ClientApp]:
    return {node: app(node, **options) for node in NODES}


def start(
    strategy: Strategy, apps: dict[int, ClientApp], rounds: int = 1, **options: Any
) -> Result:
    return run(strategy, apps, arrays_of(net()), rounds, **options)[0]


def by_hand(rounds: int = 1, scale: float = 1.0) -> Weights:
    """The mean over the nodes' models, weighted by examples."""
    state = net(scale).state_dict()
    for _ in range(rounds):
        models = [net() for _ in NODES]
        for model in models:
            model.load_state_dict(state)
        weights = [trained(model, node) for model, node in zip(models, NODES, strict=True)]
        state = {
            name: sum(
                weight * model.state_dict()[name].double()
                for model, weight in zip(models, weights, strict=True)
            ).float() / sum(weights)
            for name in state
        }  # fmt: skip
    return {name: each.numpy() for name, each in state.items()}


def test_a_plain_client_may_send_its_tensors_in_any_order() -> None:
    apps = {1: elastic(1), 2: plain(2, names=OTHER_ORDER), 3: plain(3, names=OTHER_ORDER[::-1])}
    assert_close(start(PartialUpdates(strategy_of()), apps).arrays, by_hand())


def test_a_server_may_begin_with_tensors_in_any_order_if_its_clients_are_plain() -> None:
    first = as_weights(arrays_of(net()))
    record = ArrayRecord({name: Array(first[name]) for name in OTHER_ORDER})
    result, _ = run(PartialUpdates(strategy_of()), fleet(plain), record)
    expected = by_hand()
    assert_close(result.arrays, {name: expected[name] for name in OTHER_ORDER})


def test_a_plain_model_with_tensors_of_other_names_is_refused() -> None:
    records: list[RoundRecord] = []
    strange = plain(2)

    def renamed(reply: Message) -> Message:
        if reply.has_content() and "arrays" in reply.content:
            arrays = reply.content["arrays"]
            reply.content["arrays"] = ArrayRecord({f"net.{n}": a for n, a in arrays.items()})
        return reply

    strategy = PartialUpdates(strategy_of(), on_round=records.append)
    run(strategy, {1: elastic(1), 2: strange, 3: elastic(3)}, arrays_of(net()), 1, renamed)
    (refused,) = records[0].rejected
    assert refused.reason == "it names a tensor 'net.0.weight', which the model does not have"


@pytest.mark.parametrize("packed", [False, True])
def test_an_elastic_client_takes_no_tensor_for_another(
    packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = as_weights(arrays_of(net()))
    record = ArrayRecord({name: Array(first[name]) for name in OTHER_ORDER})
    inner = strategy_of()
    result, _ = run(PartialUpdates(inner) if packed else inner, fleet(elastic), record)
    assert not result.arrays
    assert ("another order" if packed else "has tensor '1.weight' where") in caplog.text


def test_a_plain_client_that_changes_nothing_counts_as_under_fedavg() -> None:
    """As a perceptron whose examples are all on the right side."""

    def content_is(node: int) -> ClientApp:
        app = ClientApp()

        @app.train()
        def train(message: Message, _: Context) -> Message:
            arrays = message.content["arrays"].to_numpy_ndarrays()
            moved = [each + (node - 1) * (place != 1) for place, each in enumerate(arrays)]
            metrics = MetricRecord({"num-examples": 10 * node})
            return Message(
                RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message
            )

        return app

    options = {"fraction_evaluate": 0.0}
    found, own = (
        start(strategy, fleet(content_is), 2).arrays
        for strategy in (PartialUpdates(strategy_of(**options)), strategy_of(**options))
    )
    assert_close(found, dict(zip(as_weights(found), as_weights(own).values(), strict=True)))


def test_a_model_that_begins_near_zero_is_merged_as_under_fedavg() -> None:
    """Any first change is many times larger than it, that of the client with the smallest one as well."""

    def moves(node: int) -> ClientApp:
        app = ClientApp()

        @app.train()
        def train(message: Message, _: Context) -> Message:
            arrays = {
                n: Array(each.numpy() + node) for n, each in message.content["arrays"].items()
            }
            metrics = MetricRecord({"num-examples": 10})
            return Message(
                RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message
            )

        return app

    begun = ArrayRecord({"w": Array(np.full((3, 2), 1e-9, np.float32))})
    inner = strategy_of(fraction_evaluate=0.0)
    result, _ = run(PartialUpdates(inner), fleet(moves), begun, 2)
    np.testing.assert_allclose(result.arrays["w"].numpy(), 4.0, rtol=1e-6)


def test_plain_clients_weigh_as_the_strategy_says() -> None:
    def metrics(examples: int) -> dict[str, Any]:
        return {"num-examples": examples, "mine": 100 - examples, "train_loss": 1.0 / examples}

    tested = {"eval_loss": 0.5, "num-examples": 10, "mine": 3}
    found, own = (
        start(strategy, fleet(plain, metrics=metrics, tested=tested))
        for strategy in (
            PartialUpdates(strategy_of(weighted_by_key="mine")),
            strategy_of(weighted_by_key="mine"),
        )
    )
    assert_close(found.arrays, as_weights(own.arrays))
    losses = [result.train_metrics_clientapp[1] for result in (found, own)]
    assert losses[0]["train-loss"] == pytest.approx(losses[1]["train_loss"])


def test_a_metric_that_ends_like_the_loss_does_not_replace_it() -> None:
    tested = {
        "loss": 0.25, "reg_loss": 7.0, "accuracy": 0.5, "top5_accuracy": 0.9, "num-examples": 10,
    }  # fmt: skip
    result = start(PartialUpdates(strategy_of()), fleet(plain, tested=tested))
    found = result.evaluate_metrics_clientapp[1]
    expected = {name: each for name, each in tested.items() if name != "num-examples"}
    assert dict(found) == pytest.approx(expected)


# As in Flower's quickstarts for sklearn and numpy, and with two losses, of which none is guessed to be meant.
WITHOUT_A_LOSS = [{"test_logloss": 0.7, "accuracy": 0.5}, {"random_metric": 0.25}, {}]
TWO_LOSSES = {"eval_loss": 0.25, "reg_loss": 7.0}


@pytest.mark.parametrize("tested", [*WITHOUT_A_LOSS, TWO_LOSSES])
@pytest.mark.parametrize("more", [{}, {"notes": ConfigRecord({"took": "long"})}])
def test_evaluations_of_plain_clients_need_no_loss(
    tested: dict[str, Any], more: dict[str, Any]
) -> None:
    def fleet_of() -> dict[int, ClientApp]:
        of = {node: {n: each / node for n, each in tested.items()} for node in NODES}
        return {
            node: plain(node, tested={**of[node], "num-examples": node}, more=more)
            for node in NODES
        }

    found, own = (
        start(strategy, fleet_of()).evaluate_metrics_clientapp
        for strategy in (PartialUpdates(strategy_of()), strategy_of())
    )
    assert dict(found[1]) == pytest.approx(dict(own[1]))


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), [1.0, 2.0]])
def test_a_loss_of_a_plain_client_that_is_no_finite_number_is_named(
    spoilt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tested = {"eval_loss": spoilt, "eval_acc": 0.5, "num-examples": 10}
    result = start(PartialUpdates(strategy_of()), fleet(plain, tested=tested))
    assert not result.evaluate_metrics_clientapp
    assert "left out: its metric 'eval_loss' is no finite number" in caplog.text


def test_a_function_for_training_metrics_sees_all_clients_once() -> None:
    calls: list[int] = []

    def spread(records: list[RecordDict], weighted_by: str) -> MetricRecord:
        calls.append(len(records))
        losses = [float(record["metrics"]["train-loss"]) for record in records]
        return MetricRecord({"spread": statistics.stdev(losses)})

    inner = strategy_of(train_metrics_aggr_fn=spread)
    result = start(PartialUpdates(inner), fleet(elastic), 2)
    assert calls == [3, 3]
    assert result.train_metrics_clientapp[2]["spread"] > 0
    assert inner.train_metrics_aggr_fn is spread


class Lists(NumPyClient):
    """As Flower's older examples have it."""

    def __init__(self, node: int) -> None:
        self.node = node

    def fit(self, arrays: Any, config: Any) -> Any:
        model = net()
        state = {n: torch.as_tensor(a) for n, a in zip(model.state_dict(), arrays, strict=True)}
        model.load_state_dict(state)
        examples = trained(model, self.node)
        sent = [each.numpy() for each in model.state_dict().values()]
        return sent, examples, {"mine": 100 - examples, "train_loss": 0.25}

    def evaluate(self, arrays: Any, config: Any) -> Any:
        return 0.5, 10 * self.node, {"mine": 3}


@pytest.mark.parametrize("key", ["num-examples", "mine"])
@pytest.mark.parametrize("kind", ["plain", "lists", "elastic"])
def test_a_users_functions_are_given_what_flower_gives_them(kind: str, key: str) -> None:
    def merged(records: list[RecordDict], weighted_by: str) -> MetricRecord:
        found = [dict(each.metric_records["metrics"]) for each in records]
        examples = sum(float(each["num-examples"]) for each in found)
        losses = [
            each[name] for each in found for name in ("train_loss", "eval_loss") if name in each
        ]
        return MetricRecord({"examples": examples, "losses": len(losses)})

    def metrics(examples: int) -> dict[str, Any]:
        return {"num-examples": examples, "mine": 100 - examples, "train_loss": 0.25}

    apps = {
        "plain": lambda: fleet(plain, metrics=metrics, tested={"eval_loss": 0.5, "num-examples": 10, "mine": 3}),
        "lists": lambda: fleet(lambda node: ClientApp(lambda _: Lists(node).to_client())),
        "elastic": lambda: fleet(elastic),
    }[kind]()  # fmt: skip
    inner = strategy_of(
        weighted_by_key=key, train_metrics_aggr_fn=merged, evaluate_metrics_aggr_fn=merged
    )
    result = start(PartialUpdates(inner), apps)
    examples = {"plain": 30, "lists": 60, "elastic": 12}[kind]
    assert result.train_metrics_clientapp[1]["examples"] == 4 + 8 + 12
    assert result.evaluate_metrics_clientapp[1]["examples"] == examples
    if kind == "plain":
        assert result.train_metrics_clientapp[1]["losses"] == 3
        assert result.evaluate_metrics_clientapp[1]["losses"] == 3


def test_clients_of_lists_weigh_as_the_strategy_says() -> None:
    apps = fleet(lambda node: ClientApp(lambda _: Lists(node).to_client()))
    found = start(PartialUpdates(strategy_of(weighted_by_key="mine")), apps).arrays
    models = [net() for _ in NODES]
    weights = [100 - trained(model, node) for model, node in zip(models, NODES, strict=True)]
    for name, array in as_weights(found).items():
        parts = [w * m.state_dict()[name].double() for w, m in zip(weights, models, strict=True)]
        np.testing.assert_allclose(array, sum(parts) / sum(weights), rtol=1e-5, atol=1e-7)


def test_an_error_of_the_users_function_stays_what_it_is() -> None:
    def faulty(records: list[RecordDict], weighted_by: str) -> MetricRecord:
        raise KeyError("f1")

    class Faulty(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            raise ValueError("of the user's own")

    with pytest.raises(KeyError, match="f1"):
        start(PartialUpdates(strategy_of(train_metrics_aggr_fn=faulty)), fleet(elastic))
    with pytest.raises(ValueError, match=r"^of the user's own$"):
        start(PartialUpdates(strategy_of(Faulty)), fleet(elastic))


class Adds(FedAvg):
    """Adds a metric of its own."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert metrics is not None
        metrics["mine"] = 1.5
        return arrays, metrics


def test_metrics_that_a_users_strategy_adds_are_kept() -> None:
    result = start(PartialUpdates(strategy_of(Adds)), fleet(elastic))
    metrics = result.train_metrics_clientapp[1]
    assert metrics["mine"] == 1.5
    assert metrics["train-loss"] > 0


def test_what_a_users_wrapper_hides_is_seen() -> None:
    with pytest.raises(SettingError, match="Around around FedMedian is not a linear mean"):
        PartialUpdates(Around(strategy_of(FedMedian)))

    def private() -> Strategy:
        return DifferentialPrivacyServerSideFixedClipping(strategy_of(), 0.0, 0.01, 3)

    # Each client is clipped, and not their mean.
    seen, hidden = (
        start(PartialUpdates(strategy), fleet(elastic))
        for strategy in (private(), Around(private()))
    )
    assert_identical(seen.arrays, hidden.arrays)


PRIVATE = {
    "server": lambda inner: DifferentialPrivacyServerSideFixedClipping(inner, 0.1, 0.01, 3),
    "client": lambda inner: DifferentialPrivacyClientSideFixedClipping(inner, 0.1, 0.01, 3),
}


@pytest.mark.parametrize("kind", PRIVATE)
@pytest.mark.parametrize("saved", [False, True])
def test_privacy_around_packed_updates_is_refused(kind: str, saved: bool, tmp_path: Path) -> None:
    """Of the two, the first cannot read them, and the second would add noise to changes that nobody clips."""
    strategy = PRIVATE[kind](PartialUpdates(strategy_of()))
    with pytest.raises(
        SettingError,
        match="cannot clip the packed updates of its clients: put the server-side wrapper",
    ):
        start(Checkpointed(strategy, tmp_path) if saved else strategy, fleet(elastic))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"average": ModelAverage(0.5)}, "average"),
        ({"config": RoundConfig(read="last")}, "config.read"),
    ],
)
def test_what_only_its_own_start_does_is_not_promised_inside_a_wrapper(
    settings: dict[str, Any], what: str
) -> None:
    inside = PartialUpdates(strategy_of(), **settings)
    with pytest.raises(
        SettingError, match=f"Around is put around PartialUpdates, whose {what} then has no"
    ):
        start(Around(inside), fleet(elastic))
    assert start(PartialUpdates(Around(strategy_of()), **settings), fleet(elastic)).arrays


def test_a_wrapper_around_that_changes_nothing_is_let_be() -> None:
    one, other = (
        start(each, fleet(elastic))
        for each in (Around(PartialUpdates(strategy_of())), PartialUpdates(strategy_of()))
    )
    assert_close(one.arrays, as_weights(other.arrays))


def test_a_run_inside_a_round_of_another_strategy_is_its_own() -> None:
    """As in a federation of federations, where each round of one trains another."""

    class Nested(FedAvg):
        def configure_train(self, *arguments: Any) -> Any:
            inside = PartialUpdates(strategy_of(), average=ModelAverage(0.5))
            assert start(inside, fleet(elastic)).arrays
            return super().configure_train(*arguments)

    assert start(strategy_of(Nested), fleet(plain)).arrays


def test_a_round_of_which_a_users_strategy_makes_no_model_is_said_to_change_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Demanding(FedAvg):
        """Wants three replies, and is given one in place of all."""

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            found = list(replies)
            return super().aggregate_train(server_round, found) if len(found) == 3 else (None, None)

    assert not start(PartialUpdates(strategy_of(Demanding)), fleet(elastic)).arrays
    assert "round 1 changes nothing: aggregate_train of Demanding returned no model" in caplog.text
    assert start(PartialUpdates(strategy_of()), fleet(elastic)).arrays
    assert caplog.text.count("changes nothing") == 1


def test_a_start_that_is_not_called_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Starts(FedAvg):
        def start(self, *arguments: Any, **options: Any) -> Result:
            raise AssertionError

    PartialUpdates(strategy_of())
    assert "never called" not in caplog.text
    PartialUpdates(strategy_of(Starts))
    assert "Starts.start is never called" in caplog.text


class OtherModel(FedAvg):
    """Sends zeros."""

    def configure_train(
        self, rnd: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Any:
        zeros = {name: Array(np.zeros_like(each.numpy())) for name, each in arrays.items()}
        return super().configure_train(rnd, ArrayRecord(zeros), config, grid)


class MoreRecords(FedAvg):
    """Sends a second record of arrays."""

    def configure_train(
        self, rnd: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Any:
        for message in super().configure_train(rnd, arrays, config, grid):
            message.content["controls"] = arrays
            yield message


class SameModel(FedAvg):
    """Copies what it is given."""

    def configure_train(
        self, rnd: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Any:
        return super().configure_train(rnd, arrays.copy(), config, grid)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(OtherModel, "puts another model into"), (MoreRecords, "puts arrays, config, controls into")],
)
def test_what_a_strategy_sends_is_sent_or_refused(kind: type[FedAvg], reason: str) -> None:
    start(PartialUpdates(strategy_of(SameModel)), fleet(elastic))
    with pytest.raises(SettingError, match=reason):
        start(PartialUpdates(strategy_of(kind)), fleet(elastic))


def test_a_second_start_is_a_run_of_its_own() -> None:
    strategy = PartialUpdates(strategy_of(), average=ModelAverage())
    apps = fleet(elastic)
    for rounds in (2, 1):
        # The loss of this one is thousands of times that of the other.
        for scale in (1.0, 30.0):
            found, _ = run(strategy, apps, arrays_of(net(scale)), rounds)
            fresh = PartialUpdates(strategy_of(), average=ModelAverage())
            expected, _ = run(fresh, apps, arrays_of(net(scale)), rounds)
            assert_identical(found.arrays, expected.arrays)


MODS: dict[str, Callable[[], Mod]] = {
    "LocalDpMod": lambda: LocalDpMod(0.01, 0.0, 1.0, 1e-5),
    "fixedclipping_mod": lambda: fixedclipping_mod,
}


@pytest.mark.parametrize("app", [elastic, plain])
@pytest.mark.parametrize("mod", MODS)
def test_a_mod_that_clips_whole_models_gets_whole_models(
    mod: str, app: Callable[..., ClientApp]
) -> None:
    """Such mods take one record of arrays; the packed model and the records of both kinds are neither."""
    config = ConfigRecord({"clipping_norm": 0.01})
    records: list[RoundRecord] = []
    found, own = (
        start(
            strategy, {1: app(1, mods=[MODS[mod]()]), 2: app(2), 3: app(3)}, 2, train_config=config
        )
        for strategy in (
            PartialUpdates(strategy_of(fraction_evaluate=0.0), on_round=records.append),
            strategy_of(fraction_evaluate=0.0),
        )
    )
    assert_close(found.arrays, as_weights(own.arrays), rtol=1e-5)
    assert [len(record.accepted) for record in records] == [3, 3]


def into_the_first_record(message: Message, context: Context, call: Any) -> Message:
    reply = call(message, context)
    next(iter(reply.content.metric_records.values()))["mine"] = 2.5
    return reply


def into_its_own_record(message: Message, context: Context, call: Any) -> Message:
    reply = call(message, context)
    reply.content["mine"] = MetricRecord({"mine": 2.5})
    return reply


@pytest.mark.parametrize("mod", [into_the_first_record, into_its_own_record])
def test_metrics_that_a_mod_adds_arrive(mod: Mod) -> None:
    result = start(PartialUpdates(strategy_of()), fleet(elastic, mods=[mod]))
    assert result.train_metrics_clientapp[1]["mine"] == pytest.approx(2.5)
    assert result.evaluate_metrics_clientapp[1]["mine"] == pytest.approx(2.5)


def weighs_itself(weight: float) -> Mod:
    def mod(message: Message, context: Context, call: Any) -> Message:
        reply = call(message, context)
        reply.content["mine"] = MetricRecord({"mine": weight})
        return reply

    return mod


def test_elastic_clients_weigh_as_the_strategy_says() -> None:
    weights = {1: 6, 2: 3, 3: 1}
    found, own = (
        start(
            strategy_around(strategy_of(weighted_by_key="mine", fraction_evaluate=0.0)),
            {node: app_of(node) for node in NODES},
        )
        for strategy_around, app_of in (
            (PartialUpdates, lambda node: elastic(node, [weighs_itself(weights[node])])),
            (lambda inner: inner, lambda node: plain(node, lambda _: {"mine": weights[node]})),
        )
    )
    assert_close(found.arrays, as_weights(own.arrays))


def test_a_weight_that_is_no_whole_number_is_refused() -> None:
    records: list[RoundRecord] = []
    strategy = PartialUpdates(strategy_of(weighted_by_key="mine"), on_round=records.append)
    result = start(strategy, {1: elastic(1, [weighs_itself(0.5)]), 2: elastic(2), 3: elastic(3)})
    (refused,) = records[0].rejected
    assert refused.reason == "mine is 0.5, expected a whole number from 1 to 100000000"
    assert "mine" not in result.evaluate_metrics_clientapp[1]


def test_settings_that_are_not_sent_are_named(caplog: pytest.LogCaptureFixture) -> None:
    config = ConfigRecord({"lr": [0.1], "local-epochs": 1})
    start(PartialUpdates(strategy_of()), fleet(elastic), 2, train_config=config)
    assert caplog.text.count("are not sent to an ElasticClient") == 1
    assert "single values: lr" in caplog.text


def test_settings_under_names_that_no_client_reads_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = ConfigRecord({"local_epochs": 2, "local-epochs": 1, "mine_own": 1})
    start(PartialUpdates(strategy_of()), fleet(elastic), 2, train_config=config)
    assert caplog.text.count("does not read setting") == 1
    assert "'local_epochs': did you mean 'local-epochs'?" in caplog.text


class TrainsTwo(FedAvg):
    """Never asks node 3 to train."""

    def configure_train(self, *arguments: Any) -> Any:
        messages = super().configure_train(*arguments)
        return [each for each in messages if each.metadata.dst_node_id != 3]


def test_a_plain_client_that_is_never_trained_is_evaluated() -> None:
    apps = {
        1: plain(1),
        2: plain(2),
        3: plain(3, tested={"eval_loss": 9.0, "num-examples": 10}),
    }
    for kind, rounds in ((TrainsTwo, 2), (FedAvg, 1)):
        fraction = {"fraction_train": 0.0} if kind is FedAvg else {}
        result = start(PartialUpdates(strategy_of(kind, **fraction)), apps, rounds)
        metrics = result.evaluate_metrics_clientapp
        assert [each["eval_loss"] for each in metrics.values()] == [pytest.approx(9.5 / 3)] * rounds


def test_a_client_that_cannot_be_evaluated_is_asked_twice_and_keeps_its_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_: Context) -> ElasticClient:
        raise ZeroDivisionError("no disk")

    inner = strategy_of(fraction_train=0.0)
    apps = {1: elastic(1), 2: elastic_client_app(broken), 3: elastic(3)}
    result, grid = run(PartialUpdates(inner), apps, arrays_of(net()))
    assert [message.metadata.dst_node_id for message in grid.sent].count(2) == 2
    assert len(grid.sent) == 4
    assert "node 2: ZeroDivisionError('no disk')" in caplog.text
    assert result.evaluate_metrics_clientapp[1]["loss"] > 0


def test_a_legacy_client_that_reports_a_failure_is_not_merged() -> None:
    class Fails(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            raise AssertionError

    def fit(asked: FitIns) -> FitRes:
        # The packed model is one array.
        assert len(asked.parameters.tensors) == 6
        status = Status(Code.FIT_NOT_IMPLEMENTED, "nothing to train on")
        return FitRes(status, asked.parameters, 100, {})

    def failing(_: Context) -> Any:
        client = Fails().to_client()
        client.fit = fit  # type: ignore[method-assign]
        return client

    records: list[RoundRecord] = []
    strategy = PartialUpdates(strategy_of(), on_round=records.append)
    start(strategy, {1: elastic(1), 2: ClientApp(failing), 3: elastic(3)})
    (refused,) = records[0].rejected
    assert refused.reason == "client reports failure: nothing to train on"


def test_strategies_that_know_each_other_are_each_seen_once() -> None:
    inner = strategy_of()
    around = Around(inner)
    inner.owner, inner.itself = around, inner
    assert chain(around) == [around, inner]


class OneOf(Around):
    """A wrapper that holds two strategies, such as one for the first rounds and one for the rest."""

    def __init__(self, first: Any, base: Strategy) -> None:
        self.first = first
        super().__init__(base)


@pytest.mark.parametrize("held", [lambda each: each, lambda each: [each], lambda each: {1: each}])
def test_each_of_the_strategies_that_a_wrapper_holds_is_seen(held: Callable[..., Any]) -> None:
    for others in ((FedAvg(), FedMedian()), (FedMedian(), FedAvg())):
        with pytest.raises(SettingError, match="FedMedian is not a linear mean"):
            PartialUpdates(OneOf(held(others[0]), others[1]))
    with pytest.raises(SettingError, match="by different metrics, mine and num-examples"):
        PartialUpdates(OneOf(held(FedAvg(weighted_by_key="mine")), FedAvg()))


def test_metrics_of_all_clients_are_merged_by_whichever_strategy_is_used() -> None:
    def seen(records: list[RecordDict], key: str) -> MetricRecord:
        return MetricRecord({"clients": len(records)})

    wrapper = OneOf(strategy_of(), strategy_of(train_metrics_aggr_fn=seen))
    result = start(PartialUpdates(wrapper), fleet(elastic))
    assert result.train_metrics_clientapp[1]["clients"] == 3


def test_a_checkpoint_is_written_of_strategies_that_know_each_other(tmp_path: Path) -> None:
    def around() -> Around:
        inner = strategy_of(FedAvgM, server_momentum=0.9)
        inner.owner = Around(inner)  # type: ignore[attr-defined]
        return inner.owner  # type: ignore[attr-defined,no-any-return]

    apps = fleet(elastic)
    whole = start(PartialUpdates(around()), apps, 3)
    start(Checkpointed(PartialUpdates(around()), tmp_path), apps, 1)
    resumed = start(Checkpointed(PartialUpdates(around()), tmp_path), apps, 3)
    assert_identical(resumed.arrays, whole.arrays)


def test_a_second_answer_to_an_evaluation_is_dropped() -> None:
    """A grid may give an answer twice, or one of a node that was not asked."""

    class Twice:
        sent_bytes: ClassVar = {1: 10}

        def whole_again(self, nodes: Any) -> list[Message]:
            assert list(nodes) == [1]
            return [answer(1), answer(1), answer(2)]

    def answer(node: int, error: Error | None = None) -> Message:
        asked = Message(RecordDict(), node, "evaluate")
        return Message(error, reply_to=asked) if error else Message(RecordDict(), reply_to=asked)

    # Sets the run that Flower's messages need.
    InProcessGrid(1, ClientApp())
    failed = answer(1, Error(RAISED, "cannot read it"))
    (kept,) = asked_again([failed], cast(Any, Twice()), StockClients())
    assert kept.metadata.src_node_id == 1 and not kept.has_error()
