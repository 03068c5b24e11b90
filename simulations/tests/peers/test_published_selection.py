"""The published dynamic programme: against its recurrence written out slowly, and against all subsets."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_elastic.errors import BudgetError
from fl_elastic.planning.knapsack import prefix_knapsack
from fl_elastic_simulations.peers import published_selection

LEVELS = 60


def slowly(
    updates: list[float], paths: list[float], worth: list[float], share: float
) -> list[bool]:
    """The recurrence, state by state, with dictionaries."""
    total = sum(updates) + sum(paths)
    u = [int(np.floor(x * (LEVELS / total))) for x in updates]
    p = [int(np.floor(x * (LEVELS / total))) for x in paths]
    disco = (sum(u) + sum(p)) / LEVELS
    limit = int(share * disco * (sum(u) + sum(p)))
    reach = next((k for k in range(len(u)) if sum(p[: k + 1]) > limit), len(u) - 1)
    states = {(0, t): (0.0, frozenset[int](), True) for t in range(limit + 1)}
    best: tuple[float, frozenset[int]] = (-np.inf, frozenset())
    for k in range(1, reach + 1):
        for t in range(limit + 1):
            value, chosen, _ = states[k - 1, t]
            selected = False
            for j in range(k - 1, -1, -1):
                left = t - u[k - 1] - sum(p[j:k])
                if left >= 0 and states[j, left][2]:
                    candidate = states[j, left][0] + worth[k - 1]
                    if candidate > value:
                        value, chosen = candidate, states[j, left][1] | {k - 1}
                        selected = True
            states[k, t] = value, chosen, selected
            if value > best[0]:
                best = value, chosen
    return [k in best[1] for k in range(len(u))]


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[float], list[float], list[float], float]:
    count = draw(st.integers(1, 6))
    times = st.lists(st.floats(0.1, 9.0), min_size=count, max_size=count)
    worth = st.lists(st.floats(-1.0, 5.0), min_size=count, max_size=count)
    return draw(times), draw(times), draw(worth), draw(st.floats(0.0, 1.2))


@given(instances())
def test_it_is_the_published_recurrence(
    instance: tuple[list[float], list[float], list[float], float],
) -> None:
    updates, paths, worth, share = instance
    found = published_selection(updates, paths, worth, share, levels=LEVELS)
    assert found.tolist() == slowly(updates, paths, worth, share)


@given(instances())
def test_what_it_selects_never_beats_the_exact_solver(
    instance: tuple[list[float], list[float], list[float], float],
) -> None:
    updates, paths, worth, share = instance
    found = published_selection(updates, paths, worth, share)
    # In units of a level, one is lost per time by rounding down; and the way of the deepest is charged.
    slack = 2 * len(worth) / 1000 * (sum(updates) + sum(paths))
    exact = prefix_knapsack(updates, paths, worth, share * (sum(updates) + sum(paths)) + slack)
    assert np.asarray(worth)[found].sum() <= exact.value + 1e-6


def test_it_misses_the_optimum_at_times() -> None:
    generator = np.random.default_rng(0)
    missed = 0
    for _ in range(150):
        updates, paths = generator.integers(1, 12, 10), generator.integers(0, 12, 10)
        worth = generator.uniform(0, 1, 10)
        share = 0.5
        # Whole levels: nothing is lost by rounding, so all that is lost is the programme's own doing.
        levels = int(updates.sum() + paths.sum())
        found = published_selection(updates, paths, worth, share, levels=levels)
        limit = int(share * levels)
        best = 0.0
        reach = np.cumsum(paths)
        for bits in product([False, True], repeat=10):
            mask = np.array(bits)
            if mask.any() and updates[mask].sum() + reach[np.flatnonzero(mask)[-1]] <= limit:
                best = max(best, float(worth[mask].sum()))
        assert worth[found].sum() <= best + 1e-9
        missed += bool(worth[found].sum() < best - 1e-9)
        if missed and _ > 30:
            break
    assert missed


def test_nothing_fits_nothing() -> None:
    assert not published_selection([1, 1], [1, 1], [1, 1], share=0.0).any()
    assert not published_selection([1, 1], [1, 1], [1, 1], share=-3.0).any()
    assert not published_selection([1, 1, 1], [1, 1, 1], [-1, -1, -1], share=1.0).any()


def test_the_deepest_is_out_of_reach_even_with_all_the_time() -> None:
    assert published_selection([1, 1, 1], [1, 1, 1], [1, 1, 1], share=2.0).tolist() == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("times", [([0, 0], [0, 0]), ([-1, 3], [0, 0]), ([1], [1])])
def test_times_that_mean_nothing_are_refused(times: tuple[list[int], list[int]]) -> None:
    with pytest.raises(BudgetError, match="must not be negative"):
        published_selection(*times, [1.0, 1.0], 0.5)
