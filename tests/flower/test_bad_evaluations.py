"""A bad reply to an evaluation costs the round that reply and nothing else."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord
from flwr.serverapp.strategy import Result
from scripted_clients import EXAMPLES, first_arrays, manifest, scripts
from small_federation import (
    Alter,
    arrays_of,
    elastic_client,
    legacy_app,
    quiet,
    run,
    scripted_app,
)
from small_models import conv_net

from fl_elastic.flower import PartialUpdates, elastic_client_app
from fl_elastic.flower.records import ERROR

BAD = 3


def with_record(name: str, record: Any) -> Alter:
    def alter(reply: Message) -> Message:
        reply.content[f"evaluateres.{name}"] = record
        return reply

    return alter


def without(*records: str) -> Alter:
    def alter(reply: Message) -> Message:
        for name in records:
            del reply.content[f"evaluateres.{name}"]
        return reply

    return alter


def examples(count: Any) -> Alter:
    return with_record("num_examples", MetricRecord({"num_examples": count}))


def loss(value: Any) -> Alter:
    return with_record("loss", MetricRecord({"loss": value}))


def failed(reply: Message) -> Message:
    answered = Message(Error(code=2, reason="boom"), reply_to=reply)
    answered.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
    return answered


REPLIES: dict[str, tuple[Alter, str]] = {
    **{
        f"no {name}": (without(name), f"has no record 'evaluateres.{name}'")
        for name in ("loss", "num_examples", "metrics", "status")
    },
    "nothing": (without("loss", "num_examples", "metrics", "status"), "has no record"),
    "loss NaN": (loss(float("nan")), "loss must be finite"),
    "loss infinite": (loss(float("inf")), "loss must be finite"),
    "several losses": (loss([1.0, 2.0]), "loss must be finite"),
    "no example": (examples(0), "num_examples is 0"),
    "negative examples": (examples(-7), "num_examples is -7"),
    "absurd examples": (examples(10**15), "num_examples is 1000000000000000"),
    "examples a fraction": (examples(7.5), "num_examples is 7.5"),
    "a list of examples": (examples([7]), "num_examples is [7]"),
    "reported failure": (
        with_record("status", ConfigRecord({"code": 5, "message": "no\nmemory"})),
        "client reports failure: no memory",
    ),
    "own words": (
        with_record("metrics", ConfigRecord({ERROR: "no test\ndata " + "x" * 10_000})),
        "client could not evaluate: no test data xx",
    ),
}


def evaluated(nodes: tuple[int, ...], alter: Alter = lambda reply: reply) -> Result:
    by_node = scripts()
    apps = {
        index: scripted_app(manifest(), by_node[node]) for index, node in enumerate(nodes, start=1)
    }
    strategy = PartialUpdates(quiet(nodes=len(nodes), fraction_evaluate=1.0))

    def evaluations_only(reply: Message) -> Message:
        return alter(reply) if reply.metadata.message_type == "evaluate" else reply

    return run(strategy, apps, first_arrays(), 2, evaluations_only)[0]


def trained_on_all_evaluated_by_good() -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of both rounds, with the evaluations of node 3 taken out by hand."""
    everyone: dict[str, dict[int, list[float]]] = {"loss": {}, "accuracy": {}}
    metrics: list[dict[str, float]] = []

    def keep(reply: Message) -> Message:
        node = reply.metadata.src_node_id
        for name, record in (("loss", "loss"), ("accuracy", "metrics")):
            value = reply.content[f"evaluateres.{record}"][name]
            everyone[name].setdefault(node, []).append(value)
        return reply

    evaluated((1, 2, 3, 4), keep)
    for index in range(2):
        good = [node for node in EXAMPLES if node != BAD]
        total = sum(EXAMPLES[node] for node in good)
        metrics.append({
            name: sum(EXAMPLES[node] * values[node][index] for node in good) / total
            for name, values in everyone.items()
        })  # fmt: skip
    return metrics[0], metrics[1]


def test_a_whole_number_of_examples_counts_as_a_float_too() -> None:
    def as_floats(reply: Message) -> Message:
        count = reply.content["evaluateres.num_examples"]["num_examples"]
        return examples(float(count))(reply)

    expected, found = evaluated((1, 2, 3, 4)), evaluated((1, 2, 3, 4), as_floats)
    assert found.evaluate_metrics_clientapp[2] == expected.evaluate_metrics_clientapp[2]
    assert len(found.evaluate_metrics_clientapp[2]) == 2


@pytest.mark.parametrize("name", [*REPLIES, "raised"])
def test_a_bad_reply_is_named_and_left_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    alter, reason = REPLIES.get(name, (failed, ""))
    result = evaluated(
        (1, 2, 3, 4),
        lambda reply: alter(reply) if reply.metadata.src_node_id == BAD else reply,
    )
    assert len(result.evaluate_metrics_clientapp) == 2
    for number, expected in enumerate(trained_on_all_evaluated_by_good(), start=1):
        assert dict(result.evaluate_metrics_clientapp[number]) == pytest.approx(expected)
    if name != "raised":
        lines = [
            record.getMessage()
            for record in caplog.records
            if record.name == "fl_elastic" and record.levelno == logging.WARNING
        ]
        assert len(lines) == 2
        for line in lines:
            assert line.startswith(f"evaluation by node {BAD} left out: ")
            assert reason in line
            assert "\n" not in line
            assert len(line) < 600


@pytest.mark.parametrize("name", ["nothing", "loss NaN", "raised"])
def test_bad_replies_only_give_no_metrics_and_no_error(name: str) -> None:
    result = evaluated((1, 2, 3, 4), REPLIES.get(name, (failed, ""))[0])
    assert result.evaluate_metrics_clientapp == {}
    assert result.arrays


def test_odd_metrics_are_left_out_of_the_mean(caplog: pytest.LogCaptureFixture) -> None:
    odd: dict[int, dict[str, Any]] = {
        1: {"accuracy": 0.1, "note": "text"},
        2: {"accuracy": 0.2, "f1": 0.5, "loss": 77.0},
        3: {"accuracy": 0.3, "f1": float("nan"), "num-examples": 10**6},
        4: {"accuracy": 0.4, "f1": 0.5, "flag": True, "list": [1.0]},
    }

    def alter(reply: Message) -> Message:
        metrics = ConfigRecord(odd[reply.metadata.src_node_id])
        return loss(2.0)(with_record("metrics", metrics)(reply))

    found = dict(evaluated((1, 2, 3, 4), alter).evaluate_metrics_clientapp[1])
    total = sum(EXAMPLES.values())
    accuracy = sum(EXAMPLES[node] * odd[node]["accuracy"] for node in EXAMPLES) / total
    # Of two clients.
    assert found == {
        "accuracy": pytest.approx(accuracy), "loss": pytest.approx(2.0), "f1": pytest.approx(0.5),
        "f1-clients": pytest.approx(2),
    }  # fmt: skip
    for node, name in ((1, "note"), (3, "f1"), (4, "flag"), (4, "list")):
        assert f"evaluation by node {node}: metrics left out: " in caplog.text
        assert f"{name!r} (no finite number)" in caplog.text


def claiming(node: int, **claims: Any) -> Alter:
    """Let a node say something else of its test; the others say that half is right."""

    def alter(reply: Message) -> Message:
        said = {"accuracy": 0.5, "loss": 0.7, "count": 100}
        if reply.metadata.src_node_id == node:
            said |= claims
        reply = with_record("metrics", ConfigRecord({"accuracy": said["accuracy"]}))(reply)
        return loss(said["loss"])(examples(said["count"])(reply))

    return alter


@pytest.mark.parametrize(
    "claims", [{"count": 10**8, "accuracy": 1.0}, {"count": 10**8, "loss": 100.0}]
)
def test_claimed_examples_do_not_outvote_the_others(
    claims: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fl_elastic")
    found = dict(evaluated((1, 2, 3, 4), claiming(3, **claims)).evaluate_metrics_clientapp[1])
    # One of four counts as two at most, and an honest one hears of it.
    (line,) = {each for each in caplog.messages if "examples count as" in each}
    assert line.startswith(f"evaluation by node 3: {10**8} examples count as 200, ")
    said = {"accuracy": 0.5, "loss": 0.7} | claims
    assert found["accuracy"] == pytest.approx((3 * 0.5 + 2 * said["accuracy"]) / 5)
    assert found["loss"] == pytest.approx((3 * 0.7 + 2 * said["loss"]) / 5)


@pytest.mark.parametrize(
    "claims", [{"accuracy": -5.0}, {"accuracy": 1e307}, {"accuracy": 1.01}, {"loss": 1e30}, {"loss": -1e9}]
)  # fmt: skip
def test_numbers_that_cannot_be_are_left_out_and_named(
    claims: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    found = dict(evaluated((1, 2, 3, 4), claiming(3, **claims)).evaluate_metrics_clientapp[1])
    assert found == {"accuracy": pytest.approx(0.5), "loss": pytest.approx(0.7)}
    (name,) = claims
    assert f"evaluation by node 3 left out: {name} is" in caplog.text


def test_percentages_and_losses_of_any_sign_are_believed_where_they_are_what_all_say() -> None:
    def alter(reply: Message) -> Message:
        node = reply.metadata.src_node_id
        reply = with_record("metrics", ConfigRecord({"accuracy": 40.0 + 10 * node}))(reply)
        return loss(-1000.0 * node)(examples(100)(reply))

    found = dict(evaluated((1, 2, 3, 4), alter).evaluate_metrics_clientapp[1])
    assert found == {"accuracy": pytest.approx(65.0), "loss": pytest.approx(-2500.0)}


@pytest.mark.parametrize("message_api", [False, True], ids=["legacy", "message"])
def test_a_client_without_test_data_says_so(
    message_api: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def without_test_data() -> Any:
        client = elastic_client(conv_net("none"), 1)
        client.test_loader = []
        return client

    bad = (
        elastic_client_app(lambda context: without_test_data())
        if message_api
        else legacy_app(without_test_data)
    )
    good = {node: legacy_app(lambda node=node: elastic_client(conv_net("none"), node))
            for node in (1, 2)}  # fmt: skip
    strategy = PartialUpdates(quiet(nodes=3, fraction_evaluate=1.0))
    result, _ = run(strategy, {**good, 3: bad}, arrays_of(conv_net("none")))
    assert 0 <= result.evaluate_metrics_clientapp[1]["accuracy"] <= 1
    assert "evaluation by node 3 left out: client could not evaluate" in caplog.text
