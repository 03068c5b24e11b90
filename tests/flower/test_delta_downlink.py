"""Only what changed goes to clients that keep the model; whoever cannot use it gets the whole in the same round."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from in_process_grid import InProcessGrid
from scripted_clients import EXAMPLES, first_arrays, first_weights, manifest, scripts
from small_federation import (
    UpdateOf,
    Weights,
    as_record,
    as_weights,
    assert_identical,
    elastic_client,
    legacy_app,
    quiet,
    run,
    scripted_app,
)
from small_models import chain, loss_fn, vectors
from torch import nn

from fl_elastic.errors import StaleModelError
from fl_elastic.flower import (
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    RoundRecord,
    elastic_client_app,
)
from fl_elastic.flower.downlink import Downlink
from fl_elastic.flower.records import (
    ERROR,
    HAVE,
    PACKED,
    STALE,
    evaluate_reply,
    read_instruction,
    train_reply,
)
from fl_elastic.flower.tasks.task import config_key
from fl_elastic.update import Manifest, encode, weights_of
from fl_elastic.update.model_wire import decode_weights, encode_weights

KEEP = config_key("keep")
DELTA = RoundConfig(delta_downlink=True)
BIG = {"big": np.ones(500, np.float32)}
"""Nobody trains it, so that it is worth leaving out."""
Keep = dict[int, tuple[Weights, int]]


def keeping_app(node: int, update_of: UpdateOf, kept: Keep, claim: int | None = None) -> ClientApp:
    """A scripted client that keeps what it gets, and may claim to hold another version."""
    app = ClientApp()

    def received(kind: str, message: Message) -> tuple[Weights, int, dict[str, int]]:
        arrays, config = read_instruction(kind, message.content)
        weights, version = decode_weights(arrays[0].tobytes(), manifest(BIG), kept.get(node))
        assert config[KEEP] is True
        kept[node] = weights, version
        return weights, version, {HAVE: version if claim is None else claim}

    @app.train()
    def train(message: Message, _: object) -> Message:
        try:
            weights, version, metrics = received("train", message)
        except StaleModelError as error:
            refusal = {ERROR: str(error), STALE: True}
            return Message(train_reply([], 0, refusal), reply_to=message)
        update = update_of(weights, version)
        packed = np.frombuffer(encode(update, manifest(BIG)), dtype=np.uint8)
        reply = train_reply([packed], update.num_examples, {"train-loss": 1.0, **metrics})
        return Message(reply, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, _: object) -> Message:
        weights, _, metrics = received("evaluate", message)
        loss = float(sum(np.abs(array).sum() for array in weights.values()))
        reply = evaluate_reply(loss, EXAMPLES[node], {"accuracy": 0.5, **metrics})
        return Message(reply, reply_to=message)

    return app


def fleet(kept: Keep, claims: Mapping[int, int] | None = None) -> dict[int, ClientApp]:
    return {
        node: keeping_app(node, update, kept, (claims or {}).get(node))
        for node, update in scripts().items()
    }


def plain_fleet() -> dict[int, ClientApp]:
    return {node: scripted_app(manifest(BIG), update) for node, update in scripts().items()}


def sizes(record: RoundRecord) -> dict[int, int]:
    return {reply.node_id: reply.downlink_bytes for reply in record.accepted}


@pytest.mark.parametrize(
    ("server", "evaluating", "codec"),
    [
        (FedAvg, 0.0, "fp16"), (FedAvg, 1.0, "fp32"), (lambda **o: FedAdam(eta=0.05, **o), 1.0, "fp16"),
    ],
)  # fmt: skip
def test_the_run_is_the_same_and_fewer_bytes_go_out(
    server: Callable[..., FedAvg], evaluating: float, codec: str
) -> None:
    found, records = {}, {}
    for terms in (RoundConfig(), DELTA):
        seen: list[RoundRecord] = []
        strategy = PartialUpdates(
            server(fraction_evaluate=evaluating, min_available_nodes=4),
            config=terms, codec=codec, on_round=seen.append,
        )  # fmt: skip
        apps = fleet({}) if terms is DELTA else plain_fleet()
        found[terms], _ = run(strategy, apps, first_arrays(BIG), 4)
        records[terms] = seen
    assert_identical(found[DELTA].arrays, found[RoundConfig()].arrays)
    assert found[DELTA].evaluate_metrics_clientapp.keys() == ({1, 2, 3, 4} if evaluating else set())
    whole = [record.downlink_bytes for record in records[RoundConfig()]]
    for number, record in enumerate(records[DELTA]):
        assert record.downlink_bytes == whole[number]
        assert not record.rejected
        assert record.downlink_total_bytes == sum(sizes(record).values())
        assert all((size < whole[number]) is (number > 0) for size in sizes(record).values())
    assert all(each.downlink_total_bytes == 4 * w for each, w in
               zip(records[RoundConfig()], whole, strict=True))  # fmt: skip


def test_after_an_evaluation_there_is_next_to_nothing_to_send() -> None:
    """What the evaluation brought is what the next round trains from."""
    records: list[RoundRecord] = []
    inner = quiet(fraction_evaluate=1.0)
    kept: Keep = {}
    run(
        PartialUpdates(inner, config=DELTA, on_round=records.append),
        fleet(kept),
        first_arrays(BIG),
        3,
    )
    for record in records[1:]:
        assert max(sizes(record).values()) < 300
    assert {version for _, version in kept.values()} == {4}


def test_unchanged_tensors_do_not_travel_and_like_messages_are_one() -> None:
    kept: Keep = {}
    result, grid = run(PartialUpdates(quiet(), config=DELTA), fleet(kept), first_arrays(BIG), 2)
    second = grid.sent[4:]
    assert len({id(message.content) for message in second}) == 1
    data = read_instruction("train", second[0].content)[0][0].tobytes()
    # With "untouched" changed on the client's side, the whole no longer is the server's.
    weights, version = kept[1]
    assert version == 2
    before = {**first_weights(BIG), "untouched": np.zeros(3, np.float32)}
    with pytest.raises(StaleModelError):
        decode_weights(data, manifest(BIG), (before, 1))
    found, _ = decode_weights(data, manifest(BIG), (first_weights(BIG), 1))
    assert all(np.array_equal(found[name], weights[name]) for name in found)
    assert result.arrays


@pytest.mark.parametrize("lost", [{2}, {1, 2, 3, 4}])
def test_who_lost_the_model_gets_the_whole_in_the_same_round(lost: set[int]) -> None:
    def run_with(kept: Keep, forget: set[int]) -> tuple[Weights, list[RoundRecord]]:
        records: list[RoundRecord] = []

        def on_round(record: RoundRecord) -> None:
            records.append(record)
            if record.server_round == 2:
                for node in forget:
                    del kept[node]

        strategy = PartialUpdates(quiet(), config=DELTA, on_round=on_round)
        return as_weights(run(strategy, fleet(kept), first_arrays(BIG), 4)[0].arrays), records

    plain, _ = run_with({}, set())
    found, records = run_with({}, lost)
    assert not any(record.rejected for record in records)
    assert all(len(record.accepted) == 4 for record in records)
    third = records[2]
    for node, size in sizes(third).items():
        # The changes that were of no use were sent as well.
        assert (size > third.downlink_bytes) is (node in lost)
    assert third.downlink_total_bytes == sum(sizes(third).values())
    assert all(size < third.downlink_bytes for size in sizes(records[3]).values())
    for name, array in plain.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, err_msg=name)


def test_a_client_that_is_stale_for_ever_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    kept: Keep = {}
    apps = fleet(kept)
    stubborn = ClientApp()

    @stubborn.train()
    def train(message: Message, _: object) -> Message:
        refusal = {ERROR: "no model here\nat all", STALE: True}
        return Message(train_reply([], 0, refusal), reply_to=message)

    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(), config=DELTA, on_round=records.append)
    _, grid = run(strategy, apps | {3: stubborn}, first_arrays(BIG), 2)
    for record in records:
        assert [each.node_id for each in record.rejected] == [3]
        assert "needs the whole model: no model here at all" in record.rejected[0].reason
        assert len(record.accepted) == 3
    assert [m.metadata.dst_node_id for m in grid.sent].count(3) == 4


@pytest.mark.parametrize("claim", [-5, 0, 2, 99, 2**62])
def test_a_false_claim_costs_at_most_a_second_message(claim: int) -> None:
    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(), config=DELTA, on_round=records.append)
    found, _ = run(strategy, fleet({}, {2: claim}), first_arrays(BIG), 4)
    plain, _ = run(PartialUpdates(quiet()), plain_fleet(), first_arrays(BIG), 4)
    assert_identical(found.arrays, plain.arrays)
    assert not any(record.rejected for record in records)


def test_any_rejection_forgets_the_version() -> None:
    def spoilt(reply: Message) -> Message:
        if reply.metadata.src_node_id == 2 and "fitres.num_examples" in reply.content:
            reply.content["fitres.num_examples"]["num_examples"] = 8
        return reply

    strategy = PartialUpdates(quiet(), config=DELTA)
    run(strategy, fleet({}), first_arrays(BIG), 2, alter=spoilt)
    assert strategy.downlink.held == {1: 2, 3: 2, 4: 2}


def test_without_the_term_nobody_is_asked_to_keep() -> None:
    _, grid = run(PartialUpdates(quiet(fraction_evaluate=1.0)), plain_fleet(), first_arrays(BIG), 2)
    for message in grid.sent:
        (config,) = message.content.config_records.values()
        assert KEEP not in config


def build() -> nn.Module:
    torch.manual_seed(3)
    return chain()


@pytest.mark.parametrize("with_folder", [True, False])
def test_elastic_clients_keep_the_model_on_disk(with_folder: bool, tmp_path: Path) -> None:
    """New client objects for every message, as in deployment; one client is of the other kind of app."""

    def app(node: int) -> ClientApp:
        def client() -> ElasticClient:
            made = elastic_client(
                build(), node, policy="head",
                state_dir=tmp_path / str(node) if with_folder else None,
            )  # fmt: skip
            made.train_loader = made.test_loader = vectors(2, seed=node)
            made.loss_fn = loss_fn
            return made

        return legacy_app(client) if node == 1 else elastic_client_app(lambda _: client())

    first = weights_of(build(), Manifest.of(build()))
    found = {}
    for terms in (RoundConfig(), DELTA):
        records: list[RoundRecord] = []
        strategy = PartialUpdates(
            quiet(nodes=2, fraction_evaluate=1.0), config=terms, on_round=records.append
        )
        found[terms], _ = run(strategy, {node: app(node) for node in (1, 2)}, as_record(first), 3)
        assert not any(record.rejected for record in records)
    assert_identical(found[DELTA].arrays, found[RoundConfig()].arrays)
    assert (
        found[DELTA].evaluate_metrics_clientapp == found[RoundConfig()].evaluate_metrics_clientapp
    )
    assert all("fl_elastic.have" not in record for record in
               found[DELTA].train_metrics_clientapp.values())  # fmt: skip
    smaller = [
        size < record.downlink_bytes for record in records for size in sizes(record).values()
    ]
    assert smaller == ([False] * 2 + [True] * 4 if with_folder else [False] * 6)
    assert strategy.downlink.held == ({1: 4, 2: 4} if with_folder else {})
    if with_folder:
        # One client loses its file, another has one that is damaged.
        (tmp_path / "1" / f"model-{Manifest.of(build()).hash}.bin").unlink()
        (tmp_path / "2" / f"model-{Manifest.of(build()).hash}.bin").write_bytes(b"FLEL nothing")
        again: list[RoundRecord] = []
        strategy.on_round = again.append
        grid = InProcessGrid(2, app)
        messages = strategy.configure_train(4, found[DELTA].arrays, ConfigRecord(), grid)
        strategy.aggregate_train(4, grid.send_and_receive(messages))
        assert len(again[0].accepted) == 2
        assert not again[0].rejected


def test_a_client_that_cannot_keep_the_model_says_nothing_about_it(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    known = Manifest.of(build())
    data = [np.frombuffer(encode_weights(weights_of(build(), known), known, version=5), np.uint8)]
    for place, version in ((blocked / "state", None), (tmp_path / "state", 5)):
        made = elastic_client(build(), 1, "head", state_dir=place)
        made.train_loader = made.test_loader = vectors(2)
        assert made.fit(data, {PACKED: True, KEEP: True})[2].get(HAVE) == version
        assert made.evaluate(data, {PACKED: True, KEEP: True})[2].get(HAVE) == version
        assert HAVE not in made.fit(data, {PACKED: True})[2]


@pytest.mark.parametrize("seed", range(20))
def test_every_message_gives_the_servers_model_to_who_holds_that_version(seed: int) -> None:
    """Against a client that is always sent the whole model, over random histories, restarts and gaps."""
    draw = random.Random(seed)
    generator = np.random.default_rng(seed)
    weights = {name: generator.normal(size=3).astype(np.float32) for name in "abcde"}
    known = Manifest.of_arrays(weights)
    downlink = Downlink("fp32", changes_only=True)
    held: dict[int, tuple[Weights, int]] = {}
    for version in range(1, 15):
        weights = {name: array + np.float32(draw.random() < 0.3) for name, array in weights.items()}
        downlink.serve(weights, known, version)
        for node in draw.sample(range(4), 2):
            data = downlink.for_node(node)
            found, at = decode_weights(data, known, held.get(node))
            assert at == version
            assert all(np.array_equal(found[name], weights[name]) for name in weights)
            held[node] = found, at
            downlink.holds(node, at)
        if draw.random() < 0.3:
            stored, downlink = downlink.to_state(), Downlink("fp32", changes_only=True)
            downlink.restore(stored)
            # The same model again, from the checkpoint.
            downlink.serve(dict(weights), known, version)
            assert downlink.to_state() == stored
    assert any(len(downlink.for_node(node)) < len(downlink.whole) for node in range(4))


def test_another_model_under_the_same_number_starts_anew() -> None:
    known = manifest(BIG)
    downlink = Downlink("fp32", changes_only=True)
    downlink.serve(first_weights(BIG), known, 3)
    downlink.holds(1, 3)
    assert len(downlink.for_node(1)) < len(downlink.whole)
    other = {**first_weights(BIG), "untouched": np.zeros(3, np.float32)}
    downlink.serve(other, known, 3)
    assert downlink.for_node(1) is downlink.whole
    decoded, _ = decode_weights(downlink.for_node(1), known)
    assert np.array_equal(decoded["untouched"], other["untouched"])
