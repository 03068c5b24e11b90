"""The budget: what it allows per step, and what it refuses."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.budget import Budget
from fl_elastic.errors import BudgetError

positive = st.floats(1e-6, 1e6)


def test_no_limit_allows_any_step() -> None:
    assert Budget().allowed_step_seconds(1e9, steps=10**6) == math.inf
    assert Budget(speedup=1).allowed_step_seconds(1e-9) == math.inf
    assert Budget(memory=1.0, uplink=1.0).allowed_step_seconds(5.0) == math.inf


@given(full=positive, speedup=st.floats(1, 1e6, exclude_min=True), steps=st.integers(1, 10**6))
def test_speedup_divides_the_full_step_whatever_the_number_of_steps(
    full: float, speedup: float, steps: int
) -> None:
    allowed = Budget(speedup=speedup).allowed_step_seconds(full, steps)
    assert math.isclose(allowed * speedup, full, rel_tol=1e-12)


@given(full=positive, deadline=positive, steps=st.integers(1, 10**6))
def test_deadline_is_spread_over_the_steps(full: float, deadline: float, steps: int) -> None:
    allowed = Budget(deadline=deadline).allowed_step_seconds(full, steps)
    assert math.isclose(allowed * steps, deadline, rel_tol=1e-12)


@given(
    full=positive,
    deadline=positive,
    speedup=st.floats(1, 100, exclude_min=True),
    steps=st.integers(1, 1000),
)
def test_the_tighter_of_two_time_limits_counts(
    full: float, deadline: float, speedup: float, steps: int
) -> None:
    both = Budget(speedup=speedup, deadline=deadline).allowed_step_seconds(full, steps)
    assert both == min(full / speedup, deadline / steps)


def test_a_deadline_for_no_step_is_the_deadline() -> None:
    assert Budget(deadline=2.0).allowed_step_seconds(1.0, steps=0) == 2.0


@pytest.mark.parametrize("name", ["speedup", "deadline", "memory", "uplink"])
@pytest.mark.parametrize("value", [0, -1, -0.5, math.nan, math.inf, -math.inf, True, "2", [3]])
def test_what_is_no_positive_number_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BudgetError) as caught:
        Budget(**{name: value})
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("speedup", [0.999, 0.5, 1e-9])
def test_a_speedup_below_one_is_refused(speedup: float) -> None:
    with pytest.raises(BudgetError, match="below 1"):
        Budget(speedup=speedup)


@pytest.mark.parametrize(
    "value", [np.float32(4), np.float64(4), np.int64(4), np.uint8(4), Fraction(4)]
)
def test_numbers_of_other_libraries_are_numbers(value: Any) -> None:
    assert Budget(speedup=value).allowed_step_seconds(8.0) == 2.0
    assert Budget(deadline=value).allowed_step_seconds(8.0, steps=2) == 2.0


def test_a_number_beyond_floating_point_is_refused() -> None:
    with pytest.raises(BudgetError, match="memory"):
        Budget(memory=10**400)
