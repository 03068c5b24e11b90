"""The summary of a simulation: what ``summary.json`` and the report say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from fl_elastic.environment import environment
from fl_elastic.groups import TensorGroup
from fl_elastic.groups.graph import GroupKind
from fl_elastic_simulations.engine.run_result import MeasuredSteps, RunResult
from fl_elastic_simulations.engine.summary import final_accuracy, summarise, without_curves
from fl_elastic_simulations.scenario import Scenario

SCENARIO: dict[str, Any] = {
    "title": "Three devices",
    "seeds": [0, 1],
    "methods": ["full", "elastic"],
    "data": {"dataset": "digits"},
    "model": {"name": "digits_cnn"},
    "training": {"rounds": 6},
    "fleet": [{"device": "pi_4b", "count": 2, "speedup": 3.0}, {"device": "laptop"}],
    "target": {"method": "full", "minus": 0.05},
}
GROUPS = (
    TensorGroup("head", ("head.weight",), ((2, 4),), GroupKind.OTHER),
    TensorGroup("stem", ("stem.weight",), ((4, 3),), GroupKind.OTHER),
)


def scenario(**changes: Any) -> Scenario:
    return Scenario.from_json(json.dumps(SCENARIO | changes))


def cell(
    method: str, seed: int, accuracies: Sequence[float], round_seconds: float = 10.0, **fields: Any
) -> RunResult:
    """A cell whose round r ends at r times ``round_seconds`` and has sent r MB up and 2 r MB down."""
    history = [
        {
            "seed": seed, "round": number, "accuracy": accuracy, "loss": 1 - accuracy,
            "simulated_seconds": number * round_seconds, "uplink_bytes": number * 1e6,
            "downlink_bytes": number * 2e6,
        }
        for number, accuracy in enumerate(accuracies)
    ]  # fmt: skip
    return RunResult(method, seed, history, **fields)


RISING = [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.9]
LATE = [0.1, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]


# As long as the mean of the last five is taken: a quarter of them is five.
LONG_RISING = [0.1, *[0.2] * 15, *RISING[-5:]]
LONG_LATE = [0.1, *[0.2] * 15, *LATE[-5:]]


def test_final_accuracy_is_the_mean_of_the_last_five_tests_and_seeds() -> None:
    cells = [cell("full", 0, LONG_RISING), cell("full", 1, LONG_LATE)]
    found = summarise(scenario(), cells, GROUPS)
    method = found["methods"]["full"]
    one, other = sum(RISING[-5:]) / 5, sum(LATE[-5:]) / 5
    assert method["final_accuracy"] == pytest.approx((one + other) / 2)
    assert method["final_accuracy_std"] == pytest.approx(abs(one - other) / 2**0.5)
    assert found["final_accuracy_rule"] == "mean of the last 5 tests, at most of the last quarter"


@pytest.mark.parametrize(("tests", "counted"), [(1, 1), (7, 1), (8, 2), (12, 3), (20, 5), (400, 5)])
def test_final_accuracy_counts_the_last_quarter_of_the_tests(tests: int, counted: int) -> None:
    accuracies = [0.0] * (tests - counted) + [0.5 + 0.1 * i for i in range(counted)]
    assert final_accuracy(accuracies) == pytest.approx(0.5 + 0.05 * (counted - 1))


def test_the_untrained_model_reaches_no_target() -> None:
    cells = [cell("full", 0, [0.9, 0.5, 0.6]), cell("elastic", 0, [0.9, 0.3, 0.6])]
    methods = summarise(scenario(), cells, GROUPS)["methods"]
    # The target is 0.55: a pretrained model is there before anything was trained.
    assert [methods[name]["seconds_to_target"] for name in methods] == [20, 20]


def test_costs_are_the_mean_over_seeds_at_the_end() -> None:
    cells = [cell("full", 0, RISING, 10.0), cell("full", 1, LATE, 20.0)]
    method = summarise(scenario(), cells, GROUPS)["methods"]["full"]
    assert method["simulated_seconds"] == pytest.approx(90)
    assert method["uplink_bytes"] == pytest.approx(6e6)
    assert method["downlink_bytes"] == pytest.approx(12e6)
    assert method["rounds"] == 6


def test_the_target_is_reached_by_the_mean_curve() -> None:
    cells = [cell("full", 0, RISING), cell("full", 1, RISING), cell("elastic", 0, LATE, 4.0)]
    found = summarise(scenario(), cells, GROUPS)
    target = 0.9 - 0.05
    assert found["target_accuracy"] == pytest.approx(target)
    assert found["target_rule"] == "final accuracy of full minus 5 points"
    # 0.85: RISING and LATE pass it in round 5.
    assert found["methods"]["full"]["seconds_to_target"] == pytest.approx(50)
    assert found["methods"]["elastic"]["seconds_to_target"] == pytest.approx(20)


def timed(method: str, seed: int, rows: list[tuple[int, float]]) -> RunResult:
    """Tests every ten seconds, each of the model of a round with an accuracy."""
    made = RunResult(method, seed)
    for index, (number, accuracy) in enumerate(rows):
        spent = {"simulated_seconds": 10.0 * index, "uplink_bytes": 0.0, "downlink_bytes": 0.0}
        made.evaluated(number, accuracy, 1.0, spent=spent, since=max(10.0 * index - 3.0, 0.0))
    return made


def test_tests_at_equal_times_belong_together_by_their_time() -> None:
    """The first round of one seed takes longer than ten seconds, and its models stand for several tests."""
    slow = timed("full", 0, [(0, 0.1), (0, 0.1), (1, 0.5), (1, 0.5), (2, 0.7)])
    fast = timed("full", 1, [(0, 0.1), (1, 0.3), (2, 0.7), (4, 0.9), (5, 0.9)])
    training = SCENARIO["training"] | {"simulated_seconds": 40.0, "tests": 4}
    made = scenario(methods=["full"], training=training, target={"method": "full", "minus": 0.25})
    found = summarise(made, [slow, fast], GROUPS)
    assert found["target_accuracy"] == pytest.approx(0.55)
    # Means at 10, 20 and 30 seconds are 0.2, 0.6 and 0.7.
    assert found["methods"]["full"]["seconds_to_target"] == pytest.approx(20)


def test_a_target_that_is_never_reached_has_no_time() -> None:
    cells = [cell("full", 0, RISING), cell("elastic", 0, [0.1] * 7)]
    assert summarise(scenario(), cells, GROUPS)["methods"]["elastic"]["seconds_to_target"] is None


def test_without_a_target_there_is_none() -> None:
    made = scenario(methods=["elastic"], target={"method": "elastic"})
    no_target = json.loads(made.to_json())
    del no_target["target"]
    found = summarise(
        Scenario.from_json(json.dumps(no_target)), [cell("elastic", 0, RISING)], GROUPS
    )
    assert found["target_accuracy"] is None
    assert found["target_rule"] is None
    assert found["methods"]["elastic"]["seconds_to_target"] is None


def test_speedups_compare_with_the_median_full_step_of_all_cells() -> None:
    full = [
        MeasuredSteps("laptop", seconds, 1.0, True) for seconds in (0.10, 0.12, 0.50)
    ]  # fmt: skip
    elastic = [
        MeasuredSteps("pi_4b", 0.06, 1.0, False),
        MeasuredSteps("pi_4b", 0.04, 0.5, False),
        MeasuredSteps("pi_4b", 0.04, 0.5, False),
    ]
    cells = [cell("full", 0, RISING, steps=full), cell("elastic", 0, LATE, steps=elastic)]
    found = summarise(scenario(), cells, GROUPS)["methods"]
    device = found["elastic"]["devices"]["pi_4b"]
    assert device["requested_speedup"] == 3.0
    assert device["step_speedup"] == pytest.approx(0.12 / 0.04)
    assert device["step_share"] == pytest.approx(2 / 3)
    assert device["achieved_speedup"] == pytest.approx(0.12 / ((0.06 + 0.02 + 0.02) / 3))
    assert found["full"]["devices"]["laptop"]["achieved_speedup"] == pytest.approx(
        0.12 / (0.72 / 3)
    )


def test_a_method_without_a_budget_asks_for_no_speedup() -> None:
    cells = [cell("full", 0, RISING), cell("elastic", 0, LATE)]
    found = summarise(scenario(), cells, GROUPS)["methods"]
    asked = {name: each["devices"]["pi_4b"]["requested_speedup"] for name, each in found.items()}
    assert asked == {"full": 1.0, "elastic": 3.0}


def test_without_a_measured_step_there_is_no_speedup() -> None:
    found = summarise(scenario(), [cell("full", 0, RISING)], GROUPS)["methods"]["full"]
    assert found["devices"]["pi_4b"]["achieved_speedup"] is None
    steps = [MeasuredSteps("pi_4b", 0.1, 1.0, False)]
    partial = summarise(scenario(), [cell("full", 0, RISING, steps=steps)], GROUPS)
    assert partial["methods"]["full"]["devices"]["pi_4b"]["achieved_speedup"] is None


def test_coverage_is_the_mean_over_seeds() -> None:
    cells = [
        cell("full", 0, RISING, coverage={"pi_4b": [[1.0, 0.5], [1.0, 1.0]]}),
        cell("full", 1, RISING, coverage={"pi_4b": [[1.0, 0.0], [0.0, 1.0]]}),
    ]
    found = summarise(scenario(), cells, GROUPS)["methods"]["full"]["coverage"]
    assert found == {"pi_4b": [[1.0, 0.25], [0.5, 1.0]]}


def test_it_says_what_was_simulated() -> None:
    found = summarise(scenario(), [cell("full", 0, RISING, rejected=2)], GROUPS)
    assert found["title"] == "Three devices"
    assert (found["dataset"], found["model"]) == ("digits", "digits_cnn")
    assert (found["clients"], found["rounds"], found["seeds"]) == (3, 6, [0, 1])
    assert found["simulated"] is True
    assert found["groups"] == ["head", "stem"]
    assert [(each["device"], each["count"]) for each in found["devices"]] == [
        ("pi_4b", 2), ("laptop", 1),
    ]  # fmt: skip
    assert list(found["methods"]) == ["full"]
    assert found["methods"]["full"]["rejected_updates"] == 2


def test_tests_at_equal_times_end_with_the_last_tenth_of_the_time() -> None:
    training = {"rounds": 6, "simulated_seconds": 200.0, "tests": 20}
    accuracies = [0.1] * 19 + [0.5, 0.9]
    found = summarise(scenario(training=training), [cell("full", 0, accuracies)], GROUPS)
    assert found["methods"]["full"]["final_accuracy"] == pytest.approx(0.7)
    assert found["final_accuracy_rule"] == "mean over the last tenth of the time"


def test_choosing_and_profiles_are_shares_of_all_clients_time() -> None:
    charged = {"client_seconds": 50.0, "choosing_seconds": 4.0, "profile_seconds": 1.0}
    cells = [cell("full", 0, RISING), cell("elastic", 0, RISING, **charged)]
    found = summarise(scenario(), [*cells, cell("elastic", 1, RISING, **charged)], GROUPS)[
        "methods"
    ]
    assert (found["elastic"]["choosing_share"], found["elastic"]["profile_share"]) == (0.08, 0.02)
    assert (found["full"]["choosing_share"], found["full"]["profile_share"]) == (0.0, 0.0)


def test_the_environment_names_versions() -> None:
    found = environment()
    assert set(found) == {"python", "machine", "fl-elastic", "torch", "flwr", "numpy", "date"}
    assert all(isinstance(value, str) and value for value in found.values())


def test_each_client_has_what_it_spent_and_how_good_the_model_is_for_its_classes() -> None:
    spent = {"rounds": 2, "seconds": 4.0, "uplink_bytes": 10.0, "downlink_bytes": 20.0}
    cells = [
        cell(
            "full", seed, RISING, labels=[[8, 0], [1, 3], [0, 4]], classes=[(9, 10), (5, 10)],
            clients={"0": spent},
        )
        for seed in (0, 1)
    ]  # fmt: skip
    found = summarise(scenario(), cells, GROUPS)
    assert found["labels"] == [[8, 0], [1, 3], [0, 4]]
    assert found["scenario"]["model"]["name"] == "digits_cnn"
    method = found["methods"]["full"]
    assert [row["accuracy"] for row in method["clients"]] == pytest.approx([0.9, 0.6, 0.5])
    assert method["worst_client"] == method["tenth_percentile"] == pytest.approx(0.5)
    assert [row["seconds"] for row in method["clients"]] == [4.0, 0.0, 0.0]
    assert [row["examples"] for row in method["clients"]] == [8, 4, 4]
    assert method["clients"][2]["device"] == "laptop"
    short = without_curves(found)
    assert "labels" not in short and "clients" not in short["methods"]["full"]


def test_worst_and_best_client_are_those_of_each_seed() -> None:
    """Each seed deals the classes anew, so that the mean over seeds of one client is that of no client."""
    cells = [
        cell("full", seed, RISING, labels=labels, classes=[(9, 10), (5, 10)])
        for seed, labels in enumerate(([[4, 0], [0, 4], [2, 2]], [[0, 4], [4, 0], [2, 2]]))
    ]
    method = summarise(scenario(), cells, GROUPS)["methods"]["full"]
    assert [row["accuracy"] for row in method["clients"]] == pytest.approx([0.7, 0.7, 0.7])
    assert method["worst_client"] == pytest.approx(0.5)
    assert method["best_client"] == pytest.approx(0.9)


def test_the_share_of_the_largest_class_is_that_of_the_test_examples() -> None:
    tested = cell("full", 0, RISING, classes=[(9, 10), (5, 30), (0, 0)])
    assert summarise(scenario(), [tested], GROUPS)["largest_class"] == 0.75
    for unknown in ([], [(0, 0)]):
        tested = cell("full", 0, RISING, classes=unknown)
        assert summarise(scenario(), [tested], GROUPS)["largest_class"] is None


def test_a_cell_of_before_is_still_read() -> None:
    text = json.loads(cell("full", 0, RISING).to_json())
    for name in ("clients", "labels", "classes", "rejections", "peaks"):
        del text[name]
    assert RunResult.from_json(json.dumps(text)).classes == []


def test_rejections_are_told_with_seed_and_round() -> None:
    cells = [
        cell("full", seed, RISING, rejections={"late": {"2": 3, "4": seed + 1}}) for seed in (0, 1)
    ]
    found = summarise(scenario(), cells, GROUPS)
    told = found["methods"]["full"]["rejections"]
    assert [(row["seed"], row["round"], row["updates"]) for row in told] == [
        (0, 2, 3), (0, 4, 1), (1, 2, 3), (1, 4, 2),
    ]  # fmt: skip
    assert {row["reason"] for row in told} == {"late"}
    assert "rejections" not in without_curves(found)["methods"]["full"]


def test_memory_is_told_of_each_class() -> None:
    fleet = [
        {"device": "pi_4b", "count": 2, "memory_bytes": 4_000_000},
        {"device": "laptop"},
    ]
    cells = [cell("full", seed, RISING, peaks={"pi_4b": 3e6 + seed}) for seed in (0, 1)]
    found = summarise(scenario(fleet=fleet), cells, GROUPS)
    assert [d["memory_bytes"] for d in found["devices"]] == [4_000_000, None]
    board, laptop = found["methods"]["full"]["devices"].values()
    assert board["peak_bytes"] == 3e6 + 1 and laptop["peak_bytes"] is None


def test_entries_of_one_device_are_classes_of_their_own_where_they_differ() -> None:
    fleet = [
        {"device": "pi_4b"},
        {"device": "pi_4b", "slowdown": 40.0, "memory_bytes": 4_000_000},
        {"device": "laptop"},
        {"device": "laptop", "count": 2},
    ]
    slow = "pi_4b, slowdown 40, memory in bytes 4000000"
    found = summarise(scenario(fleet=fleet), [cell("full", 0, RISING, peaks={slow: 3e6})], GROUPS)
    fast, slower, laptops = found["devices"]
    assert (slower["device"], slower["slowdown"], slower["count"]) == (slow, 40.0, 1)
    assert fast["label"] != slower["label"] and "slowdown 40" in slower["label"]
    assert fast["memory_bytes"] is None and slower["memory_bytes"] == 4_000_000
    assert (laptops["device"], laptops["count"]) == ("laptop", 3)
    peaks = {n: d["peak_bytes"] for n, d in found["methods"]["full"]["devices"].items()}
    assert peaks == {fast["device"]: None, slow: 3e6, "laptop": None}
