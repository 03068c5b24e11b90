"""How PartialUpdates treats what it is given: config, messages, replies, metrics."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedProx, Result
from in_process_grid import InProcessGrid
from scripted_clients import EXAMPLES, TRAINED, first_arrays, first_weights, manifest, scripts
from small_federation import as_weights, assert_close, assert_identical, quiet, run, scripted_app

from fl_elastic.errors import ElasticError, RegistryError, UpdateError
from fl_elastic.flower import Checkpointed, PartialUpdates, RoundRecord
from fl_elastic.flower.records import PACKED, evaluate_reply, read_instruction
from fl_elastic.update.checks import Limits
from fl_elastic.update.manifest import Role
from fl_elastic.update.model_wire import decode_weights


def apps(codec: str = "fp32") -> dict[int, Any]:
    return {node: scripted_app(manifest(), update, codec) for node, update in scripts().items()}


def grid() -> InProcessGrid:
    return InProcessGrid(len(EXAMPLES), apps().__getitem__)


def test_the_callers_config_stays_as_it_was() -> None:
    config = ConfigRecord({"local-epochs": 2, "sizes": [1, 2]})
    before = dict(config)
    strategy = PartialUpdates(quiet(FedProx, proximal_mu=0.5, fraction_evaluate=1.0))
    run(strategy, apps(), first_arrays(), 2, train_config=config, evaluate_config=config)
    assert dict(config) == before


def test_the_callers_arrays_stay_as_they_were() -> None:
    arrays = first_arrays()
    run(PartialUpdates(quiet()), apps(), arrays, 2)
    assert_identical(arrays, first_arrays())


@pytest.mark.parametrize("damaged", [False, True])
def test_a_reply_lets_go_of_its_arrays_once_it_is_read(damaged: bool) -> None:
    arrived: list[RecordDict] = []

    def alter(reply: Message) -> Message:
        if damaged:
            del reply.content["fitres.status"]
        arrived.append(reply.content)
        return reply

    run(PartialUpdates(quiet()), apps(), first_arrays(), 1, alter)
    records = [record for content in arrived for record in content.array_records.values()]
    assert len(records) == len(EXAMPLES)
    assert all(len(record) == 0 for record in records)


def test_scalars_of_the_config_arrive_and_lists_do_not() -> None:
    config = ConfigRecord({"local-epochs": 2, "note": "text", "sizes": [1, 2], "raw": b"1"})
    messages = PartialUpdates(quiet()).configure_train(5, first_arrays(), config, grid())
    _, seen = read_instruction("train", next(iter(messages)).content)
    assert seen == {
        "local-epochs": 2, "note": "text", "raw": b"1",
        "server-round": 5, "server_round": 5, PACKED: True,
    }  # fmt: skip


class Looks(FedAvg):
    """Averages as ever, and keeps the models that it is given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.given: list[set[str]] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        self.given += [set(reply.content.array_records["arrays"]) for reply in replies]
        return super().aggregate_train(server_round, replies)


def test_a_strategy_that_looks_at_the_model_gets_all_of_it() -> None:
    plain, _ = run(PartialUpdates(quiet()), apps(), first_arrays(), 3)
    looking = quiet(Looks)
    seen, _ = run(PartialUpdates(looking), apps(), first_arrays(), 3)
    assert_identical(plain.arrays, seen.arrays)
    assert plain.train_metrics_clientapp == seen.train_metrics_clientapp
    parameters = {n for n in manifest().names if manifest().role(n) is Role.PARAMETER}
    assert looking.given == [parameters] * 3
    # Nor is one left out that was only given another method.
    patched, own = quiet(), looking.given
    patched.aggregate_train = lambda *a, **k: Looks.aggregate_train(looking, *a, **k)
    run(PartialUpdates(patched), apps(), first_arrays(), 1)
    assert own[3:] == [parameters]


class Weighs(FedAvg):
    """Weights each client alike, under names of its own for the arguments that Flower gives by position."""

    def configure_train(self, rnd: int, model: ArrayRecord, settings: Any, fleet: Any) -> Any:
        return super().configure_train(rnd, model, settings, fleet)

    def aggregate_train(self, rnd: int, results: Iterable[Message]) -> Any:
        results = list(results)
        for message in results:
            for record in message.content.metric_records.values():
                record["num-examples"] = 1
        return super().aggregate_train(rnd, results)

    def configure_evaluate(self, rnd: int, model: ArrayRecord, settings: Any, fleet: Any) -> Any:
        return super().configure_evaluate(rnd, model, settings, fleet)

    def aggregate_evaluate(self, rnd: int, results: Iterable[Message]) -> Any:
        return super().aggregate_evaluate(rnd, results)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_strategy_that_looks_at_single_replies_is_told_what_it_gets(
    checkpointed: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plain, _ = run(PartialUpdates(quiet(fraction_evaluate=1.0)), apps(), first_arrays())
    assert "aggregate_train of" not in caplog.text
    wrapped: Any = PartialUpdates(quiet(Weighs, fraction_evaluate=1.0))
    assert caplog.text.count("aggregate_train of Weighs is given one reply") == 1
    strategy = Checkpointed(wrapped, tmp_path) if checkpointed else wrapped
    found, _ = run(strategy, apps(), first_arrays())
    assert_identical(plain.arrays, found.arrays)
    assert plain.evaluate_metrics_clientapp == found.evaluate_metrics_clientapp


class OwnConfigs(FedAvg):
    """Gives each node a content of its own."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        for node in grid.get_node_ids():
            content = RecordDict({"arrays": arrays, "config": ConfigRecord({"node": node})})
            yield Message(content, message_type="train", dst_node_id=node)


def test_messages_with_a_config_of_their_own_keep_it() -> None:
    strategy = PartialUpdates(OwnConfigs(fraction_evaluate=0.0))
    messages = list(strategy.configure_train(1, first_arrays(), ConfigRecord(), grid()))
    seen = {
        message.metadata.dst_node_id: read_instruction("train", message.content)[1]["node"]
        for message in messages
    }
    assert seen == {node: node for node in EXAMPLES}


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_the_model_travels_as_one_array(kind: str) -> None:
    strategy = PartialUpdates(quiet(fraction_evaluate=1.0))
    _, sent = run(strategy, apps(), first_arrays())
    contents = [m.content for m in sent.sent if m.metadata.message_type == kind]
    assert len(contents) == len(EXAMPLES)
    for content in contents:
        (record,) = content.array_records.values()
        assert len(record) == 1
        arrays, _ = read_instruction(kind, content)
        assert arrays[0].dtype == "V1"
        assert arrays[0].ndim == 1
        weights, version = decode_weights(arrays[0].tobytes(), manifest())
        # What evaluation sees is the model that the next round trains from.
        assert version == {"train": 1, "evaluate": 2}[kind]
        if kind == "train":
            assert_close(weights, first_weights(), rtol=0, atol=0)


def test_half_precision_saves_half_the_downlink() -> None:
    sizes, results = {}, {}
    for codec in ("fp32", "fp16"):
        records: list[RoundRecord] = []
        strategy = PartialUpdates(quiet(), codec=codec, on_round=records.append)
        results[codec], _ = run(strategy, apps(codec), first_arrays(), 2)
        sizes[codec] = records[0].downlink_bytes
    values = sum(array.size for array in first_weights().values())
    assert sizes["fp32"] - sizes["fp16"] == 2 * values
    exact, halved = (as_weights(results[codec].arrays) for codec in ("fp32", "fp16"))
    assert {array.dtype for array in halved.values()} == {np.dtype(np.float32)}
    for name, array in exact.items():
        np.testing.assert_allclose(halved[name], array, atol=5e-3, err_msg=name)
    assert any(halved[name].tobytes() != array.tobytes() for name, array in exact.items())


def test_an_unknown_downlink_codec_is_refused_before_the_first_round() -> None:
    with pytest.raises(RegistryError, match="unknown codec 'fp8'"):
        PartialUpdates(quiet(), codec="fp8")


class Reordered(InProcessGrid):
    """Hands over replies in another order, or one by one."""

    def __init__(self, arrange: Callable[[list[Message]], Iterable[Message]]) -> None:
        super().__init__(len(EXAMPLES), apps().__getitem__)
        self._arrange = arrange

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        replies.sort(key=lambda reply: reply.metadata.src_node_id)
        return self._arrange(replies)


def arranged(arrange: Callable[[list[Message]], Iterable[Message]], rounds: int = 2) -> Result:
    strategy = PartialUpdates(quiet(fraction_evaluate=1.0))
    return strategy.start(Reordered(arrange), first_arrays(), num_rounds=rounds)


def test_the_order_of_replies_does_not_matter() -> None:
    reference = arranged(lambda replies: replies)
    for order in itertools.permutations(range(len(EXAMPLES))):
        found = arranged(lambda replies, order=order: [replies[index] for index in order])
        assert_identical(found.arrays, reference.arrays)
        assert found.train_metrics_clientapp == reference.train_metrics_clientapp
        assert found.evaluate_metrics_clientapp == reference.evaluate_metrics_clientapp


def test_the_order_does_not_matter_for_clients_that_agree() -> None:
    """Replies with equal arrays are told apart by what else they say."""

    def evaluations(order: list[int]) -> MetricRecord | None:
        strategy = PartialUpdates(quiet(fraction_evaluate=1.0))
        messages = list(strategy.configure_evaluate(1, first_arrays(), ConfigRecord(), grid()))
        generator = random.Random(3)
        contents = [
            {"loss": generator.random(), "num_examples": generator.randrange(1, 999)}
            for _ in messages
        ]
        replies = [
            Message(
                RecordDict(
                    {
                        "evaluateres.loss": MetricRecord({"loss": contents[index]["loss"]}),
                        "evaluateres.num_examples": MetricRecord(
                            {"num_examples": contents[index]["num_examples"]}
                        ),
                        "evaluateres.metrics": ConfigRecord({}),
                        "evaluateres.status": ConfigRecord({"code": 0, "message": ""}),
                    }
                ),
                reply_to=messages[0],
            )
            for index in order
        ]
        return strategy.aggregate_evaluate(1, replies)

    found = {str(evaluations(list(order))) for order in itertools.permutations(range(4))}
    assert len(found) == 1


def test_no_accuracy_is_averaged_in_for_a_client_that_computed_none() -> None:
    strategy = PartialUpdates(quiet(fraction_evaluate=1.0))
    messages = list(strategy.configure_evaluate(1, first_arrays(), ConfigRecord(), grid()))
    told: list[dict[str, float]] = [{"accuracy": 0.9, "f1": 0.5}, {"f1": 0.7}]
    replies = [
        Message(evaluate_reply(1.0, 10, metrics), reply_to=message)
        for metrics, message in zip(told, messages, strict=False)
    ]
    found = strategy.aggregate_evaluate(1, replies)
    assert found is not None and dict(found) == {
        "f1": pytest.approx(0.6), "loss": 1.0, "accuracy": pytest.approx(0.9), "accuracy-clients": 1,
    }  # fmt: skip


def test_the_inner_strategy_may_return_a_generator_of_messages() -> None:
    class Lazy(FedAvg):
        def configure_train(self, *arguments: Any, **options: Any) -> Iterable[Message]:
            yield from super().configure_train(*arguments, **options)

    result, _ = run(PartialUpdates(Lazy(fraction_evaluate=0.0)), apps(), first_arrays())
    assert_identical(result.arrays, run(PartialUpdates(quiet()), apps(), first_arrays())[0].arrays)


def test_the_users_function_merges_training_metrics_of_all_clients() -> None:
    calls: list[int] = []

    def largest(records: list[RecordDict], weighted_by: str) -> MetricRecord:
        calls.append(len(records))
        return MetricRecord(
            {
                "largest": max(record["metrics"]["train-loss"] for record in records),
                "weight": sum(record["metrics"][weighted_by] for record in records),
            }
        )

    strategy = PartialUpdates(quiet(train_metrics_aggr_fn=largest))
    result, _ = run(strategy, apps(), first_arrays())
    assert dict(result.train_metrics_clientapp[1]) == {
        "largest": 1.0,
        "weight": sum(EXAMPLES.values()),
    }
    assert calls[-1] == len(EXAMPLES)


def test_the_round_record_says_who_trained_what() -> None:
    records: list[RoundRecord] = []
    run(PartialUpdates(quiet(), on_round=records.append), apps(), first_arrays(), 2)
    assert [record.server_round for record in records] == [1, 2]
    for record in records:
        by_node = {reply.node_id: reply for reply in record.accepted}
        assert {node: set(reply.steps) for node, reply in by_node.items()} == {
            node: set(names) for node, names in TRAINED.items()
        }
        assert {node: reply.num_examples for node, reply in by_node.items()} == EXAMPLES
        assert by_node[1].uplink_bytes > by_node[2].uplink_bytes > 0
        assert by_node[1].metrics == {"train-loss": 1.0 / record.server_round}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(max_examples=20), "num_examples is 30, expected 1 to 20"),
        (Limits(max_steps=2), "step count of"),
        (Limits(max_change=1e-3), "more than 0.001"),
    ],
)
def test_limits_are_the_servers_choice(limits: Limits, reason: str) -> None:
    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(), limits=limits, on_round=records.append)
    run(strategy, apps(), first_arrays())
    assert any(reason in each.reason for each in records[0].rejected)


def test_merging_before_sending_is_refused() -> None:
    with pytest.raises(UpdateError, match="before configure_train"):
        PartialUpdates(quiet()).aggregate_train(1, [])


def test_types_of_the_model_survive() -> None:
    """A model in double and half precision comes back as it went."""
    extra = {
        "double": np.full(3, 0.1, np.float64),
        "half": np.full(3, 0.1, np.float16),
        "mask": np.array([True, False]),
    }
    by_node = {node: scripted_app(manifest(extra), u) for node, u in scripts().items()}
    found = as_weights(run(PartialUpdates(quiet()), by_node, first_arrays(extra))[0].arrays)
    assert {name: found[name].dtype.name for name in extra} == {
        "double": "float64", "half": "float16", "mask": "bool",
    }  # fmt: skip
    assert found["double"].tobytes() == extra["double"].tobytes()
    assert found["mask"].tolist() == [True, False]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PartialUpdates(FedAvg), r"the strategy FedAvg is a class: give FedAvg\(\.\.\.\)"),
        (lambda: PartialUpdates("FedAvg"), "str is not a strategy of flwr.serverapp.strategy"),
        (lambda: PartialUpdates(None), "NoneType is not a strategy"),
        (lambda: PartialUpdates(object()), "object is not a strategy of flwr.serverapp.strategy"),
        (lambda: PartialUpdates(PartialUpdates(FedAvg())), "cannot be put around another PartialUpdates"),
        (lambda: PartialUpdates(Checkpointed(FedAvg(), "x")), "cannot be put around Checkpointed: use"),
        (lambda: PartialUpdates.for_unequal_devices(FedAvg), "is a class"),
        (lambda: Checkpointed(FedAvg, "x"), "is a class"),
        (lambda: Checkpointed(Checkpointed(FedAvg(), "x"), "x"), "one is enough"),
    ],
)  # fmt: skip
def test_what_is_no_strategy_is_refused_at_once(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ElasticError, match=words) as error:
        make()
    assert len(str(error.value).splitlines()) == 1
