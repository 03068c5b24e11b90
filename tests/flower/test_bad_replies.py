"""One bad reply costs the round that reply and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bad_buffers import ARRAYS, BUFFERS, Damage, header
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.clientapp import ClientApp
from scripted_clients import EXAMPLES, first_arrays, manifest, scripts
from small_federation import (
    Alter,
    arrays_of,
    as_weights,
    assert_identical,
    elastic_client,
    legacy_app,
    quiet,
    run,
    scripted_app,
)
from small_models import conv_net
from torch import nn

from fl_elastic import Budget
from fl_elastic.flower import ElasticClient, PartialUpdates, RoundRecord, elastic_client_app
from fl_elastic.flower._compat import bytes_to_ndarray, ndarray_to_bytes
from fl_elastic.flower.divergence_rollback import DivergenceRollback
from fl_elastic.flower.records import ERROR

BAD = 3
"""Has 7 examples and trains two tensors."""


def packed_array(data: bytes) -> Array:
    return Array("", (), "numpy.ndarray", data)


def with_buffer(damage: Damage) -> Alter:
    def alter(reply: Message) -> Message:
        arrays = reply.content.array_records["fitres.parameters"]
        packed = bytes_to_ndarray(arrays["0"].data).tobytes()
        spoilt = np.frombuffer(damage(packed), dtype=np.uint8)
        arrays["0"] = packed_array(ndarray_to_bytes(spoilt))
        return reply

    return alter


def with_array(data: bytes) -> Alter:
    def alter(reply: Message) -> Message:
        reply.content.array_records["fitres.parameters"]["0"] = packed_array(data)
        return reply

    return alter


def with_arrays(*names: str) -> Alter:
    def alter(reply: Message) -> Message:
        good = reply.content.array_records["fitres.parameters"]["0"]
        reply.content["fitres.parameters"] = ArrayRecord(dict.fromkeys(names, good))
        return reply

    return alter


def without(*records: str) -> Alter:
    def alter(reply: Message) -> Message:
        for name in records or tuple(reply.content):
            del reply.content[name]
        return reply

    return alter


def with_record(name: str, record: Any) -> Alter:
    def alter(reply: Message) -> Message:
        reply.content[name] = record
        return reply

    return alter


def with_examples(count: Any) -> Alter:
    """Both the header and the record say it."""

    def alter(reply: Message) -> Message:
        if isinstance(count, int):
            reply = with_buffer(header(num_examples=count))(reply)
        record = MetricRecord({"num_examples": count})
        return with_record("fitres.num_examples", record)(reply)

    return alter


def failed(reason: str) -> Alter:
    def alter(reply: Message) -> Message:
        answered = Message(Error(code=2, reason=reason), reply_to=reply)
        answered.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
        return answered

    return alter


REPLIES: dict[str, tuple[Alter, str]] = {
    **{name: (with_buffer(damage), reason) for name, (damage, reason) in BUFFERS.items()},
    **{f"array: {name}": (with_array(data), reason) for name, (data, reason) in ARRAYS.items()},
    "two arrays": (with_arrays("0", "1"), "holds 2 arrays, expected one"),
    "array by another name": (with_arrays("weights"), "expected one packed buffer"),
    "no arrays": (with_record("fitres.parameters", ArrayRecord()), "holds 0 arrays"),
    "no record at all": (without(), "has no record"),
    **{
        f"no record {name}": (without(f"fitres.{name}"), f"has no record 'fitres.{name}'")
        for name in ("parameters", "num_examples", "metrics", "status")
    },
    "records of another kind": (
        with_record("fitres.parameters", ConfigRecord({"0": b"123"})),
        "has no record 'fitres.parameters'",
    ),
    "no example": (with_examples(0), "num_examples is 0"),
    "negative examples": (with_examples(-7), "num_examples is -7"),
    "absurd examples": (with_examples(10**15), "num_examples is 1000000000000000"),
    "examples a fraction": (with_examples(7.0), "num_examples must be an integer, got 7.0"),
    "examples not a number": (with_examples(float("nan")), "must be an integer, got nan"),
    "a list of examples": (with_examples([7, 7]), "must be an integer, got [7, 7]"),
    "examples under another name": (
        with_record("fitres.num_examples", MetricRecord({"examples": 7})),
        "has no record 'num_examples'",
    ),
    "reported failure": (
        with_record("fitres.status", ConfigRecord({"code": 4, "message": "no\nmemory"})),
        "client reports failure: no memory",
    ),
    "status without code": (
        with_record("fitres.status", ConfigRecord({"message": "?"})),
        "client reports failure",
    ),
    "own words": (
        with_record("fitres.metrics", ConfigRecord({ERROR: "the disk\nis full"})),
        "client could not train: the disk is full",
    ),
    "raised": (failed("ValueError: <'x'>"), "client failed: ValueError: <'x'>"),
    "raised in several lines": (failed("Traceback:\n  File x\nboom"), "client failed: Traceback:"),
    "raised at length": (failed("long " * 10_000), "client failed: long long"),
}


def merged(
    nodes: tuple[int, ...], alter: Alter = lambda reply: reply, **options: Any
) -> tuple[ArrayRecord, list[RoundRecord]]:
    records: list[RoundRecord] = []
    by_node = scripts()
    apps = {
        index: scripted_app(manifest(), by_node[node]) for index, node in enumerate(nodes, start=1)
    }
    strategy = PartialUpdates(quiet(nodes=len(nodes)), on_round=records.append, **options)
    return run(strategy, apps, first_arrays(), alter=alter)[0].arrays, records


def only_from(node: int, alter: Alter) -> Alter:
    return lambda reply: alter(reply) if reply.metadata.src_node_id == node else reply


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "fl_elastic" and record.levelno == logging.WARNING
    ]


@pytest.mark.parametrize("name", REPLIES)
def test_a_bad_reply_is_named_and_left_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    alter, reason = REPLIES[name]
    found, records = merged((1, 2, 3, 4), only_from(BAD, alter))
    assert_identical(found, merged((1, 2, 4))[0])
    (rejected,) = records[0].rejected
    assert (rejected.server_round, rejected.node_id) == (1, BAD)
    assert reason in rejected.reason
    assert len(rejected.reason) <= 503
    assert {reply.node_id for reply in records[0].accepted} == {1, 2, 4}
    (line,) = warnings_of(caplog)
    assert line == f"round 1: reply of node {BAD} left out: {rejected.reason}"
    assert "\n" not in line


def test_without_damage_all_are_merged() -> None:
    """The reference of the cases above: node 3 does make a difference."""
    found, records = merged((1, 2, 3, 4))
    without_it = as_weights(merged((1, 2, 4))[0])
    assert not records[0].rejected
    assert np.abs(as_weights(found)["scale"] - without_it["scale"]) > 1e-3


@pytest.mark.parametrize(
    "name", ["garbage", "array: an archive", "no record at all", "own words", "raised"]
)
@pytest.mark.parametrize("rounds", [1, 2])
def test_bad_replies_only_leave_the_model_as_it_is(name: str, rounds: int) -> None:
    records: list[RoundRecord] = []
    apps = {node: scripted_app(manifest(), update) for node, update in scripts().items()}
    strategy = PartialUpdates(quiet(), on_round=records.append)
    seen: list[ArrayRecord] = []
    result, _ = run(
        strategy, apps, first_arrays(), rounds, REPLIES[name][0],
        evaluate_fn=lambda _, arrays: seen.append(arrays),
    )  # fmt: skip
    assert not result.arrays
    assert len(seen) == rounds + 1
    for arrays in seen:
        assert_identical(arrays, first_arrays())
    assert [len(record.rejected) for record in records] == [len(EXAMPLES)] * rounds


def test_a_bad_round_is_followed_by_a_good_one() -> None:
    """What was left out in one round does not haunt the next."""
    apps = {node: scripted_app(manifest(), update) for node, update in scripts().items()}
    rounds_seen: set[str] = set()

    def first_round_only(reply: Message) -> Message:
        rounds_seen.add(reply.metadata.reply_to_message_id)
        return REPLIES["NaN"][0](reply) if len(rounds_seen) <= len(EXAMPLES) else reply

    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(), on_round=records.append)
    run(strategy, apps, first_arrays(), 2, first_round_only)
    assert [len(record.accepted) for record in records] == [0, 4]


ODD_METRICS: dict[int, dict[str, Any]] = {
    1: {"loss": 1.0, "note": "text", "only-here": 3},
    2: {"loss": 2.0, "list": [1, 2, 3], "bad": float("nan"), "flag": True},
    3: {"loss": 3.0, "blob": b"bytes", "bad": float("inf")},
    4: {"loss": 4.0, "num-examples": 10**6, "bad": 1.0},
}


def test_odd_metrics_do_not_end_the_round() -> None:
    def alter(reply: Message) -> Message:
        metrics = ODD_METRICS[reply.metadata.src_node_id]
        return with_record("fitres.metrics", ConfigRecord(metrics))(reply)

    apps = {node: scripted_app(manifest(), update) for node, update in scripts().items()}
    result, _ = run(PartialUpdates(quiet()), apps, first_arrays(), alter=alter)
    assert_identical(result.arrays, merged((1, 2, 3, 4))[0])
    total = sum(EXAMPLES.values())
    mean = sum(EXAMPLES[node] * ODD_METRICS[node]["loss"] for node in EXAMPLES) / total
    # Of what one client alone says, how many that were stands beside it.
    assert dict(result.train_metrics_clientapp[1]) == {
        "loss": pytest.approx(mean), "bad": pytest.approx(1.0), "bad-clients": pytest.approx(1),
        "only-here": pytest.approx(3.0), "only-here-clients": pytest.approx(1),
    }  # fmt: skip


def poisoned(kind: str) -> Callable[[], Any]:
    def client() -> Any:
        made = elastic_client(conv_net("none"), 2)
        if kind == "empty loader":
            made.train_loader = []
        else:
            made.train_loader[-1][0][0] = float("nan")
        return made

    return client


@pytest.mark.parametrize("make", [legacy_app, None], ids=["legacy", "message"])
@pytest.mark.parametrize(
    ("kind", "reason"), [("NaN batch", "the loss is nan"), ("empty loader", "gave no batch")]
)
def test_a_client_that_cannot_train_says_why(
    kind: str, reason: str, make: Callable[..., ClientApp] | None
) -> None:
    client_of = poisoned(kind)
    bad = elastic_client_app(lambda context: client_of()) if make is None else make(client_of)
    good = {node: legacy_app(lambda node=node: elastic_client(conv_net("none"), node))
            for node in (1, 2)}  # fmt: skip
    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(nodes=3), on_round=records.append)
    start = arrays_of(conv_net("none"))
    found = run(strategy, {**good, 3: bad}, start)[0].arrays
    assert_identical(found, run(PartialUpdates(quiet(nodes=2)), good, start)[0].arrays)
    (rejected,) = records[0].rejected
    assert rejected.node_id == 3
    assert rejected.reason.startswith("client could not train")
    assert reason in rejected.reason


@pytest.mark.parametrize("policy", ["full", "elastic", "tinytrain"])
@pytest.mark.parametrize("known", [False, True])
def test_a_loss_that_is_not_finite_counts_as_divergence_wherever_it_is_seen(
    known: bool, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When costs are estimated, or when they are known: then a probe, or a step, sees it first."""

    def sees(module: nn.Module, times: float) -> ElasticClient:
        client = elastic_client(module, 1, policy, budget=Budget(speedup=2.0))
        for inputs, _ in client.train_loader:
            inputs *= times
        return client

    counts: list[int] = []
    monkeypatch.setattr(
        DivergenceRollback, "jumped", lambda _, losses, diverged: counts.append(diverged) or ""
    )
    for times in (1.0, 1e38) if known else (1e38,):
        nodes = {n: legacy_app(lambda x=times: sees(conv_net("none"), x)) for n in (1, 2)}
        run(PartialUpdates(quiet(nodes=2)), nodes, arrays_of(conv_net("none")))
    assert counts[-1] == 2
