"""Metrics of continual learning against figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fl_elastic.errors import StreamError
from fl_elastic_simulations.benchmarks import stream_metrics as metrics

# Three tasks; the row says after which one, the column on which one.
TABLE = [[0.9, 0.1, 0.1], [0.6, 0.8, 0.2], [0.5, 0.7, 0.9]]


def test_over_tasks() -> None:
    assert metrics.average_accuracy(TABLE) == pytest.approx(0.70)
    # (0.9 + (0.6 + 0.8) / 2 + (0.5 + 0.7 + 0.9) / 3) / 3
    assert metrics.anytime_accuracy(TABLE) == pytest.approx(2.3 / 3)
    # ((0.9 - 0.5) + (0.8 - 0.7)) / 2
    assert metrics.forgetting(TABLE) == pytest.approx(0.25)
    # ((0.5 - 0.9) + (0.7 - 0.8)) / 2
    assert metrics.backward_transfer(TABLE) == pytest.approx(-0.25)
    # ((0.1 - 0.05) + (0.2 - 0.1)) / 2
    assert metrics.forward_transfer(TABLE, [0.3, 0.05, 0.1]) == pytest.approx(0.075)


def test_the_best_of_a_task_may_come_before_it_was_trained() -> None:
    table = [[0.9, 0.85, 0.1], [0.6, 0.8, 0.2], [0.5, 0.7, 0.9]]
    assert metrics.forgetting(table) == pytest.approx((0.4 + 0.15) / 2)
    # What was reached in the end only is no forgetting, but a gain.
    assert metrics.forgetting([[0.5, 0.1], [0.7, 0.9]]) == pytest.approx(-0.2)


def test_prequential_accuracy() -> None:
    assert metrics.prequential_accuracy([1, 0, 1], fading=0.5).tolist() == pytest.approx(
        [1.0, 0.5 / 1.5, 1.25 / 1.75]
    )
    plain = metrics.prequential_accuracy([True, True, False, True], fading=1.0)
    assert plain.tolist() == pytest.approx([1, 1, 2 / 3, 3 / 4])
    assert len(metrics.prequential_accuracy([])) == 0


def test_recovery() -> None:
    accuracy = np.array([0.5, 0.8, 0.8, 0.78, 0.6, 0.7, 0.75, 0.77, 0.8])
    # 95 % of 0.8 is 0.76: below it from the fourth to the sixth, back at the seventh.
    assert metrics.recovery(accuracy, drift=3) == 4
    assert metrics.recovery(accuracy, drift=3, share=0.5) == 0
    assert math.isnan(metrics.recovery(accuracy[:7], drift=3))


def test_drifts_and_alarms() -> None:
    alarms, drifts = [5, 120, 130, 420, 650], [100, 300, 600]
    delays = metrics.drift_delays(alarms, drifts, within=100)
    assert delays[0] == 20 and math.isnan(delays[1]) and delays[2] == 50
    assert metrics.false_alarms(alarms, drifts, within=100) == 2
    # An alarm belongs to the latest drift.
    assert metrics.drift_delays([205], [100, 200], within=500)[1] == 5
    assert math.isnan(metrics.drift_delays([205], [100, 200], within=500)[0])
    assert metrics.false_alarms([], [], within=1) == 0 == len(metrics.drift_delays([3], [], 1))


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.average_accuracy([[0.5, 0.5]]),
        lambda: metrics.forgetting([[0.5]]),
        lambda: metrics.forward_transfer(TABLE, [0.1]),
        lambda: metrics.recovery([0.5], drift=0),
        lambda: metrics.prequential_accuracy([1], fading=0.0),
    ],
)
def test_what_cannot_be_measured_is_said(call: object) -> None:
    assert callable(call)
    with pytest.raises(StreamError):
        call()
