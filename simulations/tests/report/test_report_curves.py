"""Means over seeds."""

from __future__ import annotations

from fl_elastic_simulations.report.figures import mean_curve
from fl_elastic_simulations.report.summary import Point


def point(seed: int, number: int, accuracy: float, seconds: float | None, sent: float) -> Point:
    return Point(
        seed=seed, round=number, accuracy=accuracy, simulated_seconds=seconds, uplink_bytes=sent
    )


def test_the_curve_is_the_mean_between_lowest_and_highest() -> None:
    history = [
        point(seed, index, accuracy, 10.0 * index + seed, 100.0 * index)
        for seed, accuracies in enumerate(((0.1, 0.5), (0.2, 0.9), (0.3, 0.7)))
        for index, accuracy in enumerate(accuracies)
    ]
    curve = mean_curve(history[::-1])
    assert curve["round"].tolist() == [0, 1]
    assert curve["accuracy"].round(9).tolist() == [0.2, 0.7]
    assert curve[["lowest", "highest"]].values.tolist() == [[0.1, 0.3], [0.5, 0.9]]
    assert curve["simulated_seconds"].tolist() == [1.0, 11.0]
    assert curve["uplink_bytes"].tolist() == [0.0, 100.0]


def test_tests_at_equal_times_are_averaged_time_by_time() -> None:
    """A model may stand for several tests, and seeds are in other rounds at the same time."""
    history = [
        Point(seed=seed, round=number, accuracy=accuracy, simulated_seconds=10.0 * index, since=0.0)
        for seed, rows in enumerate(
            ([(0, 0.1), (1, 0.5), (1, 0.5)], [(0, 0.3), (2, 0.7), (4, 0.9)])
        )
        for index, (number, accuracy) in enumerate(rows)
    ]
    curve = mean_curve(history)
    assert curve["simulated_seconds"].tolist() == [0.0, 10.0, 20.0]
    assert curve["accuracy"].round(9).tolist() == [0.2, 0.6, 0.7]
    assert curve["round"].tolist() == [0.0, 1.5, 2.5]


def test_an_unknown_time_leaves_only_the_time_out() -> None:
    curve = mean_curve([point(0, 0, 0.1, None, 0.0), point(0, 1, 0.2, 5.0, 8.0)])
    assert "simulated_seconds" not in curve and curve["uplink_bytes"].tolist() == [0.0, 8.0]


def test_no_history_gives_an_empty_curve() -> None:
    assert mean_curve([]).empty
