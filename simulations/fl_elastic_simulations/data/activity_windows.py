"""Cut recordings of human activity into windows of equal length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_elastic.errors import DatasetError
from fl_elastic_simulations.data.datasets import Dataset
from fl_elastic_simulations.data.files import npz_arrays

WINDOW = 128
STRIDE = 64
STEP_MS = 20  # 50 Hz
TEST_SHARE = 0.3


@dataclass(frozen=True)
class ActivityWindows:
    """Windows of all recordings, one row each.

    Parameters
    ----------
    x : array of float32
        Inputs, shape (windows, channels, samples).
    y : array of int64
        Most frequent activity within each window.
    subject : array of int64
        Person who was recorded.
    late : array of bool
        Whether the window is from the last recordings of that person.
    """

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int64]
    subject: npt.NDArray[np.int64]
    late: npt.NDArray[np.bool_]


def activity_windows(arrays: dict[str, npt.NDArray[Any]]) -> ActivityWindows:
    """Resample each recording to 50 Hz and cut it into windows of 128 samples, stride 64.

    The sensors deliver about 100 samples a second at irregular times, some twice: samples of equal
    time are averaged, and the result is interpolated linearly. A window lasts 2.56 s and gets the
    activity that fills most of it (the median activity lasts 1.3 s, so many windows contain two).
    The rest at the end of a recording is dropped.

    Recordings are split by time: the last 30 % of each person's executions, rounded up, are ``late`` and meant for
    testing. Phone and watch of one execution are on the same side, and no window crosses the border, so the test
    contains no training data; the people are the same.

    Parameters
    ----------
    arrays : dict
        ``x`` (samples, channels), ``t_ms`` and ``label`` per sample; ``off``, the start of each recording;
        ``subject`` and ``execution`` per recording.

    Raises
    ------
    DatasetError
        If the arrays do not fit together or contain no whole window.
    """
    offsets = arrays["off"]
    subjects, executions = arrays["subject"], arrays["execution"]
    fits = (
        len(offsets) == len(subjects) + 1 == len(executions) + 1
        and len(arrays["x"]) == len(arrays["t_ms"]) == len(arrays["label"]) == offsets[-1]
    )
    if not fits:
        raise DatasetError(
            f"har: {len(offsets) - 1} recordings and {len(arrays['x'])} samples do not fit the "
            "other arrays: the file is damaged, fetch it again"
        )
    first_late = {
        int(subject): _first_late(executions[subjects == subject]) for subject in set(subjects)
    }
    x, y, subject_of, late = [], [], [], []
    for number, (start, stop) in enumerate(pairwise(offsets)):
        samples, labels = _resample(
            arrays["x"][start:stop], arrays["t_ms"][start:stop], arrays["label"][start:stop]
        )
        for begin in range(0, len(samples) - WINDOW + 1, STRIDE):
            x.append(samples[begin : begin + WINDOW].T)
            y.append(np.bincount(labels[begin : begin + WINDOW]).argmax())
            subject_of.append(subjects[number])
            late.append(executions[number] >= first_late[int(subjects[number])])
    if not x:
        raise DatasetError(f"har: no recording lasts {WINDOW * STEP_MS / 1000} s: fetch it again")
    return ActivityWindows(
        np.stack(x).astype(np.float32),
        np.asarray(y, np.int64),
        np.asarray(subject_of, np.int64),
        np.asarray(late, np.bool_),
    )


def _first_late(executions: npt.NDArray[Any]) -> int:
    numbers = np.unique(executions)
    return int(numbers[len(numbers) - math.ceil(TEST_SHARE * len(numbers))])


def _resample(
    x: npt.NDArray[Any], times: npt.NDArray[Any], labels: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    if len(times) == 0:
        return np.empty((0, x.shape[1])), np.empty(0, np.int64)
    moments, first, which = np.unique(times, return_index=True, return_inverse=True)
    repeats = np.bincount(which)
    grid = np.arange(moments[0], moments[-1] + 1, STEP_MS)
    channels = [
        np.interp(grid, moments, np.bincount(which, weights=channel) / repeats) for channel in x.T
    ]
    at = np.searchsorted(moments, grid, side="right") - 1  # the latest sample not after the moment
    return np.stack(channels, axis=1), labels[first][at].astype(np.int64)


def har(root: Path) -> Dataset:
    """Return windows of human activity from phone and watch, 128 samples at 50 Hz; owner: the person.

    See `activity_windows`. Mean and standard deviation of each channel are those of the training windows.
    """
    arrays = npz_arrays(
        "har",
        root / "har_phone_watch" / "har_raw_100hz.npz",
        ("x", "t_ms", "label", "off", "subject", "execution", "labels"),
    )
    windows = activity_windows(arrays)
    mean = np.array([-5.10, -1.45, 0.16, -0.01, 0.02, 0.03], dtype=np.float32)[:, None]
    std = np.array([5.33, 6.53, 3.75, 1.41, 1.25, 1.04], dtype=np.float32)[:, None]
    x = (windows.x - mean) / std
    train, test = ~windows.late, windows.late
    return Dataset(
        "har",
        x[train],
        windows.y[train],
        x[test],
        windows.y[test],
        classes=len(arrays["labels"]),
        input_shape=(6, 128),
        owners=windows.subject[train],
    )
