"""One bad reply, or a server rate that is too long, costs a round and not the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvgM
from scripted_clients import EXAMPLES, first_arrays, first_weights, manifest, scripts
from slow_ones import slow_unless
from small_federation import as_weights, assert_identical, quiet, run, scripted_app

from fl_elastic.aggregation import SERVER_OPTIMIZERS, MergeOptions, ModelAverage
from fl_elastic.flower import Checkpointed, PartialUpdates, RoundRecord
from fl_elastic.flower.divergence_rollback import DivergenceRollback
from fl_elastic.update import PartialUpdate

UpdateOf = Callable[[Any, int], PartialUpdate]
NORM = {"bn.running_mean": np.zeros(4, np.float32), "bn.running_var": np.ones(4, np.float32)}
TARGET = 0.3


def distance(weights: dict[str, np.ndarray]) -> float:
    """Of a model whose every number is to become 0.3; what clients report as their loss."""
    names = [name for name in first_weights()]
    return float(np.mean([np.square(weights[name] - TARGET).mean() for name in names]))


def towards(node: int, share: float = 0.5) -> UpdateOf:
    def update(weights: Any, version: int) -> PartialUpdate:
        deltas = {
            name: np.asarray(share * (TARGET - array), np.float32)
            for name, array in weights.items()
            if not name.startswith("bn.")
        }
        deltas |= {name: np.full(4, 0.01, np.float32) for name in weights if name in NORM}
        return PartialUpdate(deltas, dict.fromkeys(deltas, 3), EXAMPLES[node], version)

    return update


def reporting(
    app: ClientApp, update_of: UpdateOf, known: Any, lie: float | None = None
) -> ClientApp:
    """A scripted client that reports the distance as its loss."""
    from fl_elastic.flower.records import read_instruction
    from fl_elastic.update.model_wire import decode_weights

    found = ClientApp()

    @found.train()
    def train(message: Message, context: Any) -> Message:
        arrays, _ = read_instruction("train", message.content)
        weights, _ = decode_weights(arrays[0].tobytes(), known)
        reply = app(message, context)
        loss = distance(weights) if lie is None else lie
        reply.content["fitres.metrics"]["train-loss"] = loss
        return reply

    return found


def fleet(
    bad: dict[int, UpdateOf] | None = None,
    extra: Any = None,
    share: float = 0.5,
    lies: dict[int, float] | None = None,
) -> dict[int, ClientApp]:
    known = manifest(extra)
    scripts = {node: (bad or {}).get(node) or towards(node, share) for node in EXAMPLES}
    return {
        node: reporting(scripted_app(known, each), each, known, (lies or {}).get(node))
        for node, each in scripts.items()
    }


def once(node: int, version: int, value: float) -> UpdateOf:
    honest = towards(node)

    def update(weights: Any, now: int) -> PartialUpdate:
        good = honest(weights, now)
        if now != version:
            return good
        deltas = {name: np.full_like(delta, value) for name, delta in good.deltas.items()}
        return PartialUpdate(deltas, good.steps, good.num_examples, now)

    return update


def after(strategy: PartialUpdates, rounds: int, **options: Any) -> dict[str, np.ndarray]:
    extra = options.pop("extra", None)
    result, _ = run(strategy, fleet(extra=extra, **options), first_arrays(extra), rounds)
    return as_weights(result.arrays)


@pytest.mark.slow
@pytest.mark.parametrize(("when", "value"), [(1, 9e29), (3, 1e4)])
def test_an_inner_optimisers_moments_are_not_poisoned_for_good(when: int, value: float) -> None:
    def strategy() -> PartialUpdates:
        return PartialUpdates(quiet(FedAdam, eta=0.05))

    honest = after(strategy(), when + 20)
    found = after(strategy(), when + 20, bad={2: once(2, when, value)})
    assert distance(found) < 0.5 * distance(first_weights())
    assert distance(found) < distance(honest) + 0.5 * distance(first_weights())


@pytest.mark.parametrize(
    ("name", "when"),
    slow_unless(
        lambda name, when: when == 3 and name in ("adam", "momentum", "agreement"),
        product(("adam", "yogi", "momentum", "agreement", "sgd"), (1, 3)),
    ),
)
def test_nor_are_those_of_a_server_optimiser(name: str, when: int) -> None:
    rate = 0.05 if name in ("adam", "yogi") else 0.2
    strategy = PartialUpdates(quiet(), server_optimizer=SERVER_OPTIMIZERS.make(name, rate))
    # Node 2 holds almost half of the examples, and momentum goes on for a while.
    found = after(strategy, when + 40, bad={2: once(2, when, 9e29)})
    assert distance(found) < 0.5 * distance(first_weights())


def test_where_the_losses_jump_the_model_before_is_put_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records: list[RoundRecord] = []
    # So large a bound lets the poison through.
    merge = MergeOptions(size_bound=float("inf"))
    poisoned = PartialUpdates(quiet(), merge=merge, on_round=records.append)
    with caplog.at_level(logging.WARNING):
        found = after(poisoned, 5, bad={2: once(2, 4, 1e3)})
    plain = after(PartialUpdates(quiet(), merge=merge), 3)
    # Round 4 was poisoned, round 5 saw it.
    assert all(np.array_equal(found[name], plain[name]) for name in plain)
    assert [record.stepped_back for record in records[:4]] == [""] * 4
    assert "loss" in records[4].stepped_back
    assert "the model before the last round is put back" in caplog.text
    assert poisoned.guard.rate_limit == 1.0


def test_moments_and_mean_go_back_with_the_model() -> None:
    merge = MergeOptions(size_bound=float("inf"))

    def strategy() -> PartialUpdates:
        return PartialUpdates(
            quiet(FedAvgM, server_momentum=0.5),
            merge=merge,
            average=ModelAverage(0.5),
            server_optimizer=SERVER_OPTIMIZERS.make("momentum", 0.1),
        )

    one, other = strategy(), strategy()
    three, _ = run(one, fleet(), first_arrays(), 3)
    five, _ = run(other, fleet({2: once(2, 4, 1e3)}), first_arrays(), 5)
    # What is returned is the mean of the models.
    assert_identical(five.arrays, three.arrays)
    assert one.server_optimizer is not None and other.server_optimizer is not None
    kept, found = one.server_optimizer.to_state(), other.server_optimizer.to_state()
    assert kept.counts == found.counts and kept.moments.keys() == found.moments.keys()
    assert all(np.array_equal(each, found.moments[name]) for name, each in kept.moments.items())
    vectors = (one.inner.momentum_vector, other.inner.momentum_vector)  # type: ignore[attr-defined]
    assert all(np.array_equal(a, b) for a, b in zip(*vectors, strict=True))


@pytest.mark.parametrize("lie", [1e9, 1e300])
def test_one_that_claims_huge_losses_does_not_turn_the_run_back(lie: float) -> None:
    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(), on_round=records.append)
    found = after(strategy, 8, lies={2: lie})
    assert not any(record.stepped_back for record in records)
    assert distance(found) < 0.01


def test_a_majority_that_claims_huge_losses_delays_a_run_and_does_not_stop_it() -> None:
    strategy = PartialUpdates(quiet())
    found = after(strategy, 12, lies=dict.fromkeys((1, 2, 3), 1e9))
    assert distance(found) < distance(first_weights())


def test_a_server_rate_that_is_too_long_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At rate 5 the distance grows by half each round; the losses that clients report say so."""
    merge = MergeOptions(size_bound=float("inf"))

    def strategy() -> PartialUpdates:
        optimizer = SERVER_OPTIMIZERS.make("sgd", 7.0)
        return PartialUpdates(quiet(), server_optimizer=optimizer, merge=merge)

    assert distance(after(strategy(), 12)) < 0.2 * distance(first_weights())
    monkeypatch.setattr(DivergenceRollback, "jumped", lambda *_: "")
    assert distance(after(strategy(), 12)) > 1e3


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("name", ["sgd", "agreement", "momentum", "inner"])
def test_a_model_with_statistics_goes_no_further_than_its_clients(
    name: str, statistics: bool
) -> None:
    extra = NORM if statistics else None
    inner = quiet(FedAvgM, server_learning_rate=1.5) if name == "inner" else quiet()
    optimizer = None if name == "inner" else SERVER_OPTIMIZERS.make(name, 1.5)
    strategy = PartialUpdates(inner, server_optimizer=optimizer)
    found, start = after(strategy, 1, extra=extra, share=0.1), first_weights(extra)
    asked = 0.1 * (TARGET - start["head.weight"])
    longer = 1.0 if statistics else 1.5
    assert found["head.weight"] - start["head.weight"] == pytest.approx(longer * asked, rel=1e-3)
    if statistics:
        # In any case what clients observed.
        assert found["bn.running_var"] == pytest.approx(np.full(4, 1.01))


def test_optimisers_that_set_their_own_length_are_left_alone() -> None:
    def found(extra: Any) -> np.ndarray:
        return after(PartialUpdates(quiet(FedAdam, eta=0.05)), 2, extra=extra)["head.weight"]

    np.testing.assert_allclose(found(None), found(NORM), rtol=1e-6)


def test_clients_that_all_diverge_turn_the_run_back() -> None:
    guard = DivergenceRollback()
    for loss in (2.0, 1.0):
        guard.jumped([loss])
        guard.keep({}, lambda: None)
    assert guard.jumped([], diverged=0) == ""
    assert guard.jumped([1.0, 1.0], diverged=1) == ""
    assert guard.jumped([], diverged=3)


def test_the_rate_recovers_after_good_rounds() -> None:
    guard = DivergenceRollback()
    for _ in range(3):
        guard.jumped([1.0])
        guard.keep({}, lambda: None)
        guard.step_back()
    assert guard.rate_limit == 0.25
    for _ in range(20):
        guard.jumped([1.0])
    assert guard.rate_limit == 1.0


def test_flowers_log_counts_what_was_merged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        apps = {n: scripted_app(manifest(), scripts()[n]) for n in EXAMPLES}
        run(PartialUpdates(quiet()), apps, first_arrays(), 1)
    assert "Received 4 results and 0 failures" in caplog.text
    assert "Received 1 results" not in caplog.text


class Killed(Exception):
    """Stands for the end of the server's process."""


@pytest.mark.parametrize("when", [1, 2, 4])
def test_a_server_that_dies_after_a_bad_round_goes_back_all_the_same(
    when: int, tmp_path: Path
) -> None:
    def strategy() -> PartialUpdates:
        return PartialUpdates(
            quiet(FedAvgM, server_momentum=0.5), merge=MergeOptions(size_bound=float("inf")),
            average=ModelAverage(0.5), server_optimizer=SERVER_OPTIMIZERS.make("momentum", 0.1),
        )  # fmt: skip

    def dies(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == when:
            raise Killed

    bad = {2: once(2, when, 1e3)}
    records: list[RoundRecord] = []
    whole, _ = run(strategy(), fleet(bad), first_arrays(), when + 3)
    with pytest.raises(Killed):
        run(Checkpointed(strategy(), tmp_path), fleet(bad), first_arrays(), 9, evaluate_fn=dies)
    again = strategy()
    again.on_round = records.append
    resumed, _ = run(Checkpointed(again, tmp_path), fleet(bad), first_arrays(), when + 3)
    assert [bool(record.stepped_back) for record in records] == [True, False, False]
    assert_identical(resumed.arrays, whole.arrays)


@pytest.mark.parametrize("damage", ["gone", "cut off"])
def test_where_the_model_before_is_lost_the_run_goes_on_from_the_last_one(
    damage: str, tmp_path: Path
) -> None:
    run(Checkpointed(PartialUpdates(quiet()), tmp_path), fleet(), first_arrays(), 3)
    older = tmp_path / "round-000002.state"
    older.unlink() if damage == "gone" else older.write_bytes(older.read_bytes()[:100])
    resumed = Checkpointed(PartialUpdates(quiet()), tmp_path)
    result, _ = run(resumed, fleet(), first_arrays(), 5)
    assert_identical(
        result.arrays, run(PartialUpdates(quiet()), fleet(), first_arrays(), 5)[0].arrays
    )


def test_clients_that_all_diverge_before_any_loss_is_known_turn_nothing_back() -> None:
    guard, untold = DivergenceRollback(), DivergenceRollback()
    assert guard.jumped([], diverged=3) == ""
    for each in (guard, untold):
        assert each.jumped([2.0]) == ""
        each.keep({}, lambda: None)
    assert guard.jumped([9.0, 9.0]) == untold.jumped([9.0, 9.0]) != ""
