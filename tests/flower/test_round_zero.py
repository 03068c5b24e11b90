"""Round zero: a head in closed form from all clients' sums, before anybody takes a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from small_federation import (
    arrays_of,
    as_weights,
    legacy_app,
    plain_sgd,
    quiet,
    run,
)
from torch import nn

from fl_elastic import Budget
from fl_elastic.closed_form.folds import Fold
from fl_elastic.closed_form.head import closed_form_head
from fl_elastic.closed_form.head_sums import HeadSums
from fl_elastic.closed_form.head_sums_wire import decode_head_sums, encode_head_sums
from fl_elastic.errors import UpdateError
from fl_elastic.flower import (
    Checkpointed,
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    elastic_client_app,
    load_checkpoint,
)
from fl_elastic.flower.records import ERROR, train_reply
from fl_elastic.flower.round import RoundRecord
from fl_elastic.flower.round_zero import HeadCheckpoint, Solved
from fl_elastic.flower.tasks.task import TASK, config_key
from fl_elastic.flower.tasks.train import Train
from fl_elastic.losses import classification_loss
from fl_elastic.training.head_pass import head_sums
from fl_elastic.update import Manifest

RATE = config_key("rate")
TERMS = RoundConfig(read="last")
Alter = Callable[[HeadSums], HeadSums]


def build() -> nn.Module:
    """Random features that nobody trains, and a head."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


def data(node: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each of four nodes holds one class alone, around a place of its own."""
    generator = torch.Generator().manual_seed(node)
    places = torch.randn(4, 8, generator=torch.Generator().manual_seed(99)) * 3
    classes = torch.full((24,), node - 1) if node else torch.arange(40) % 4
    inputs = places[classes] + torch.randn(len(classes), 8, generator=generator)
    return list(zip(inputs.split(8), classes.split(8), strict=True))


def client(node: int) -> ElasticClient:
    return ElasticClient(
        build(),
        data(node),
        data(0),
        budget=Budget(),
        loss_fn=classification_loss,
        optimizer_fn=plain_sgd,
    )


def apps(wrap: Callable[..., ClientApp] = elastic_client_app) -> dict[int, ClientApp]:
    if wrap is legacy_app:
        return {node: legacy_app(lambda node=node: client(node)) for node in range(1, 5)}
    return {node: elastic_client_app(lambda _, node=node: client(node)) for node in range(1, 5)}


def accuracy(arrays: ArrayRecord) -> float:
    model = build()
    weights = {name: torch.from_numpy(np.array(each)) for name, each in as_weights(arrays).items()}
    model.load_state_dict(weights, strict=False)
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(dim=1) == y).sum()) for x, y in data(0))
    return right / 40


def start(
    strategy: Any, rounds: int = 0, alter: Any = None, **options: Any
) -> tuple[ArrayRecord, list[float]]:
    """The model before the first round, and the accuracy then and after each round."""
    seen: list[float] = []
    models: list[ArrayRecord] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(accuracy(arrays))
        models.append(arrays)
        return MetricRecord({"accuracy": seen[-1]})

    chosen = {"apps": apps()} | options
    run(
        strategy, chosen["apps"], arrays_of(build()), rounds,
        alter=alter or (lambda reply: reply), evaluate_fn=evaluate,
    )  # fmt: skip
    return models[0], seen


def sums_at(node: int, model: nn.Module | None = None) -> HeadSums:
    """What a client sends, in the order of nodes."""
    return head_sums(model or build(), data(node), together=8)


def changed(node: int, change: Alter) -> Callable[[Message], Message]:
    """Let one node send other sums."""
    manifest = Manifest.of(build())

    def alter(message: Message) -> Message:
        if message.metadata.src_node_id != node:
            return message
        sums = change(sums_at(node))
        packed = np.frombuffer(encode_head_sums(sums, manifest), dtype=np.uint8)
        message.content = train_reply([packed], sums.num_examples, {})
        return message

    return alter


@pytest.mark.parametrize("wrap", [elastic_client_app, legacy_app], ids=["message", "legacy"])
def test_the_head_is_there_before_anybody_took_a_step(wrap: Callable[..., ClientApp]) -> None:
    _, seen = start(PartialUpdates(quiet(), config=TERMS), rounds=2, apps=apps(wrap))
    _, without = start(PartialUpdates(quiet()), rounds=0)
    assert without[0] < 0.6
    assert seen[0] > 0.95


def test_it_is_the_head_of_all_data_together_and_nothing_else_changes() -> None:
    arrays, _ = start(PartialUpdates(quiet(), config=TERMS), rounds=0, apps=apps())
    weights, before = as_weights(arrays), as_weights(arrays_of(build()))
    together = closed_form_head(*(sums_at(n) for n in range(1, 5)))
    np.testing.assert_allclose(weights["3.weight"], together.weight, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(weights["3.bias"], together.bias, rtol=1e-3, atol=1e-4)
    for name in set(before) - {"3.weight", "3.bias"}:
        np.testing.assert_array_equal(weights[name], before[name])


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_log_says_of_how_many_classes_there_were_examples(
    share: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Each class is that of one client, and not all clients may be drawn."""
    inner = quiet(fraction_train=share)
    with caplog.at_level(logging.INFO, "fl_elastic"):
        start(PartialUpdates(inner, config=TERMS), rounds=0, apps=apps())
    asked = round(4 * share)
    assert f"from {24 * asked} examples of {asked} clients, of {asked} of 4 classes" in caplog.text


class DrawsOneTwice(FedAvg):
    """Asks the first node twice, as a strategy does that draws nodes with replacement."""

    def configure_train(self, *arguments: Any, **options: Any) -> list[Message]:
        messages = list(super().configure_train(*arguments, **options))
        first = min(messages, key=lambda each: each.metadata.dst_node_id)
        return [*messages, Message(first.content, first.metadata.dst_node_id, "train")]


@pytest.mark.parametrize("rounds", [0, 1])
def test_who_is_drawn_twice_is_asked_once(rounds: int) -> None:
    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(DrawsOneTwice), config=TERMS, on_round=records.append)
    arrays, _ = start(strategy, rounds)
    together = closed_form_head(*(sums_at(n) for n in range(1, 5)))
    weights = as_weights(arrays)
    np.testing.assert_allclose(weights["3.weight"], together.weight, rtol=1e-3, atol=1e-4)
    for record in records:
        assert sorted(each.node_id for each in record.accepted) == [1, 2, 3, 4]
        assert not record.rejected


@pytest.mark.parametrize("timed", [False, True])
def test_examples_whose_class_is_ignored_stand_for_nobody(timed: bool) -> None:
    """Only the classes that count of node 2 weigh against the others, whatever its number of rows."""
    left = [(x, torch.where(torch.arange(8) < 2, y, -100)) for x, y in data(2)]
    own = client(2)
    # Each batch is another size of the same: a pass may be cut short.
    own.train_loader, own.budget = left, Budget(deadline=1e-9) if timed else Budget()
    fleet = apps() | {2: elastic_client_app(lambda _: own)}
    arrays, _ = start(PartialUpdates(quiet(), config=TERMS), apps=fleet)
    theirs = head_sums(build(), left[:1] if timed else left, together=8)
    # All 24 rows have six classes that count.
    sums = [theirs.times(3.0 if timed else 1.0) if n == 2 else sums_at(n) for n in range(1, 5)]
    seen = (3 * 24 + theirs.num_examples) / (3 * 24 + 6)
    expected = closed_form_head(*(each.times(seen) for each in sums))
    weights = as_weights(arrays)
    np.testing.assert_allclose(weights["3.weight"], expected.weight, rtol=1e-3, atol=1e-4)


def scaled(factor: float, of: str) -> Alter:
    def change(sums: HeadSums) -> HeadSums:
        if of == "features":
            by = np.append(np.full(len(sums.means), factor), 1.0)
            return HeadSums(
                sums.weight,
                sums.rest_products * np.outer(by, by),
                sums.rest_targets * by[:, None],
                sums.rest_squares,
                True,
                tuple(Fold(fold.rows * by, fold.targets, fold.squares) for fold in sums.folds),
            )
        return sums.times(factor)

    return change


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_who_is_unlike_the_others_is_left_out_and_named(
    factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fl_elastic")
    arrays, _ = start(
        PartialUpdates(quiet(), config=TERMS), alter=changed(2, scaled(factor, "features"))
    )
    others = closed_form_head(*(sums_at(n) for n in (1, 3, 4)))
    np.testing.assert_allclose(as_weights(arrays)["3.weight"], others.weight, rtol=1e-3, atol=1e-4)
    assert "node 2 is left out" in caplog.text and "of 3 clients" in caplog.text


def test_claimed_examples_do_not_outvote_the_others() -> None:
    arrays, seen = start(
        PartialUpdates(quiet(), config=TERMS), alter=changed(2, scaled(1e6, "everything"))
    )
    expected = closed_form_head(*(sums_at(n) for n in range(1, 5)))
    np.testing.assert_allclose(
        as_weights(arrays)["3.weight"], expected.weight, rtol=1e-3, atol=1e-4
    )
    assert seen[0] > 0.95


def test_a_deadline_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = client(1)
    slow.budget = Budget(deadline=1e-9)
    from flwr.app import ConfigRecord

    from fl_elastic.flower.records import instruction, read_instruction
    from fl_elastic.update import weights_of
    from fl_elastic.update.model_wire import encode_weights

    manifest = Manifest.of(build())
    packed = encode_weights(weights_of(build(), manifest), manifest, version=0)
    content = instruction("train", packed, ConfigRecord({TASK: "solve-head"}))
    arrays, config = read_instruction("train", content)
    reply, examples, _ = slow.fit(arrays, config)
    assert decode_head_sums(reply[0].tobytes(), manifest).num_examples == 8
    assert examples == 24


@pytest.mark.parametrize(("claim", "counted"), [(24, 24), (8, 8), (7, 8), (10**7, 24), (10**15, 8)])
def test_who_had_no_time_for_all_of_its_data_counts_as_if_it_had(claim: int, counted: int) -> None:
    """Otherwise slow devices would count less, and their data with them; nobody counts as a whole fleet."""
    part = head_sums(build(), data(2)[:1], together=8)

    def alter(message: Message) -> Message:
        if message.metadata.src_node_id == 2:
            packed = np.frombuffer(encode_head_sums(part, Manifest.of(build())), dtype=np.uint8)
            message.content = train_reply([packed], claim, {})
        return message

    arrays, _ = start(PartialUpdates(quiet(), config=TERMS), alter=alter)
    seen = (3 * 24 + 8) / (3 * 24 + counted)
    sums = [
        part.times(seen * counted / 8) if n == 2 else sums_at(n).times(seen) for n in range(1, 5)
    ]
    expected = closed_form_head(*sums)
    weights = as_weights(arrays)
    np.testing.assert_allclose(weights["3.weight"], expected.weight, rtol=1e-3, atol=1e-4)


def models_of(rounds: int, terms: RoundConfig, **options: Any) -> tuple[PartialUpdates, list[Any]]:
    """Run with real clients; return the strategy and the records of its rounds."""
    records: list[Any] = []
    strategy = PartialUpdates(quiet(), config=terms, on_round=records.append)
    start(strategy, rounds, **options)
    return strategy, records


def test_nobody_trains_the_head_until_it_is_solved_for_again() -> None:
    strategy, records = models_of(5, RoundConfig(read="last", solve_every=2))
    assert [(each.server_round, each.trains) for each in records] == [
        (0, False), (1, True), (2, True), (2, False), (3, True), (4, True), (4, False), (5, True),
        (5, False),
    ]  # fmt: skip
    trained = {
        name for each in records if each.trains for one in each.accepted for name in one.steps
    }
    assert trained == {"0.weight", "0.bias", "1.weight", "1.bias"}
    # What is handed out is the model of the last round, with the head that fits its features.
    model = build()
    weights = {name: torch.from_numpy(each) for name, each in strategy.solved.weights.items()}
    model.load_state_dict(weights, strict=False)
    head = closed_form_head(*(sums_at(n, model) for n in range(1, 5)))
    np.testing.assert_allclose(
        strategy.solved.weights["3.weight"], head.weight, rtol=1e-2, atol=1e-3
    )
    np.testing.assert_array_equal(
        strategy.solved.weights["0.weight"], strategy.downlink.weights["0.weight"]
    )


def test_what_is_tested_is_the_model_that_was_solved_for_last() -> None:
    tested: list[bytes] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        tested.append(b"".join(each.tobytes() for each in as_weights(arrays).values()))
        return MetricRecord({"accuracy": accuracy(arrays)})

    strategy = PartialUpdates(quiet(), config=RoundConfig(read="last", solve_every=5))
    run(strategy, apps(), arrays_of(build()), 6, evaluate_fn=evaluate)
    assert [one == other for one, other in pairwise(tested)] == [
        True, False, True, True, False, False,
    ]  # fmt: skip


def test_after_the_second_round_a_head_is_solved_for_to_test_and_training_goes_on_under_the_old_one() -> (
    None
):
    heads: list[tuple[int, Any, Any]] = []
    terms = RoundConfig(read="last", solve_every=4)

    def note(record: Any) -> None:
        if record.trains:
            pair = (strategy.downlink.weights["3.weight"], strategy.solved.weights["3.weight"])
            heads.append((record.server_round, *(each.copy() for each in pair)))

    strategy = PartialUpdates(quiet(), config=terms, on_round=note)
    start(strategy, 5)
    first = heads[0][1]
    for number, trained_under, tested in heads:
        assert np.array_equal(trained_under, first) == (number <= 4)
        assert np.array_equal(trained_under, tested) == (number in (1, 2, 5))


def test_a_checkpoint_holds_the_model_that_was_tested_beside_the_one_that_goes_on(
    tmp_path: Path,
) -> None:
    differ: list[bool] = []

    def look(server_round: int, arrays: ArrayRecord) -> None:
        stored = load_checkpoint(tmp_path, arrays)
        assert stored is not None and stored.server_round == server_round
        tested = as_weights(arrays)
        assert stored.tested.keys() == tested.keys()
        for name, each in tested.items():
            np.testing.assert_array_equal(stored.tested[name], each)
        differ.append(any(not np.array_equal(stored.arrays[n], tested[n]) for n in tested))

    strategy = Checkpointed(PartialUpdates(quiet(), config=TERMS), tmp_path)
    run(strategy, apps(), arrays_of(build()), 3, evaluate_fn=look)
    assert differ == [False, True, True, False]


def test_without_solving_again_the_head_is_trained_like_the_rest() -> None:
    _, records = models_of(2, RoundConfig(read="last", solve_every=0))
    assert [each.trains for each in records] == [False, True, True]
    assert all("3.weight" in one.steps for each in records[1:] for one in each.accepted)


def test_norms_keep_their_statistics_under_a_head_that_was_solved_for() -> None:
    strategy, _ = models_of(2, RoundConfig(read="last"))
    before = as_weights(arrays_of(build()))
    for name in ("1.running_mean", "1.running_var"):
        np.testing.assert_array_equal(strategy.downlink.weights[name], before[name])
    assert not np.array_equal(strategy.downlink.weights["1.weight"], before["1.weight"])


def test_a_resumed_run_still_leaves_the_head_to_the_server(tmp_path: Path) -> None:
    terms, records = RoundConfig(read="last", solve_every=3), []
    for rounds in (2, 3):
        strategy = PartialUpdates(quiet(), config=terms, on_round=records.append)
        _, seen = start(Checkpointed(strategy, tmp_path), rounds)
    assert [(each.server_round, each.trains) for each in records] == [
        (0, False), (1, True), (2, True), (2, False), (3, True), (3, False),
    ]  # fmt: skip
    assert all("3.weight" not in one.steps for one in records[4].accepted)
    assert seen[0] > 0.95


def test_who_does_not_answer_is_left_out_of_the_next_head() -> None:
    def alter(message: Message) -> Message:
        if message.metadata.src_node_id == 2:
            message.content = train_reply([np.zeros(40, dtype=np.uint8)], 5, {})
        return message

    _, records = models_of(2, RoundConfig(read="last", solve_every=2), alter=alter)
    again = records[-1]
    assert not again.trains and sorted(each.node_id for each in again.accepted) == [1, 3, 4]


def test_a_model_whose_head_is_worth_less_is_not_taken_over() -> None:
    state = [0]

    def snapshot() -> Callable[[], None]:
        kept = state[0]

        def undo() -> None:
            state[0] = kept

        return undo

    last = HeadCheckpoint(snapshot)
    for number, error in enumerate((0.5, 0.4, 0.45), start=1):
        state[0] = number
        assert last.take(Solved({"w": np.full(1, number)}, "head", error)) == ""
    for _ in range(2):
        state[0] = 9
        reason = last.take(Solved({"w": np.full(1, 9)}, "head", 0.6))
        assert "was 0.40 before" in reason and "spoils the features" in reason and last.went_back
        # What a round changed besides is as it was with that model, each time.
        assert (last.weights["w"][0], state[0]) == (3, 3)
    again = HeadCheckpoint()
    again.restore(last.to_state())
    assert again.take(Solved({}, "head", 0.6)) == reason and again.weights == last.weights
    assert not last.take(Solved({"w": np.full(1, 5)}, "head", 0.49)) and not last.went_back


def coarse(parameters: Any) -> torch.optim.Optimizer:
    """A step of it takes every weight to zero; one of a quarter of its rate takes a quarter away."""
    return torch.optim.SGD(parameters, lr=0.5, weight_decay=2.0)


def told_rates(rounds: int, wrap: Any = lambda strategy: strategy) -> tuple[Any, ...]:
    """Run with coarse steps; return strategy, records, rates that clients were told, accuracies."""
    rates: list[float] = []

    class Noted(ElasticClient):
        def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
            if config.get(TASK) != "solve-head":
                rates.append(config.get(RATE, 1.0))
            return super().fit(parameters, config)

    def noted(node: int) -> ElasticClient:
        return Noted(
            build(), data(node), data(0), budget=Budget(), loss_fn=classification_loss,
            optimizer_fn=coarse, policy="full",
        )  # fmt: skip

    records: list[Any] = []
    terms = RoundConfig(read="last", solve_every=1)
    strategy = PartialUpdates(quiet(), config=terms, on_round=records.append)
    nodes = {node: elastic_client_app(lambda _, node=node: noted(node)) for node in range(1, 5)}
    _, seen = start(wrap(strategy), rounds, apps=nodes)
    return strategy, records, rates[::4], seen


def test_training_that_spoils_the_features_is_undone_and_goes_on_with_shorter_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy, records, rates, seen = told_rates(5)
    back = [bool(each.stepped_back) for each in records if each.server_round and not each.trains]
    assert back[0] and not back[-1]
    # Each time a quarter, until it goes well.
    fewer = [1.0 if not gone else 0.25 for gone in back[:-1]]
    assert rates == [float(np.prod(fewer[:count])) for count in range(5)]
    assert min(seen) > 0.9  # a model of zeros guesses
    assert "multiply their learning rates by 0.25" in caplog.text
    assert strategy.solved.weights.keys() == strategy.downlink.weights.keys()


def test_a_resumed_run_goes_on_with_shorter_steps(tmp_path: Path) -> None:
    _, _, rates, _ = told_rates(1, lambda strategy: Checkpointed(strategy, tmp_path))
    _, _, later, seen = told_rates(3, lambda strategy: Checkpointed(strategy, tmp_path))
    assert rates == [1.0] and later[0] == 0.25 and min(seen) > 0.9


def test_who_says_that_others_examples_are_of_another_class_later_on_is_undone() -> None:
    """It can keep the fleet at the head that it had, and make nothing worse than that."""
    manifest, asked = Manifest.of(build()), [0]

    def lie(model: nn.Module) -> HeadSums:
        others = [(inputs, torch.zeros_like(targets)) for inputs, targets in data(3)]
        return scaled(8.0, "count")(head_sums(model, others))

    class Liar(ElasticClient):
        def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
            packed, examples, metrics = super().fit(parameters, config)
            if config.get(TASK) == "solve-head":
                asked[0] += 1
                if asked[0] > 1:
                    sums = lie(self.model)
                    packed = [np.frombuffer(encode_head_sums(sums, manifest), np.uint8)]
                    examples = sums.num_examples
            return packed, examples, metrics

    def client_at(node: int) -> ElasticClient:
        kind = Liar if node == 2 else ElasticClient
        return kind(
            build(), data(node), data(0), budget=Budget(), loss_fn=classification_loss,
            optimizer_fn=plain_sgd,
        )  # fmt: skip

    records: list[Any] = []
    terms = RoundConfig(read="last", solve_every=1)
    strategy = PartialUpdates(quiet(), config=terms, on_round=records.append)
    nodes = {node: elastic_client_app(lambda _, node=node: client_at(node)) for node in range(1, 5)}
    _, seen = start(strategy, 3, apps=nodes)
    again = [each for each in records if each.server_round and not each.trains]
    assert len(again) == 3 == asked[0] - 1 and all(each.stepped_back for each in again)
    assert min(seen) == seen[0]
    assert all(len(each.accepted) == 4 for each in records if each.trains)


@pytest.mark.parametrize("rate", [0, 0.0, -1.0, 1.5, float("nan"), "half", True])
def test_a_rate_that_makes_no_sense_is_refused(rate: Any) -> None:
    with pytest.raises(UpdateError, match="rate"):
        Train.from_config({RATE: rate})


def test_who_cannot_train_still_counts_for_the_head() -> None:
    """Nobody else has its classes, perhaps."""

    def alter(message: Message) -> Message:
        trained = message.content.config_records.get("fitres.metrics", {}).get("steps", 0)
        if message.metadata.src_node_id == 2 and trained:
            message.content = train_reply([], 0, {ERROR: "the step does not fit into memory"})
        return message

    terms = RoundConfig(read="last", solve_every=2)
    _, records = models_of(2, terms, alter=alter)
    trained, again = [each for each in records if each.server_round == 2]
    assert sorted(each.node_id for each in trained.accepted) == [1, 3, 4]
    assert not again.trains and sorted(each.node_id for each in again.accepted) == [1, 2, 3, 4]
