"""Round zero in a simulation: the head is there before the first round, and its time and bytes are charged."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from choosing_costs import flat_choosing, with_costs
from choosing_costs import ran as results_of
from slow_ones import slow_unless
from torch import nn

from fl_elastic.closed_form.head_sums_wire import decode_head_sums
from fl_elastic.errors import ScenarioError
from fl_elastic.flower.auxiliary_rounds import AuxiliaryRounds
from fl_elastic.profiling import CostProfile
from fl_elastic.training.loader import LoaderSize, loader_size
from fl_elastic.training.sums_size import features_in_memory
from fl_elastic.update import Manifest
from fl_elastic_simulations.engine import client as simulated_client
from fl_elastic_simulations.engine import server as simulated_server
from fl_elastic_simulations.engine.head_costs import HeadCosts
from fl_elastic_simulations.engine.methods import check_methods
from fl_elastic_simulations.engine.workload import client_batches, measure_profile, scenario_model
from fl_elastic_simulations.scenario import Scenario

SECONDS_OF_AN_EXAMPLE, SLOWEST, BANDWIDTH = 0.02, 4.0, 1e6
TABLE: dict[str, Any] = {
    "seeds": [0],
    "data": {"dataset": "digits", "partition": "dirichlet", "alpha": 0.3, "test_limit": 120},
    "model": {"name": "digits_cnn"},
    "training": {"rounds": 2, "batch_size": 16, "learning_rate": 0.0003, "local_steps": 2},
    "fleet": [
        {"device": "laptop", "slowdown": slowdown, "uplink_bytes_per_second": BANDWIDTH,
         "downlink_bytes_per_second": BANDWIDTH, "count": 2}
        for slowdown in (1.0, SLOWEST)
    ],
    "methods": ["plain", "solved"],
    "method": {
        "plain": {"policy": "full"},
        "solved": {"policy": "full", "round_zero": "closed_form"},
    },
    "target": {"method": "plain"},
}  # fmt: skip

LITTLE = {"data": TABLE["data"] | {"train_limit": 200, "test_limit": 40}}
ONE_ROUND = {"training": TABLE["training"] | {"rounds": 1}}


def scenario(**changes: Any) -> Scenario:
    return Scenario.from_json(json.dumps(TABLE | changes))


@pytest.fixture(scope="module")
def profile() -> CostProfile:
    return measure_profile(scenario(), None)


@pytest.fixture
def ran(profile: CostProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run a scenario on a host where adding the products of an example takes a known time."""
    modules = scenario_model(scenario(), None, seed=0).modules()
    *_, head = (each for each in modules if isinstance(each, nn.Linear))
    costs = HeadCosts(
        product=SECONDS_OF_AN_EXAMPLE / head.in_features**2,
        pooled=2 * SECONDS_OF_AN_EXAMPLE,
    )
    with_costs(monkeypatch, profile, head=costs)
    return lambda made: results_of(made, tmp_path)


def sizes_of(made: Scenario) -> list[int]:
    return [client_batches(made, None, 0, each.index, 0).dataset_size for each in made.clients]


@pytest.mark.parametrize("held", slow_unless(bool, [None, 200_000]))
def test_the_memory_of_the_least_device_bounds_what_the_chosen_head_reads(
    ran: Any, monkeypatch: pytest.MonkeyPatch, held: int | None
) -> None:
    features: set[int] = set()
    original = simulated_client._Role._sums

    def sums(self: Any, *given: Any) -> Any:
        found = original(self, *given)
        manifest = Manifest.of(self.elastic_client().model)
        features.add(len(decode_head_sums(found[0][0].tobytes(), manifest).means))
        return found

    monkeypatch.setattr(simulated_client._Role, "_sums", sums)
    fleet = [each | ({"memory_bytes": held} if held else {}) for each in TABLE["fleet"][1:]]
    method = {"policy": "full", "round_zero": "closed_form", "read": "auto", "plan": "none"}
    made = scenario(
        fleet=TABLE["fleet"][:1] + fleet, methods=["solved"], method={"solved": method},
        target={"method": "solved"}, data=TABLE["data"] | {"train_limit": 400}, **ONE_ROUND,
    )  # fmt: skip
    ran(made)
    (found,) = features
    bound = min(features_in_memory(200_000, size) for size in sizes_of(made)[2:])
    assert found <= bound if held else found > bound


@pytest.mark.slow
def test_who_is_asked_about_named_places_pays_for_a_pass_to_these_and_not_for_one_by_all(
    ran: Any, profile: CostProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    paid: list[float] = []
    original = simulated_client._Role._places

    def places(self: Any, arrays: Any, told: Any) -> Any:
        found = original(self, arrays, told)
        paid.append(found[2]["predicted-seconds"] / (min(told.examples, found[1]) / 16))
        return found

    monkeypatch.setattr(simulated_client._Role, "_places", places)
    shorter = replace(profile, forward_seconds=profile.forward_seconds / 8)
    monkeypatch.setattr(simulated_server, "profile_at", lambda *_: shorter)
    method = {"policy": "full", "round_zero": "closed_form", "plan": "none"}
    for read in ("auto", "conv1@grid2", "mirrored:auto"):
        ran(
            scenario(methods=["solved"], method={"solved": method | {"read": read}},
                     target={"method": "solved"}, **LITTLE, **ONE_ROUND)
        )  # fmt: skip
    saved = min(float(profile.cut_inference_seconds[-1] / profile.cut_plain_seconds[-1]), 1.0)
    of_batch = float(profile.forward_seconds[0]) * saved
    assert paid[:4] == pytest.approx([16 * 2 * SECONDS_OF_AN_EXAMPLE] * 4)
    assert paid[4:8] == pytest.approx([of_batch / 8] * 4)
    # Each image and its mirror image. The costs of a model that reads named ones are those of both.
    assert paid[8:] == pytest.approx([2 * each for each in paid[:4]])


def test_a_run_whose_head_reads_the_input_alone_ends_with_it(
    ran: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rounds train nothing and take no time, so that the time of the run would never be over."""
    method = {"policy": "full", "round_zero": "closed_form", "read": "input@flat"}
    training = TABLE["training"] | {"rounds": 40, "simulated_seconds": 1e4, "tests": 4}
    with caplog.at_level("INFO", "flwr"):
        cells = ran(
            scenario(training=training, methods=["solved"], method={"solved": method},
                     target={"method": "solved"})
        )  # fmt: skip
    assert sum("[ROUND " in each.message for each in caplog.records) == 1
    *_, last = cells["solved"].history
    assert last["simulated_seconds"] == 1e4 and last["accuracy"] > 0.8


def test_the_head_is_there_before_the_first_round_and_is_paid_for(
    ran: Any, profile: CostProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[int, int] = {}
    original = simulated_client._Role._sums

    def sums(self: Any, *given: Any) -> Any:
        found = original(self, *given)
        sizes.setdefault(self.client.index, len(found[0][0]))
        return found

    monkeypatch.setattr(simulated_client._Role, "_sums", sums)
    cells = ran(scenario())
    first, second, *_ = cells["solved"].history
    assert (first["round"], first["simulated_seconds"]) == (0, 0.0)
    assert second["round"] == 0
    assert second["accuracy"] > first["accuracy"] + 0.3
    assert first["accuracy"] == cells["plain"].history[0]["accuracy"]
    assert second["uplink_bytes"] == sum(sizes.values())
    received = second["downlink_bytes"] / 4
    slowdowns = [each.device.slowdown for each in scenario().clients]
    saved = profile.cut_inference_seconds[-1] / profile.cut_plain_seconds[-1]
    of_example = float(profile.forward_seconds[0] * min(saved, 1.0)) / 16
    # Rows of held-out examples are sent as they are, and their products are not added up.
    counts = sizes_of(scenario())
    added = [max(count - 320, 0) for count in counts]
    assert any(added) and not all(added)
    expected = max(
        (count * of_example + more * SECONDS_OF_AN_EXAMPLE) * slowdown
        + (sizes[client] + received) / BANDWIDTH
        for client, (count, more, slowdown) in enumerate(zip(counts, added, slowdowns, strict=True))
    )
    assert second["simulated_seconds"] == pytest.approx(expected, rel=1e-6)
    # Coverage and steps tell of rounds of training alone.
    assert len(next(iter(cells["solved"].coverage.values()))) == 2
    assert len(cells["solved"].steps) == len(cells["plain"].steps)


@pytest.mark.slow
def test_simulated_seconds_are_the_same_however_busy_the_host_is(
    ran: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"policy": "full", "round_zero": "closed_form", "cut": "moving", "solve_every": 1}
    made = scenario(
        method={"solved": method}, methods=["solved"], target={"method": "solved"}, **LITTLE,
        **ONE_ROUND,
    )  # fmt: skip
    before = [point["simulated_seconds"] for point in ran(made)["solved"].history]
    real = time.thread_time
    monkeypatch.setattr(time, "thread_time", lambda: 1000.0 * real())
    assert [point["simulated_seconds"] for point in ran(made)["solved"].history] == before


@pytest.mark.slow
def test_clients_look_at_all_of_their_data(ran: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = simulated_client.ElasticClient.fit

    def fit(self: Any, *given: Any) -> Any:
        found = original(self, *given)
        if "steps" not in found[2]:  # no training's reply
            seen.append(found[1])
        return found

    monkeypatch.setattr(simulated_client.ElasticClient, "fit", fit)
    made = scenario(methods=["solved"], target={"method": "solved"}, **LITTLE)
    ran(made)
    # Before the first round, and after the last.
    assert sorted(seen) == sorted([*sizes_of(made)] * 2)


def test_under_a_deadline_slow_clients_look_at_some_of_their_data_and_stand_for_all(
    ran: Any, profile: CostProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, tuple[int, int]] = {}
    original = simulated_client._Role._sums

    def sums(self: Any, *given: Any) -> Any:
        found = original(self, *given)
        counted = decode_head_sums(found[0][0].tobytes(), Manifest.of(self.slot.model()))
        seen[self.client.index] = counted.num_examples, found[1]
        return found

    monkeypatch.setattr(simulated_client._Role, "_sums", sums)
    method = TABLE["method"]["solved"] | {"budgeted": True}
    # Three of its batches are what a slow device gets to, twelve what a fast one does.
    deadline = {"seconds": 12.5 * simulated_client._inference_batch(profile)}
    made = scenario(
        method={"solved": method}, methods=["solved"], deadline=deadline,
        target={"method": "solved"},
    )  # fmt: skip
    ran(made)
    sizes = sizes_of(made)
    assert [seen[index][1] for index in range(4)] == sizes
    for index, size in enumerate(sizes):
        most = 12 if index < 2 else 3
        assert abs(seen[index][0] - min(size, 16 * most)) <= 1


@pytest.mark.slow
def test_asking_what_cuts_are_worth_takes_two_full_steps(ran: Any, profile: CostProfile) -> None:
    moving = {"policy": "full", "cut": "moving", "solve_every": 1}
    made = scenario(
        method={"fixed": {"policy": "full", "cut": "fixed:head"}, "moving": moving},
        methods=["fixed", "moving"], target={"method": "fixed"}, **LITTLE,
    )  # fmt: skip
    cells = ran(made)
    cell, fixed = cells["moving"], cells["fixed"]
    assert cell.history[-1]["round"] == 2 and cell.rejected == 0
    # The three fastest of four are asked, one of them slow.
    least = SLOWEST * 2 * profile.full_step_seconds
    assert cell.history[-1]["simulated_seconds"] > least
    assert cell.history[-1]["simulated_seconds"] > fixed.history[-1]["simulated_seconds"]


@pytest.mark.slow
def test_tests_at_equal_times_know_the_untrained_model_until_round_zero_is_over(ran: Any) -> None:
    training = TABLE["training"] | {
        "rounds": 50,
        "simulated_seconds": 24.0,
        "tests": 2,
        "learning_rate": 1e-9,
    }
    cell = ran(scenario(training=training, methods=["solved"], target={"method": "solved"}))[
        "solved"
    ]
    by_time = {row["simulated_seconds"]: row["accuracy"] for row in cell.history}
    assert by_time[0.0] == by_time[12.0] < by_time[24.0] - 0.3


@pytest.mark.parametrize("keep_features", slow_unless(bool, [True, False]))
def test_below_a_cut_only_what_lies_above_is_sent_and_paid_for(
    ran: Any, keep_features: bool
) -> None:
    method = TABLE["method"] | {
        "cut": {
            "policy": "full", "cut": "fixed:conv4", "round_zero": "closed_form",
            "keep_features": keep_features,
        }
    }  # fmt: skip
    made = scenario(method=method, methods=["plain", "cut"], **LITTLE)
    cells = ran(made)
    plain, cut = (cells[name].history for name in ("plain", "cut"))
    whole = plain[1]["downlink_bytes"] / 4
    first = cut[1]["downlink_bytes"] / 4
    assert first == pytest.approx(whole, rel=0.01)
    later = (cut[-1]["downlink_bytes"] - cut[1]["downlink_bytes"]) / 8
    assert later < 0.9 * whole
    trained = [
        any(shares) for shares in zip(*next(iter(cells["cut"].coverage.values())), strict=True)
    ]
    assert trained == [False, True, True, *[False] * (len(trained) - 3)]


@pytest.mark.slow
def test_who_keeps_to_a_cut_pays_for_knowing_where_it_lies(
    ran: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        simulated_server, "measure_choosing", lambda made, *_: flat_choosing(made, profile=3.0)
    )
    cut = {"policy": "full", "cut": "fixed:conv4"}
    method = TABLE["method"] | {"cut": cut, "both": cut | {"round_zero": "closed_form"}}
    cells = ran(scenario(method=method, methods=["plain", "cut", "both"], **LITTLE))
    assert cells["plain"].profile_seconds == 0.0
    # Two clients of each speed, once each.
    expected = 3.0 * 2 * (1.0 + SLOWEST)
    assert cells["cut"].profile_seconds == cells["both"].profile_seconds == expected


@pytest.mark.slow
def test_looking_up_features_is_cheaper_than_computing_them(ran: Any) -> None:
    made: dict[str, Any] = {"policy": "full", "cut": "fixed:norm4"}
    method = TABLE["method"] | {
        "kept": made, "computed": made | {"keep_features": False}
    }  # fmt: skip
    # So many rounds that each example comes back several times.
    data = TABLE["data"] | {"train_limit": 400}
    training = TABLE["training"] | {"rounds": 4, "evaluate_every": 4}
    quick = {"uplink_bytes_per_second": 1e12, "downlink_bytes_per_second": 1e12}
    fleet = [each | quick for each in TABLE["fleet"]]
    names = ["plain", "kept", "computed"]
    cells = ran(scenario(method=method, methods=names, data=data, training=training, fleet=fleet))
    found = {name: each.client_seconds for name, each in cells.items()}
    assert found["computed"] < found["plain"]
    # A round stays as long: it has as many more steps as these are cheaper. The first one computes the features.
    assert 0.5 * found["plain"] < found["kept"] < 1.5 * found["plain"]


def test_a_pass_that_the_deadline_ends_knows_how_much_data_there_is() -> None:
    """Or the features of all others would count as gone."""
    batches = client_batches(scenario(), None, 0, 0, 1, whole=True)
    begun = simulated_client._Begun(batches, 2)
    assert len(list(begun)) == len(begun) == 2
    first = next(iter(begun))
    assert (
        loader_size(begun, first) == LoaderSize(2, batches.dataset_size)
        and batches.dataset_size > 32
    )


@pytest.mark.slow
def test_where_time_ends_a_run_its_last_head_is_there_in_time(
    ran: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"policy": "full", "round_zero": "closed_form", "solve_every": 1000}
    table = {
        "method": {"solved": method}, "methods": ["solved"], "target": {"method": "solved"},
        "data": TABLE["data"] | {"test_limit": 40},
    }  # fmt: skip
    one_pass = ran(scenario(**table))["solved"].history[1]["simulated_seconds"]
    solved: list[int] = []
    original = AuxiliaryRounds.solve

    def solve(self: Any, *given: Any, **options: Any) -> Any:
        solved.append(given[2].server_round)
        return original(self, *given, **options)

    monkeypatch.setattr(AuxiliaryRounds, "solve", solve)
    limited = {"rounds": 1000, "simulated_seconds": 3.2 * one_pass, "tests": 20}
    cell = ran(scenario(**table, training=TABLE["training"] | limited))["solved"]
    # Round zero, the second, and the last one after which there is time for a pass.
    zero, second, last, *_ = solved
    assert (zero, second) == (0, 2) and last > 2
    assert cell.history[-1]["round"] == last


@pytest.mark.parametrize("peer", slow_unless("timelyfl".__eq__, ["timelyfl", "fedel"]))
def test_a_peer_goes_on_from_a_solved_head(
    ran: Any, peer: str, caplog: pytest.LogCaptureFixture
) -> None:
    methods = {
        "bare": {"peer": peer},
        "helped": {"peer": peer, "round_zero": "closed_form", "solve_every": 1},
    }
    data = TABLE["data"] | {"train_limit": 400}
    cells = ran(
        scenario(methods=list(methods), method=methods, target={"method": "bare"}, data=data)
    )
    bare, helped = cells["bare"].history, cells["helped"].history
    assert helped[1]["round"] == 0 and helped[1]["simulated_seconds"] > 0
    assert helped[1]["accuracy"] > bare[0]["accuracy"] + 0.3
    assert helped[-1]["accuracy"] > bare[-1]["accuracy"]
    # It trains after that, and all of it is merged.
    assert helped[-1]["round"] == 2 and helped[-1]["loss"] != helped[1]["loss"]
    assert cells["helped"].rejected == cells["bare"].rejected == 0
    assert "do not agree" not in caplog.text


def test_a_peer_has_no_cut_and_others_known_ones() -> None:
    method = {"other": {"peer": "timelyfl", "cut": "moving"}}
    with pytest.raises(ScenarioError, match="a peer knows no cut"):
        check_methods(scenario(methods=["other"], method=method, target={"method": "other"}))
    with pytest.raises(ScenarioError, match="cut 'low': known are none, fixed:GROUP, moving"):
        scenario(method={"solved": {"cut": "low"}, "plain": {}})
    with pytest.raises(ScenarioError, match="round_zero"):
        scenario(method={"solved": {"round_zero": "open"}, "plain": {}})
