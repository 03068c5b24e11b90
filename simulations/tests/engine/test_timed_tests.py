"""Tests at equal simulated times, whatever rounds take."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.engine.timed_tests import TimedTests, Weights
from fl_elastic_simulations.scenario import Scenario
from fl_elastic_simulations.scenario.sections import TrainingSection


def training(seconds: float = 10.0, tests: int = 5, rounds: int = 100) -> TrainingSection:
    return TrainingSection(
        rounds, 1, 16, "sgd", 0.1, 0.0, 0.0, 1.0, simulated_seconds=seconds, tests=tests
    )


def run(section: TrainingSection, *round_seconds: float) -> tuple[RunResult, list[int]]:
    """A cell whose model is as good as its round is late, and the rounds that were tested."""
    cell, tested = RunResult("uneven", 0), []

    def test(weights: Weights, server_round: int) -> tuple[float, float]:
        assert server_round == weights["round"]
        tested.append(server_round)
        return float(weights["round"]) / 100, 1.0

    timed = TimedTests(section, cell, test, lambda *_: None)
    timed.after_round(0, {"round": np.array(0)})
    for number, seconds in enumerate(round_seconds, start=1):
        cell.spent["simulated_seconds"] += seconds
        cell.spent["uplink_bytes"] += 7.0
        timed.after_round(number, {"round": np.array(number)})
    return cell, tested


def column(cell: RunResult, name: str) -> list[Any]:
    return [row[name] for row in cell.rows()]


def test_each_test_is_of_the_newest_model_whose_round_had_ended() -> None:
    # Rounds end at 1, 1.5, 6.5, 7, 8 and 11: tests come at 2, 4, 6, 8 and 10.
    cell, tested = run(training(), 1.0, 0.5, 5.0, 0.5, 1.0, 3.0)
    assert column(cell, "simulated_seconds") == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    # A round that ends at the very time of a test counts; the one that ends after the time is up does not.
    assert column(cell, "round") == [0, 2, 2, 2, 5, 5]
    assert column(cell, "accuracy") == [0.0, 0.02, 0.02, 0.02, 0.05, 0.05]
    assert column(cell, "since") == [0.0, 1.5, 1.5, 1.5, 8.0, 8.0]
    # Bytes are those of the rounds that had ended.
    assert column(cell, "uplink_bytes") == [0.0, 14.0, 14.0, 14.0, 35.0, 35.0]
    assert tested == [0, 2, 5]


def test_the_untrained_model_stands_until_a_round_has_ended() -> None:
    cell, tested = run(training(), 7.0, 7.0)
    assert column(cell, "round") == [0, 0, 0, 0, 1, 1] and tested == [0, 1]


def test_a_round_that_ends_with_the_time_is_the_last_test() -> None:
    cell, _ = run(training(), 5.0, 5.0)
    assert column(cell, "round") == [0, 0, 0, 1, 1, 2]


def test_where_rounds_run_out_first_the_last_model_stands() -> None:
    cell, tested = run(training(rounds=2), 1.0, 1.0)
    assert column(cell, "round") == [0, 2, 2, 2, 2, 2] and tested == [0, 2]


def test_methods_of_long_and_short_rounds_are_tested_at_the_same_times() -> None:
    many, _ = run(training(tests=40), *[0.07] * 150)
    few, tested = run(training(tests=40), *[3.4] * 3)
    assert column(many, "simulated_seconds") == column(few, "simulated_seconds")
    assert tested == [0, 1, 2]


def test_tests_in_time_need_a_time() -> None:
    table = {
        "data": {"dataset": "digits"}, "model": {"name": "digits_cnn"},
        "training": {"rounds": 3, "tests": 40}, "fleet": [{"device": "pi_5"}],
    }  # fmt: skip
    with pytest.raises(ScenarioError, match=r"training\.tests: give simulated_seconds"):
        Scenario.from_json(json.dumps(table))
