"""The mean of the global models against the sum written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.aggregation import ModelAverage
from fl_elastic.aggregation.averaging import AverageState
from fl_elastic.errors import SettingError
from fl_elastic.state.codec import from_archive, to_archive


def written_out(values: list[float], decay: float) -> float:
    """Each model's share: what it got when it came, times what every later one left of it."""
    keeps = [0.0] + [min(decay, rounds / (rounds + 10)) for rounds in range(1, len(values))]
    total = 0.0
    for index, value in enumerate(values):
        total += value * (1 - keeps[index]) * np.prod(keeps[index + 1 :])
    return total


@given(
    st.lists(st.floats(-100, 100), min_size=1, max_size=30),
    st.floats(0.01, 0.99),
    st.integers(0, 29),
)
def test_it_is_the_weighted_sum_also_across_a_restart(
    values: list[float], decay: float, restart: int
) -> None:
    average = ModelAverage(decay)
    for index, value in enumerate(values):
        average.add({"w": np.array([value, -value], np.float64)})
        if index == restart:
            kept, average = average.to_state(), ModelAverage(decay)
            average.restore(kept)
    expected = written_out(values, decay)
    np.testing.assert_allclose(average.weights()["w"], [expected, -expected], atol=1e-9)
    assert average.rounds == len(values)


def test_types_stay_and_integer_buffers_are_the_newest() -> None:
    average = ModelAverage(0.5)
    for count in (1, 2, 3):
        average.add(
            {"norm/x": np.array([count], np.float16), "norm.batches": np.array(count, np.int64)}
        )
    again = ModelAverage(0.5)
    again.restore(from_archive(AverageState, to_archive(average.to_state())))
    for each in (average, again):
        weights = each.weights()
        assert weights["norm.batches"] == 3
        assert {name: value.dtype.name for name, value in weights.items()} == {
            "norm/x": "float16", "norm.batches": "int64",
        }  # fmt: skip
        assert 2 < float(weights["norm/x"][0]) < 3


def test_what_is_handed_out_is_no_view_of_it() -> None:
    average = ModelAverage()
    first = np.ones(2, np.float64)
    average.add({"w": first})
    first[:] = 7
    average.weights()["w"][:] = 9
    assert average.weights()["w"].tolist() == [1, 1]


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, float("nan")])
def test_an_impossible_decay_is_refused(decay: float) -> None:
    with pytest.raises(SettingError, match="between 0 and 1"):
        ModelAverage(decay)


def test_a_mean_that_begins_anew_holds_nothing_of_earlier_models() -> None:
    average, fresh = ModelAverage(0.5), ModelAverage(0.5)
    for value in (7.0, -3.0):
        average.add({"w": np.array([value])})
    average.begin_anew({"w": np.array([1.0])})
    fresh.add({"w": np.array([1.0])})
    for each in (average, fresh):
        each.add({"w": np.array([2.0])})
    assert average.rounds == fresh.rounds == 2
    np.testing.assert_array_equal(average.weights()["w"], fresh.weights()["w"])
