"""Which tensors changed since a version, against a list of all models."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fl_elastic.errors import UpdateError
from fl_elastic.flower.downlink import ChangeLog
from fl_elastic.state.codec import from_archive, to_archive

Weights = dict[str, NDArray[Any]]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, Weights]]:
    """Draw models of increasing versions, whose tensors may also change back."""
    steps = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    values = st.fixed_dictionaries({name: st.integers(0, 2) for name in "abc"})
    return [
        (
            int(sum(steps[: index + 1])),
            {name: np.full(2, value) for name, value in draw(values).items()},
        )
        for index in range(len(steps))
    ]


def log_of(history: list[tuple[int, Weights]]) -> ChangeLog:
    log = ChangeLog()
    old: Weights = {}
    for version, new in history:
        log.record(version, old, new)
        old = new
    return log


@given(history=histories(), restarted=st.booleans())
def test_the_log_names_what_changed_at_any_later_version(
    history: list[tuple[int, Weights]], restarted: bool
) -> None:
    log = log_of(history)
    if restarted:
        log = from_archive(ChangeLog, to_archive(log))
    known = dict(history)
    for version in range(-1, 20):
        found = log.since(version)
        if version not in known:
            assert found is None
            continue
        models = [model for at, model in history if at >= version]
        changed = {
            name
            for name in "abc"
            for before, after in pairwise(models)
            if before[name][0] != after[name][0]
        }
        assert found == frozenset(changed)


@pytest.mark.parametrize(
    ("old", "new", "differ"),
    [
        (np.float32(0.0), np.float32(-0.0), True),
        (np.zeros(2, np.float32), np.zeros(2, np.float64), True),
        (np.zeros((2, 1)), np.zeros((1, 2)), True),
        (np.array(5), np.array(5), False),
        (np.zeros((0, 3)), np.zeros((0, 3)), False),
        (np.arange(6.0).reshape(2, 3).T, np.arange(6.0).reshape(2, 3).T.copy(), False),
        (np.array([True]), np.array([False]), True),
    ],
    ids=str,
)
def test_tensors_are_compared_bit_by_bit(old: Any, new: Any, differ: bool) -> None:
    log = ChangeLog()
    log.record(1, {}, {"w": np.asarray(old)})
    log.record(2, {"w": np.asarray(old)}, {"w": np.asarray(new)})
    assert log.since(1) == frozenset("w" if differ else "")


@pytest.mark.parametrize("version", [3, 2, 1])
def test_a_server_that_goes_back_starts_the_log_anew(version: int) -> None:
    models = [{"w": np.full(2, value), "v": np.zeros(1)} for value in range(4)]
    log = log_of(list(enumerate(models)))
    log.record(version, models[0], {"w": np.full(2, 9), "v": np.zeros(1)})
    assert log.since(version) == frozenset()
    assert all(log.since(other) is None for other in range(5) if other != version)


@pytest.mark.parametrize(
    ("versions", "changed"),
    [([2, 1], {}), ([1, 1], {}), ([-1], {}), ([1], {"w": 2}), ([2**80], {})],
    ids=str,
)
def test_what_no_log_can_know_is_refused(versions: list[int], changed: dict[str, int]) -> None:
    with pytest.raises(UpdateError, match="do not increase"):
        ChangeLog(versions, changed)
