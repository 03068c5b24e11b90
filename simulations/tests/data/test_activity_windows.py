"""Windows of activity: resampled to 50 Hz, labelled by majority, split in time per person."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fl_elastic.errors import DatasetError
from fl_elastic_simulations.data.activity_windows import activity_windows

Arrays = dict[str, npt.NDArray[Any]]


def _recording(times: npt.NDArray[Any], switch: int) -> Arrays:
    """Six channels that are straight lines in time; activity 1 from ``switch`` on, before it 0."""
    seconds = times / 1000
    return {
        "x": np.stack([(channel + 1) * seconds for channel in range(6)], axis=1),
        "t_ms": times,
        "label": (times >= switch).astype(np.uint8),
    }


def _together(recordings: list[Arrays], subject: list[int], execution: list[int]) -> Arrays:
    joined = {
        key: np.concatenate([one[key] for one in recordings]) for key in ("x", "t_ms", "label")
    }
    joined["off"] = np.cumsum([0, *[len(one["t_ms"]) for one in recordings]])
    joined["subject"] = np.array(subject, np.uint8)
    joined["execution"] = np.array(execution, np.uint8)
    return joined


def test_irregular_and_repeated_samples_are_brought_to_50_hertz() -> None:
    rng = np.random.default_rng(0)
    times = np.sort(rng.choice(np.arange(0, 6001), 700, replace=False))
    times[0], times[-1] = 0, 6000
    times = np.sort(np.concatenate([times, times[100:130]]))  # some samples come twice
    windows = activity_windows(_together([_recording(times, 10_000)], [1], [1]))
    # 301 samples at 50 Hz hold windows starting at 0, 64 and 128.
    assert windows.x.shape == (3, 6, 128)
    assert windows.x.dtype == np.float32
    for number in range(3):
        expected = (64 * number + np.arange(128)) * 0.020
        for channel in range(6):
            assert np.allclose(windows.x[number, channel], (channel + 1) * expected, atol=1e-4)


def test_samples_of_equal_time_are_averaged() -> None:
    times = np.arange(0, 2600, 20)
    recording = _recording(times, 10_000)
    recording["x"] = np.zeros((len(times), 6))
    doubled = {key: np.repeat(value, 2, axis=0) for key, value in recording.items()}
    doubled["x"][1::2] = 4.0
    windows = activity_windows(_together([doubled], [1], [1]))
    assert np.allclose(windows.x, 2.0)


@pytest.mark.parametrize(("switch", "label"), [(1000, 1), (1500, 0)])
def test_a_window_takes_the_activity_that_fills_most_of_it(switch: int, label: int) -> None:
    times = np.arange(0, 128 * 20, 10)
    windows = activity_windows(_together([_recording(times, switch)], [1], [1]))
    assert windows.y.tolist() == [label]


def test_the_last_executions_of_each_person_are_late_on_both_devices() -> None:
    times = np.arange(0, 3000, 10)
    subject = [1] * 8 + [2] * 4
    execution = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 9, 9]  # phone and watch of each execution
    windows = activity_windows(
        _together([_recording(times, 10_000) for _ in subject], subject, execution)
    )
    # Person 1: 4 executions, 30 % rounded up are 2. Person 2: 2 executions, so the last one.
    expected = [False] * 4 + [True] * 4 + [False] * 2 + [True] * 2
    assert windows.late.tolist() == expected
    assert windows.subject.tolist() == subject


def test_windows_do_not_cross_recordings() -> None:
    short = np.arange(0, 2000, 10)  # 100 samples at 50 Hz: less than a window
    long = np.arange(0, 2600, 10)
    recordings = [_recording(times, 10_000) for times in (short, short, long)]
    windows = activity_windows(_together(recordings, [1, 1, 2], [1, 2, 1]))
    assert windows.subject.tolist() == [2]


def test_too_short_recordings_are_refused() -> None:
    with pytest.raises(DatasetError, match=r"no recording lasts 2\.56 s"):
        activity_windows(_together([_recording(np.arange(0, 500, 10), 0)], [1], [1]))


@pytest.mark.parametrize("key", ["x", "t_ms", "label", "off", "subject", "execution"])
def test_arrays_that_do_not_fit_are_refused(key: str) -> None:
    arrays = _together([_recording(np.arange(0, 3000, 10), 0)], [1], [1])
    arrays[key] = arrays[key][:-1]
    with pytest.raises(DatasetError, match="do not fit"):
        activity_windows(arrays)
