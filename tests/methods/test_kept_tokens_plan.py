"""How many tokens stay."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.errors import PlanError
from fl_elastic.methods.tokens.kept import KeptTokens, kept_count


def test_three_prunings_leave_the_published_counts() -> None:
    assert KeptTokens((("a", 0.9), ("b", 0.9), ("c", 0.9))).counts(197) == (178, 161, 145)
    assert KeptTokens((("a", 0.7), ("b", 0.7), ("c", 0.7))).counts(197) == (139, 98, 69)


@given(st.integers(1, 1000), st.integers(1, 100))
def test_shares_are_rounded_up_exactly(tokens: int, percent: int) -> None:
    exact = math.ceil(Fraction(tokens * percent, 100))
    assert kept_count(tokens, percent / 100) == exact


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_impossible_shares_are_refused(share: float) -> None:
    with pytest.raises(PlanError, match="above 0"):
        KeptTokens((("a", share),))


def test_without_a_class_token_nothing_is_kept() -> None:
    with pytest.raises(PlanError, match="at least 1"):
        KeptTokens((), classes=0)
