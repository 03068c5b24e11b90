"""Means over seeds."""

from __future__ import annotations

from fl_elastic_simulations.report.figures import mean_curve
from fl_elastic_simulations.report.summary import Point


def test_the_curve_is_the_mean_between_lowest_and_highest() -> None:
    history = [
        Point(seed, index, accuracy, 10.0 * index + seed, 100.0 * index)
        for seed, accuracies in enumerate(((0.1, 0.5), (0.2, 0.9), (0.3, 0.7)))
        for index, accuracy in enumerate(accuracies)
    ]
    curve = mean_curve(history)
    assert curve.rounds == (0, 1)
    assert [round(value, 9) for value in curve.accuracy] == [0.2, 0.7]
    assert (curve.lowest, curve.highest) == ((0.1, 0.5), (0.3, 0.9))
    assert (curve.seconds, curve.uplink_bytes, curve.seeds) == ((1.0, 11.0), (0.0, 100.0), 3)


def test_rounds_are_put_in_order() -> None:
    history = [Point(0, index, index / 10, float(index), 0.0) for index in (2, 0, 1)]
    assert mean_curve(history).seconds == (0.0, 1.0, 2.0)


def test_an_unknown_time_leaves_only_the_time_out() -> None:
    curve = mean_curve([Point(0, 0, 0.1, None, 0.0), Point(0, 1, 0.2, 5.0, 8.0)])
    assert (curve.seconds, curve.uplink_bytes) == ((), (0.0, 8.0))


def test_no_history_gives_an_empty_curve() -> None:
    curve = mean_curve([])
    assert (curve.rounds, curve.accuracy, curve.seconds, curve.seeds) == ((), (), (), 0)
