"""What a server asks besides training: coverage, one seed for all, shared importance, the last round's change."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message
from flwr.clientapp import ClientApp
from scripted_clients import EXAMPLES, TRAINED, first_arrays, first_weights, manifest, scripts
from small_federation import (
    as_record,
    as_weights,
    elastic_client,
    legacy_app,
    local_data,
    plain_sgd,
    quiet,
    run,
    scripted_app,
)
from small_models import conv_net, flat_profile
from torch import nn
from trainer_settings import options_of

from fl_elastic import Budget
from fl_elastic.errors import RegistryError
from fl_elastic.flower import Deadline, ElasticClient, PartialUpdates, RoundRecord, RoundTerms
from fl_elastic.flower.instructions import (
    BLEND,
    CHANGE,
    DEADLINE,
    IMPORTANCE,
    KEEP,
    OVERDUE,
    SEED,
    Instructions,
    read_importance,
)
from fl_elastic.flower.records import PACKED, read_instruction
from fl_elastic.profiling import CostProfile
from fl_elastic.update import Manifest, decode, weights_of
from fl_elastic.update.model_wire import encode_weights


@pytest.mark.parametrize(
    ("terms", "word"),
    [
        ({"quota": -1}, "quota -1"),
        ({"blend": 1.0}, "blend 1.0"),
        ({"blend": -0.1}, "blend -0.1"),
        ({"blend": float("nan")}, "blend nan"),
        ({"plan_source": "server side"}, "plan_source 'server side'"),
        ({"late": "keep"}, "late 'keep'"),
        ({"grace": 0.9}, "grace 0.9"),
        ({"grace": float("inf")}, "grace inf"),
        ({"grace": float("nan")}, "grace nan"),
    ],
)
def test_bad_terms_are_refused(terms: dict[str, Any], word: str) -> None:
    with pytest.raises(RegistryError, match=word):
        RoundTerms(**terms)


@pytest.mark.parametrize(
    "told",
    [
        Instructions(),
        Instructions(deadline=2.5, overdue=True, seed=0),
        Instructions(importance='{"a": 1.0}', blend=0.25, change='{"w": 2.0}', keep=True),
    ],
)
def test_instructions_survive_the_journey(told: Instructions) -> None:
    assert Instructions.from_config(dict(ConfigRecord(told.to_config()))) == told
    assert Instructions().to_config() == {}


def watched(seen: dict[int, list[dict[str, Any]]], reported: dict[int, Any] | None = None) -> Any:
    """Scripted clients that note their config, train all when overdue, and may report importance."""

    def app(node: int) -> ClientApp:
        found = ClientApp()
        usual, everything = (
            scripted_app(manifest(), scripts(whole)[node]) for whole in (False, True)
        )

        @found.train()
        def train(message: Message, context: Any) -> Message:
            _, config = read_instruction("train", message.content)
            seen.setdefault(node, []).append(config)
            reply = (everything if config.get(OVERDUE) else usual)(message, context)
            if reported is not None and node in reported:
                reply.content["fitres.metrics"][IMPORTANCE] = reported[node]
            return reply

        return found

    return {node: app(node) for node in EXAMPLES}


@pytest.mark.parametrize("quota", [0, 1, 2, 3])
def test_what_was_left_out_for_too_long_is_asked_for(quota: int) -> None:
    seen: dict[int, list[dict[str, Any]]] = {}
    strategy = PartialUpdates(quiet(), terms=RoundTerms(quota=quota))
    run(strategy, watched(seen), first_arrays(), 7)
    told = {node: [bool(config.get(OVERDUE)) for config in seen[node]] for node in EXAMPLES}
    # "untouched" is trained by nobody of their own accord.
    turn = [bool(quota) and r % (quota + 1) == quota for r in range(7)]
    assert told == dict.fromkeys(EXAMPLES, turn)
    ledger = strategy.fleet.ledger
    assert ledger is not None
    for node in EXAMPLES:
        trained = dict(zip(ledger.names, ledger.clients[str(node)].trained, strict=True))
        assert trained["untouched"] == sum(turn)
        assert all(trained[name] == 7 for name in TRAINED[node])


def build() -> nn.Module:
    torch.manual_seed(7)
    return conv_net("none")


MANIFEST = Manifest.of(build())


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return flat_profile(build(), local_data(4)[0], plain_sgd)


def client(
    profile: CostProfile,
    node: int = 4,
    policy: str = "elastic",
    speedup: float = 2.0,
    **options: Any,
) -> ElasticClient:
    settings = options_of(
        **{"closed_loop": False, "full_update_every": 0, "charge_probes": False} | options
    )
    return elastic_client(
        build(), node, policy, budget=Budget(speedup=speedup), profile=profile, options=settings
    )


def chosen(made: ElasticClient, **config: Any) -> set[str]:
    data = encode_weights(weights_of(build(), MANIFEST), MANIFEST, version=1)
    arrays, examples, metrics = made.fit([np.frombuffer(data, np.uint8)], {PACKED: True, **config})
    assert examples, metrics
    return set(decode(arrays[0].tobytes(), MANIFEST).deltas)


def test_a_client_that_is_told_so_trains_everything_in_the_same_time(profile: CostProfile) -> None:
    made = client(profile)
    allowed = 4 * profile.full_step_seconds / 2

    def spent() -> float:
        assert made.report is not None
        return made.report.steps * made.report.plan.predicted_step_seconds

    assert chosen(made) < set(MANIFEST.names)
    assert spent() <= allowed
    assert chosen(made, **{OVERDUE: True}) == set(MANIFEST.names)
    assert 0 < spent() <= allowed
    assert chosen(made) < set(MANIFEST.names)


@pytest.mark.parametrize("quota", [0, 2])
def test_a_quota_brings_every_tensor_back_for_real_clients(
    quota: int, profile: CostProfile
) -> None:
    clients = {node: client(profile, node) for node in (1, 2)}
    apps = {node: legacy_app(lambda node=node: clients[node]) for node in clients}
    strategy = PartialUpdates(quiet(nodes=2), terms=RoundTerms(quota=quota))
    arrays = as_record(weights_of(build(), MANIFEST))
    run(strategy, apps, arrays, 6)
    ledger = strategy.fleet.ledger
    assert ledger is not None
    least = min(entry.trained.min() for entry in ledger.clients.values())
    assert least == (2 if quota else 0)


def test_one_seed_per_round_makes_clients_of_one_budget_choose_alike(profile: CostProfile) -> None:
    def choices(seed: int, **config: Any) -> list[set[str]]:
        own = [client(profile, policy="random", speedup=1.3, seed=100 * seed + i) for i in range(4)]
        return [chosen(made, **config) for made in own]

    alike = [len({frozenset(c) for c in choices(s, **{SEED: s})}) for s in range(5)]
    alone = [len({frozenset(c) for c in choices(s)}) for s in range(5)]
    assert alike == [1] * 5
    assert max(alone) > 1
    # And another choice every round.
    rounds = {
        frozenset(chosen(client(profile, policy="random", speedup=1.3), **{SEED: r}))
        for r in range(6)
    }
    assert len(rounds) > 1


def test_the_seed_is_the_round() -> None:
    seen: dict[int, list[dict[str, Any]]] = {}
    terms = RoundTerms(plan_source="shared_rng")
    run(PartialUpdates(quiet(), terms=terms), watched(seen), first_arrays(), 3)
    told = {node: [config[SEED] for config in configs] for node, configs in seen.items()}
    assert told == {node: [1, 2, 3] for node in EXAMPLES}


def test_importance_is_a_moving_mean_over_the_fleet() -> None:
    seen: dict[int, list[dict[str, Any]]] = {}
    reported = {
        1: json.dumps({"head": 3.0, "stem": 1.0}), 2: json.dumps({"head": 10.0}),
        3: json.dumps({"stem": 0.5}), 4: "no JSON",
    }  # fmt: skip
    strategy = PartialUpdates(quiet(), terms=RoundTerms(blend=0.4))
    result, _ = run(strategy, watched(seen, reported), first_arrays(), 3)
    # Shares of each: (0.75, 0.25), (1, 0), (0, 1); the fourth does not count.
    expected = {"head": 1.75 / 3, "stem": 1.25 / 3}
    assert strategy.fleet.importance == pytest.approx(expected)
    assert all(config[BLEND] == 0.4 for configs in seen.values() for config in configs)
    assert IMPORTANCE not in seen[1][0]
    assert json.loads(seen[1][1][IMPORTANCE]) == pytest.approx(expected)
    reported[1] = json.dumps({"head": 1.0})
    reported[3] = json.dumps({"stem": 1.0})
    run(strategy, watched(seen, reported), first_arrays(), 1)
    moved = {"head": 0.7 * 1.75 / 3 + 0.3 * 2 / 3, "stem": 0.7 * 1.25 / 3 + 0.3 / 3}
    assert strategy.fleet.importance == pytest.approx(moved)
    # It is no metric.
    assert all(IMPORTANCE not in record for record in result.train_metrics_clientapp.values())


GARBAGE: list[Any] = [
    "", "null", "[]", "3", '"text"', "{}", '{"head": "much"}', '{"head": NaN}', '{"head": Infinity}',
    '{"head": -1.0, "stem": 2.0}', '{"head": 0.0}', '{"head": null}', '{"head": [1]}', "[" * 100_000,
    '{"head": 1e308, "stem": 1e308}', '{"head": ' + "9" * 400 + "}", 7, 1.5, True, b"\xff", [1.0],
    json.dumps({str(i): 1.0 for i in range(100_001)}),
]  # fmt: skip


@pytest.mark.parametrize("garbage", range(len(GARBAGE)))
def test_garbage_for_importance_is_ignored(garbage: int) -> None:
    assert read_importance(GARBAGE[garbage]) == {}
    records: list[RoundRecord] = []
    strategy = PartialUpdates(quiet(), terms=RoundTerms(blend=0.4), on_round=records.append)
    run(strategy, watched({}, {2: GARBAGE[garbage]}), first_arrays(), 2)
    assert strategy.fleet.importance == {}
    assert all(len(record.accepted) == 4 for record in records)


def test_a_client_blends_the_fleets_importance_with_its_own(profile: CostProfile) -> None:
    """With nearly all the weight, the fleet's choice is trained instead of its own; both do not fit."""

    def groups(**config: Any) -> set[str]:
        return {name.split(".")[0] for name in chosen(client(profile, speedup=1.3), **config)}

    fleet = json.dumps({"3": 1.0})
    assert groups() == {"11", "6"}
    assert groups(**{BLEND: 0.999, IMPORTANCE: fleet}) == {"11", "3"}
    assert groups(**{BLEND: 1e-9, IMPORTANCE: fleet}) == {"11", "6"}
    assert groups(**{BLEND: 0.9, IMPORTANCE: "garbage"}) == {"11", "6"}


def test_a_client_reports_its_importance_only_when_asked(profile: CostProfile) -> None:
    data = [np.frombuffer(encode_weights(weights_of(build(), MANIFEST), MANIFEST), np.uint8)]
    asked = client(profile).fit(data, {PACKED: True, BLEND: 0.5})[2]
    assert set(json.loads(asked[IMPORTANCE])) == set(profile.group_names)
    assert read_importance(asked[IMPORTANCE])
    assert IMPORTANCE not in client(profile).fit(data, {PACKED: True})[2]


def test_groups_that_would_increase_the_loss_do_not_spoil_the_report(profile: CostProfile) -> None:
    data = [np.frombuffer(encode_weights(weights_of(build(), MANIFEST), MANIFEST), np.uint8)]
    negative = 0
    for node in range(1, 5):
        made = client(profile, node, speedup=1.5)
        sent = made.fit(data, {PACKED: True, BLEND: 0.5})[2][IMPORTANCE]
        assert made.report is not None
        own = made.report.importance
        negative += min(own.values()) < 0
        positive = {name: score for name, score in own.items() if score > 0}
        expected = {name: score / sum(positive.values()) for name, score in positive.items()}
        found = read_importance(sent)
        assert {name: share for name, share in found.items() if share} == pytest.approx(expected)
    assert negative


def test_clients_are_told_what_the_last_round_changed() -> None:
    seen: dict[int, list[dict[str, Any]]] = {}
    models = [first_weights()]

    def note(_: int, arrays: Any) -> None:
        models.append(as_weights(arrays))

    strategy = PartialUpdates(quiet(fraction_evaluate=0.0), terms=RoundTerms(share_change=True))
    run(strategy, watched(seen), first_arrays(), 3, evaluate_fn=note)
    models = models[1:]
    assert CHANGE not in seen[1][0]
    for number in (1, 2):
        told = json.loads(seen[1][number][CHANGE])
        before, after = models[number - 1], models[number]
        assert set(told) == set(before)
        for name, value in told.items():
            expected = float(np.square(after[name].astype(float) - before[name]).sum())
            assert value == pytest.approx(expected, rel=1e-6)
        assert told["untouched"] == 0.0
        assert told["head.weight"] > 0.0


def test_who_is_told_the_same_shares_one_message() -> None:
    terms = RoundTerms(
        deadline=Deadline(seconds=60.0), quota=2, plan_source="shared_rng", delta_downlink=True
    )
    seen: dict[int, list[dict[str, Any]]] = {}
    _, grid = run(PartialUpdates(quiet(), terms=terms), watched(seen), first_arrays(), 1)
    assert len({id(message.content) for message in grid.sent}) == 1
    config = seen[1][0]
    assert (config[DEADLINE], config[SEED], config[KEEP]) == (60.0, 1, True)
    assert OVERDUE not in config
