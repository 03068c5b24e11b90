"""The server chooses for all what the slowest client can afford, and every client trains exactly that."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_federation import (
    as_record,
    build,
    elastic_client,
    legacy_app,
    local_data,
    plain_sgd,
    quiet,
    run,
)
from small_models import flat_profile
from trainer_settings import free_probes

from fl_elastic import Budget
from fl_elastic.errors import PlanError, UpdateError
from fl_elastic.flower import (
    Deadline,
    ElasticClient,
    PartialUpdates,
    RoundConfig,
    RoundRecord,
    elastic_client_app,
)
from fl_elastic.flower.capabilities import Capabilities, GroupCosts
from fl_elastic.flower.records import ERROR, PACKED
from fl_elastic.flower.server_plan import ServerPlanner
from fl_elastic.flower.tasks.task import config_key
from fl_elastic.flower.tasks.train import read_groups
from fl_elastic.profiling import CostProfile
from fl_elastic.training import Timing, TrainerOptions
from fl_elastic.update import Manifest, decode, weights_of
from fl_elastic.update.model_wire import encode_weights

GROUPS = config_key("groups")
SERVER = RoundConfig(plan="server")


MANIFEST = Manifest.of(build())


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return flat_profile(build(), local_data(4)[0], plain_sgd)


def client(profile: CostProfile, node: int, speedup: float, **options: Any) -> ElasticClient:
    settings = TrainerOptions(timing=Timing(closed_loop=False))
    return elastic_client(
        build(), node, "elastic", budget=Budget(speedup=speedup), profile=profile,
        options=settings, **options,
    )  # fmt: skip


def federated(
    profile: CostProfile, speedups: dict[int, float], rounds: int, **options: Any
) -> tuple[list[RoundRecord], PartialUpdates]:
    clients = {node: client(profile, node, s) for node, s in speedups.items()}
    apps = {
        node: legacy_app(lambda node=node: clients[node])
        if node % 2
        else elastic_client_app(lambda _, node=node: clients[node])
        for node in clients
    }
    records: list[RoundRecord] = []
    settings = {"config": SERVER} | options
    strategy = PartialUpdates(quiet(nodes=len(apps)), on_round=records.append, **settings)
    run(strategy, apps, as_record(weights_of(build(), MANIFEST)), rounds)
    return records, strategy


def trained_sets(records: list[RoundRecord]) -> list[set[frozenset[str]]]:
    return [{frozenset(reply.steps) for reply in record.accepted} for record in records]


def test_all_clients_of_a_round_train_the_same_tensors(
    profile: CostProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_probes(monkeypatch)
    records, strategy = federated(profile, {1: 1.0, 2: 2.0, 3: 1.3}, 10)
    sets = trained_sets(records)
    assert all(len(record.accepted) == 3 for record in records)
    assert all(len(each) == 1 for each in sets)
    # Nothing is left out for ever, and importance is measured although clients do not choose by it.
    every = frozenset().union(*(next(iter(each)) for each in sets))
    assert {name for name in MANIFEST.names if "running" not in name and "num" not in name} <= every
    assert len({next(iter(each)) for each in sets}) > 1
    assert set(strategy.fleet.importance) == set(profile.group_names)


def test_krum_can_then_compare_whole_updates(profile: CostProfile) -> None:
    records, strategy = federated(profile, {1: 1.5, 2: 2.0, 3: 2.0, 4: 1.2}, 2, rule="krum")
    assert all(len(record.accepted) == 4 for record in records)
    assert any(
        not np.array_equal(array, strategy.downlink.weights[name])
        for name, array in weights_of(build(), MANIFEST).items()
    )


def test_a_deadline_limits_the_plan_as_well(profile: CostProfile) -> None:
    whole = 4 * profile.full_step_seconds
    terms = replace(SERVER, deadline=Deadline(seconds=0.6 * whole))
    records, _ = federated(profile, {4: 1.0} | {1: 1.0, 2: 1.0, 3: 1.0}, 3, config=terms)
    for record in records:
        (names,) = {frozenset(reply.steps) for reply in record.accepted}
        assert len(names) < len(MANIFEST.names) - 3
        steps = {reply.node_id: reply.metrics["steps"] for reply in record.accepted}
        # One of four may lie about its costs: the second slowest decides, the slowest takes fewer of its
        # four steps.
        assert steps[2] == 3 and 1 <= steps[4] < 4


def capabilities(seed: int, groups: int, **changes: Any) -> Capabilities:
    generator = np.random.default_rng(seed)
    costs = GroupCosts(
        names=tuple(f"g{i}" for i in range(groups)),
        update_seconds=tuple(generator.random(groups)),
        path_seconds=tuple(generator.random(groups)),
        sent_bytes=tuple(100 * generator.random(groups)),
        constant_seconds=1.0,
        head=0,
    )
    full = 1.0 + sum(costs.update_seconds) + sum(costs.path_seconds)
    usual = Capabilities(
        "pi", 10, 5, full, sum(costs.sent_bytes),
        allowed_step_seconds=full / 2, groups=costs,
    )  # fmt: skip
    return replace(usual, **changes)


def step_seconds(client: Capabilities, names: tuple[str, ...]) -> float:
    """The cost of a plan, written out: updates of what is trained, and the way down to the deepest of it."""
    costs = client.groups
    assert costs is not None
    chosen = [i for i, name in enumerate(costs.names) if name in names]
    spent = costs.constant_seconds + sum(costs.path_seconds[: max(chosen) + 1])
    spent += sum(costs.update_seconds[i] for i in chosen)
    if client.bandwidth:
        spent += sum(costs.sent_bytes[i] for i in chosen) / client.bandwidth / client.steps
    return spent


@given(
    seed=st.integers(0, 10_000), groups=st.integers(2, 9), speedup=st.floats(1.0, 4.0),
    bandwidth=st.sampled_from([0.0, 10.0, 1e4]),
)  # fmt: skip
def test_the_choice_fits_the_slowest_or_is_the_head_alone(
    seed: int, groups: int, speedup: float, bandwidth: float
) -> None:
    fast = capabilities(seed, groups)
    full = fast.full_step_seconds
    slow = replace(fast, allowed_step_seconds=full / speedup, bandwidth=bandwidth)
    importance = {f"g{i}": float(i % 3) for i in range(groups)}
    names = ServerPlanner().choose([replace(fast, allowed_step_seconds=0.0), slow], importance)
    assert "g0" in names
    assert names == ("g0",) or step_seconds(slow, names) <= full / speedup * (1 + 1e-9)


def test_the_most_important_is_chosen_first_and_the_others_in_turn() -> None:
    known = capabilities(3, 6)
    planner = ServerPlanner()
    importance = {"g1": 1.0}
    chosen = [planner.choose([known], importance) for _ in range(12)]
    assert "g1" in chosen[0]
    assert {name for names in chosen for name in names} == {f"g{i}" for i in range(6)}
    # And it goes on after a restart where it was.
    other = ServerPlanner()
    other.restore(deepcopy(planner.to_state()))
    for _ in range(12):
        assert other.choose([known], importance) == planner.choose([known], importance)
        assert other.to_state() == planner.to_state()


def test_if_nobody_says_what_groups_cost_clients_choose_for_themselves() -> None:
    silent = replace(capabilities(1, 3), groups=None)
    assert ServerPlanner().choose([silent], {}) == ()
    assert ServerPlanner().choose([], {}) == ()


GOOD = json.loads(capabilities(1, 3).groups.to_json())  # type: ignore[union-attr]
BAD: dict[str, Any] = {
    "no text": 3,
    "no JSON": "{",
    "nested": "[" * 100_000,
    "a list": "[]",
    "a column missing": json.dumps({k: v for k, v in GOOD.items() if k != "sent_bytes"}),
    "ragged": json.dumps(GOOD | {"update_seconds": [1.0]}),
    "negative": json.dumps(GOOD | {"path_seconds": [1.0, -1.0, 1.0]}),
    "NaN": json.dumps(GOOD | {"path_seconds": [1.0, float("nan"), 1.0]}),
    "infinite": json.dumps(GOOD | {"constant_seconds": float("inf")}),
    "text": json.dumps(GOOD | {"update_seconds": ["a", 1, 2]}),
    "no head": json.dumps(GOOD | {"head": 3}),
    "twice": json.dumps(GOOD | {"names": ["a", "a", "b"]}),
    "long name": json.dumps(GOOD | {"names": ["a", "b" * 999, "c"]}),
    "empty": json.dumps(GOOD | {k: [] for k in GOOD if k not in ("constant_seconds", "head")}),
}


@pytest.mark.parametrize("what", BAD)
def test_costs_that_mean_nothing_are_refused(what: str) -> None:
    metrics = capabilities(1, 3).to_metrics()
    assert Capabilities.from_metrics(metrics) == capabilities(1, 3)
    with pytest.raises(UpdateError, match="costs of"):
        Capabilities.from_metrics(metrics | {"group-costs": BAD[what]})


def told(profile: CostProfile, groups: str) -> tuple[list[Any], int, dict[str, Any]]:
    data = [np.frombuffer(encode_weights(weights_of(build(), MANIFEST), MANIFEST), np.uint8)]
    return client(profile, 2, 1.5).fit(data, {PACKED: True, GROUPS: groups})


@pytest.mark.parametrize("names", [["11"], ["11", "0"], ["3", "6"]])
def test_a_client_trains_exactly_what_it_is_told(names: list[str], profile: CostProfile) -> None:
    arrays, _, metrics = told(profile, json.dumps(names))
    update = decode(arrays[0].tobytes(), MANIFEST)
    assert {name.split(".")[0] for name in update.deltas if "running" not in name} == set(names)
    assert metrics["trained-groups"] == len(names)


@pytest.mark.parametrize("groups", ['["no such"]', "[]", "{}", "[1]", "nothing", "[" * 9999])
def test_groups_that_the_model_does_not_have_are_an_answer(
    groups: str, profile: CostProfile
) -> None:
    arrays, examples, metrics = told(profile, groups)
    assert (arrays, examples) == ([], 0)
    assert "groups" in metrics[ERROR]
    assert "\n" not in metrics[ERROR]
    if groups not in ('["no such"]', "[]"):
        with pytest.raises(PlanError, match="cannot be read"):
            read_groups(groups)


def test_a_group_is_left_out_for_so_long_at_most() -> None:
    """The budget pays for the head alone, so that all the others wait for their turn."""
    poor, most = (
        capabilities(2, 4, allowed_step_seconds=1e-6),
        2 * TrainerOptions().full_update_every,
    )
    planner = ServerPlanner()
    sizes = [len(planner.choose([poor], {})) for _ in range(3 * (most + 1))]
    assert sizes == 3 * [*most * [1], 4]
