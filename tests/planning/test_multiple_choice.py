"""The multiple-choice solver against brute force, against an exact integer programme, and at its edges."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import lil_matrix  # type: ignore[import-untyped]
from slow_ones import slow_unless

from fl_elastic.errors import BudgetError
from fl_elastic.planning.multiple_choice.choices import ChoiceLimits, Choices, Totals
from fl_elastic.planning.multiple_choice.knapsack import (
    MultipleChoiceSelection,
    multiple_choice_knapsack,
)

Floats = NDArray[np.float64]
KINDS = ("plain", "alike", "spread", "whole", "heavy", "heavy alike", "heavy spread", "heavy whole")


def draw_choices(rng: np.random.Generator, groups: int, options: int, kind: str) -> Choices:
    """Groups of sizes alike or of heavy tails; worth drawn, following cost, spread widely, or whole numbers."""
    shape = (groups, options - 1)
    heavy = kind.startswith("heavy")
    share = np.sort(rng.uniform(0.05, 1, shape), axis=1)
    size = rng.lognormal(0, 2.0 if heavy else 0.7, groups)[:, None] * share
    seconds = rng.lognormal(0, 1.0 if heavy else 0.5, groups)[:, None] * share
    memory, uplink = size * rng.uniform(0.5, 1.5, shape), size * rng.uniform(0.8, 1.2, shape)
    value = share * rng.lognormal(0, 0.7, groups)[:, None] * rng.uniform(0.6, 1.4, shape)
    if kind.endswith("alike"):
        value = seconds / seconds.mean() + memory / memory.mean() + uplink / uplink.mean()
        value = value + 0.05 * rng.random(shape)
    elif kind.endswith("spread"):
        value = np.sqrt(share) * rng.lognormal(0, 1.5, groups)[:, None] - 0.1 * rng.random(shape)
    elif kind.endswith("whole"):
        seconds, memory, uplink = (np.ceil(3 * cost) for cost in (seconds, memory, uplink))
        value = np.ceil(5 * value) - 1
    path = rng.lognormal(-0.5, 0.5, groups)
    saved = rng.random(shape) * path[:, None]
    seconds = np.where(rng.random(shape) < 0.1, -saved, seconds)

    def with_frozen(table: Floats) -> Floats:
        return np.hstack([np.zeros((groups, 1)), table])

    available = rng.random((groups, options)) < 0.9
    available[0, 1] = True
    return Choices(
        value=with_frozen(value),
        seconds=with_frozen(seconds),
        memory=with_frozen(memory),
        uplink=with_frozen(uplink),
        available=available,
        path_seconds=path,
        path_memory=rng.lognormal(-1, 0.8, groups),
        forced=(0,) if rng.random() < 0.7 else (),
    )


def limits_of(choices: Choices, shares: tuple[float, float, float]) -> ChoiceLimits:
    """Shares of what everything costs; infinity where there is no limit."""
    whole = (
        np.abs(choices.seconds).max(axis=1).sum() + choices.path_seconds.sum(),
        choices.memory.max(axis=1).sum() + choices.path_memory.sum(),
        choices.uplink.max(axis=1).sum(),
    )
    return ChoiceLimits(*(float(share * cost) for share, cost in zip(shares, whole, strict=True)))


def draw(
    seed: int,
    *,
    groups: int | None = None,
    tight: bool = False,
    limits: int = 3,
) -> tuple[Choices, ChoiceLimits]:
    """One instance of the kind that the seed says."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 7)) if groups is None else groups
    choices = draw_choices(
        rng, count, int(rng.integers(3, 5 if groups is None else 7)), KINDS[seed % 8]
    )
    grades = (0.05, 0.1, 0.2) if tight else (0.1, 0.15, 0.3, 0.5, 0.8)
    shares = [float(rng.choice(grades)) if n < limits else math.inf for n in range(3)]
    return choices, limits_of(choices, (shares[0], shares[1], shares[2]))


def slow_totals(choices: Choices, options: list[int]) -> Totals:
    """The definition, group by group."""
    deepest = max((i for i, k in enumerate(options) if k), default=-1)
    value = seconds = memory = uplink = 0.0
    for i, k in enumerate(options[: deepest + 1]):
        value += choices.value[i, k]
        seconds += choices.seconds[i, k] + choices.path_seconds[i]
        memory += choices.memory[i, k] + choices.path_memory[i]
        uplink += choices.uplink[i, k]
    return Totals(value, seconds, memory, uplink)


def best_by_brute_force(choices: Choices, limits: ChoiceLimits) -> float:
    """Look at every choice; minus infinity if none is within the limits."""
    groups = len(choices.value)
    usable = choices.available.copy()
    usable[:, 0] = True
    usable[list(choices.forced), 0] = False
    grid = np.array(list(product(*(np.flatnonzero(row).tolist() for row in usable))), dtype=int)
    grid = grid.reshape(-1, groups)
    rows = np.arange(groups)
    deepest = np.where(grid > 0, rows, -1).max(axis=1)
    reach = np.concatenate([[0.0], np.cumsum(choices.path_seconds)])
    reach_bytes = np.concatenate([[0.0], np.cumsum(choices.path_memory)])
    value = choices.value[rows, grid].sum(axis=1)
    seconds = choices.seconds[rows, grid].sum(axis=1)
    fits = seconds + reach[deepest + 1] <= limits.with_slack("seconds")
    memory = choices.memory[rows, grid].sum(axis=1) + reach_bytes[deepest + 1]
    fits &= memory <= limits.with_slack("memory")
    fits &= choices.uplink[rows, grid].sum(axis=1) <= limits.with_slack("uplink")
    return float(value[fits].max(initial=-np.inf))


def best_by_integer_programme(choices: Choices, limits: ChoiceLimits) -> float:
    """One binary per option, and y[d] for "reached"."""
    groups, options = choices.value.shape
    size = groups * options
    rows: list[tuple[dict[int, float], float, float]] = []
    upper = np.ones(size + groups)
    for i in range(groups):
        chosen = [i * options + k for k in range(options)]
        y, deeper = size + i, size + i + 1
        rows.append((dict.fromkeys(chosen, 1.0), 1, 1))
        rows.append(({y: 1.0, **dict.fromkeys(chosen[1:], -1.0)}, 0, np.inf))
        # The deepest group that is reached is trained.
        last = {y: 1.0, **dict.fromkeys(chosen[1:], -1.0)}
        if i + 1 < groups:
            rows.append(({y: 1.0, deeper: -1.0}, 0, np.inf))
            last[deeper] = -1.0
        rows.append((last, -np.inf, 0))
        upper[[n for k, n in enumerate(chosen) if k and not choices.available[i, k]]] = 0
        if i in choices.forced:
            upper[chosen[0]] = 0
    matrix = lil_matrix((len(rows), len(upper)))
    for n, (row, _, _) in enumerate(rows):
        for column, factor in row.items():
            matrix[n, column] = factor
    constraints = [LinearConstraint(matrix.tocsr(), [r[1] for r in rows], [r[2] for r in rows])]
    nothing = np.zeros(groups)
    for name, path in (
        ("seconds", choices.path_seconds),
        ("memory", choices.path_memory),
        ("uplink", nothing),
    ):
        limit = getattr(limits, name)
        if limit < np.inf:
            cost = np.concatenate([getattr(choices, name).ravel(), path])
            constraints.append(LinearConstraint(cost[None] / limit, -np.inf, 1))
    found = milp(
        np.concatenate([-choices.value.ravel(), np.zeros(groups)]),
        integrality=np.ones(len(upper)),
        bounds=Bounds(0, upper),
        constraints=constraints,
        options={"mip_rel_gap": 1e-5, "time_limit": 20},
    )
    return -np.inf if found.x is None else -float(found.fun)


def solve(choices: Choices, limits: ChoiceLimits) -> MultipleChoiceSelection | None:
    """Solve, and check everything that must hold of any answer; None if there is none."""
    try:
        found = multiple_choice_knapsack(choices, limits)
    except BudgetError:
        return None
    picked = choices.available[np.arange(len(found.options)), found.options]
    assert (picked | (found.options == 0)).all()
    assert all(found.options[list(choices.forced)] > 0)
    assert found.totals == choices.totals(found.options)
    assert limits.admit(found.totals)
    assert found.bound >= found.totals.value
    return found


def close(found: MultipleChoiceSelection | None, best: float, tolerance: float) -> bool:
    """Whether an answer exists exactly if one should, and is as good as asked."""
    if found is None or best == -np.inf:
        return found is None and best == -np.inf
    short = best - found.totals.value
    return short <= tolerance * abs(best) + 1e-9


@given(seed=st.integers(0, 10_000), data=st.data())
def test_totals_are_what_the_definition_says(seed: int, data: st.DataObject) -> None:
    choices, _ = draw(seed)
    most = choices.value.shape[1] - 1
    options = [data.draw(st.integers(0, most)) for _ in range(len(choices.value))]
    found, slow = choices.totals(options), slow_totals(choices, options)
    for name in ("value", "seconds", "memory", "uplink"):
        assert math.isclose(getattr(found, name), getattr(slow, name), rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize("tight", [False, True], ids=["loose", "tight"])
@pytest.mark.parametrize("limits", [0, 1, 2, 3])
def test_brute_force_finds_nothing_better(limits: int, tight: bool) -> None:
    wrong, answered = [], 0
    for seed in range(60):
        choices, bounds = draw(1000 * limits + seed, tight=tight, limits=limits)
        best, found = best_by_brute_force(choices, bounds), solve(choices, bounds)
        answered += found is not None
        if not close(found, best, 1e-9):
            wrong.append((seed, best, found))
        if found is not None and found.bound < best - 1e-9 * abs(best) - 1e-12:
            wrong.append((seed, best, found.bound))
    assert wrong == []
    assert answered >= 20


@pytest.mark.parametrize("groups", [10, 60])
def test_one_limit_agrees_with_an_integer_programme(groups: int) -> None:
    gaps = []
    for seed in range(8):
        choices, limits = draw(seed, groups=groups, limits=1)
        best, found = best_by_integer_programme(choices, limits), solve(choices, limits)
        assert close(found, best, 1e-4), (seed, best, found)
        if found is not None:
            gaps.append(found.bound / best - 1)
    assert len(gaps) >= 6
    assert -1e-4 <= min(gaps) and max(gaps) <= 1e-4


@pytest.mark.parametrize("groups", slow_unless(lambda groups: groups < 60, [8, 20, 60]))
def test_three_limits_come_close_to_an_integer_programme(groups: int) -> None:
    answered = 0
    for seed in range(100, 118):
        choices, limits = draw(seed, groups=groups)
        best, found = best_by_integer_programme(choices, limits), solve(choices, limits)
        assert close(found, best, 0.01), (seed, best, found)
        if found is not None:
            answered += 1
            assert found.bound >= best * (1 - 1e-4)
    assert answered >= 15


limit = st.one_of(st.just(math.inf), st.just(0.0), st.floats(-1, 1), st.floats(0, 100))


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    seconds=limit,
    memory=limit,
    uplink=limit,
    data=st.data(),
)
def test_no_answer_breaks_a_limit_and_none_is_missed(
    seed: int, seconds: float, memory: float, uplink: float, data: st.DataObject
) -> None:
    choices, _ = draw(seed)
    groups = len(choices.value)
    forced = data.draw(st.sets(st.integers(0, groups - 1), max_size=3))
    choices = replace(choices, forced=tuple(forced))
    limits = ChoiceLimits(seconds, memory, uplink)
    best, found = best_by_brute_force(choices, limits), solve(choices, limits)
    assert close(found, best, 1e-9), (best, found)


@pytest.mark.parametrize("groups", [100, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_large_instances_are_within_one_per_cent_of_their_bound(kind: str, groups: int) -> None:
    choices = draw_choices(np.random.default_rng(3), groups, 8, kind)
    found = solve(choices, limits_of(choices, (0.4, 0.5, 0.3)))
    assert found is not None
    assert found.totals.value >= 0.99 * found.bound


def table(*rows: list[float]) -> Floats:
    return np.array(rows, dtype=float)


def simple(value: Floats, cost: Floats, **changes: Any) -> Choices:
    """Every kind of cost alike, no path."""
    nothing = np.zeros(len(value))
    fields: dict[str, Any] = {
        "seconds": cost,
        "memory": cost,
        "uplink": cost,
        "available": np.ones_like(value, dtype=bool),
        "path_seconds": nothing,
        "path_memory": nothing,
    }
    return Choices(value, **(fields | changes))


def test_a_single_group_takes_its_best_option_that_fits() -> None:
    choices = simple(table([0, 1, 5, 9]), table([0, 1, 2, 3]))
    for limits, expected in (
        (ChoiceLimits(2.5), 2),
        (ChoiceLimits(), 3),
        (ChoiceLimits(9, 9, 1), 1),
        (ChoiceLimits(0), 0),
    ):
        assert multiple_choice_knapsack(choices, limits).options.tolist() == [expected]


def test_no_groups_give_an_empty_selection() -> None:
    found = multiple_choice_knapsack(simple(np.zeros((0, 3)), np.zeros((0, 3))), ChoiceLimits(1.0))
    assert found.options.shape == (0,) and found.totals.value == found.bound == 0.0


def test_groups_that_can_only_be_frozen_stay_frozen() -> None:
    choices = simple(np.zeros((3, 1)), np.zeros((3, 1)))
    assert multiple_choice_knapsack(choices, ChoiceLimits(1.0)).options.tolist() == [0, 0, 0]
    value = table([0, 5], [0, 5], [0, 5])
    choices = simple(value, value, available=np.array([[True, True], [True, False], [True, True]]))
    assert multiple_choice_knapsack(choices, ChoiceLimits(10.0)).options.tolist() == [1, 0, 1]


def test_worthless_groups_are_trained_only_if_forced_and_then_as_well_as_possible() -> None:
    value = table([0, -3, -1, -2], [0, -1, 0, -1])
    cost = table([0, 1, 3, 2], [0, 1, 1, 1])
    assert multiple_choice_knapsack(simple(value, cost), ChoiceLimits(9.0)).totals.value == 0.0
    forced = simple(value, cost, forced=(0,))
    assert multiple_choice_knapsack(forced, ChoiceLimits(9.0)).totals.value == -1.0
    tight = multiple_choice_knapsack(forced, ChoiceLimits(2.0))
    assert tight.options[0] == 3 and tight.totals.value == -2.0


def test_infinite_costs_are_never_paid() -> None:
    value = table([0, 1, 9], [0, 1, 9], [0, 9, 9])
    cost = table([0, 1, np.inf], [0, 1, 2], [0, 1, 1])
    choices = simple(value, cost, path_seconds=np.array([0, 0, np.inf]))
    for limits in (ChoiceLimits(), ChoiceLimits(100.0), ChoiceLimits(100.0, 100.0, 100.0)):
        assert multiple_choice_knapsack(choices, limits).options.tolist() == [1, 2, 0]


def test_units_do_not_matter() -> None:
    choices, limits = draw(100, groups=30)
    other = replace(
        choices,
        value=choices.value * 1e-6,
        memory=choices.memory * 1e9,
        path_memory=choices.path_memory * 1e9,
        uplink=choices.uplink * 1e-9,
    )
    found = solve(choices, limits)
    scaled = solve(other, ChoiceLimits(limits.seconds, limits.memory * 1e9, limits.uplink * 1e-9))
    assert found is not None and scaled is not None
    assert scaled.totals.value == pytest.approx(1e-6 * found.totals.value, rel=2e-3)


def test_the_same_question_gets_the_same_answer_and_inputs_are_left_alone() -> None:
    choices, limits = draw(5, groups=40)
    before = {name: np.copy(getattr(choices, name)) for name in choices.__dataclass_fields__}
    first, second = (
        multiple_choice_knapsack(choices, limits),
        multiple_choice_knapsack(choices, limits),
    )
    assert np.array_equal(first.options, second.options)
    assert all(np.array_equal(table, getattr(choices, name)) for name, table in before.items())


def test_the_error_names_the_nearest_limits_that_would_do() -> None:
    value = table([0, 1, 1], [0, 5, 5])
    choices = simple(
        value, table([0, 4, 3], [0, 1, 1]),
        memory=table([0, 2, 6], [0, 1, 1]), path_seconds=np.array([0.5, 1.0]), forced=(0,),
    )  # fmt: skip
    with pytest.raises(BudgetError, match=r"seconds must be at least 3\.5 \(limit 3\)") as caught:
        multiple_choice_knapsack(choices, ChoiceLimits(seconds=3.0, memory=7.0))
    assert "memory" not in str(caught.value)
    with pytest.raises(BudgetError, match=r"seconds .* 3\.5 .*; memory must be at least 2 "):
        multiple_choice_knapsack(choices, ChoiceLimits(seconds=3.0, memory=1.0))
    with pytest.raises(BudgetError, match=r"seconds .* 4\.5 \(limit 4\), with memory within 5"):
        multiple_choice_knapsack(choices, ChoiceLimits(seconds=4.0, memory=5.0))
    assert multiple_choice_knapsack(
        choices, ChoiceLimits(seconds=4.5, memory=5.0)
    ).options.tolist() == [
        1,
        0,
    ]
    with pytest.raises(BudgetError, match=r"memory .* 6 \(limit 5\), with uplink within 3"):
        multiple_choice_knapsack(choices, ChoiceLimits(seconds=9.0, memory=5.0, uplink=3.0))
    with pytest.raises(BudgetError, match=r"nothing fits: seconds must be at least 0 \(limit -1\)"):
        multiple_choice_knapsack(replace(choices, forced=()), ChoiceLimits(seconds=-1.0))


def test_a_forced_group_that_cannot_be_trained_is_named() -> None:
    value = table([0, 1], [0, 1])
    available = np.array([[True, True], [True, False]])
    choices = simple(value, value, available=available, forced=(1,))
    for limits in (ChoiceLimits(), ChoiceLimits(9.0), ChoiceLimits(9.0, 9.0, 9.0)):
        with pytest.raises(BudgetError, match=r"forced groups \[1\] have no available option"):
            multiple_choice_knapsack(choices, limits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": np.zeros((2, 2))}, r"seconds has shape \(2, 2\); it must be \(2, 3\)"),
        ({"available": np.ones(2, dtype=bool)}, "available has shape"),
        ({"path_memory": np.zeros(3)}, "path_memory has shape"),
        ({"path_seconds": np.array([0, np.nan])}, "path_seconds must not be NaN"),
        ({"memory": table([0, 1, -1], [0, 1, 1])}, "memory of an available option is negative"),
        ({"uplink": table([0, 1, np.nan], [0, 1, 1])}, "uplink of an available option is NaN"),
        ({"seconds": table([0, 1, -np.inf], [0, 1, 1])}, "minus infinity"),
        ({"seconds": table([1, 1, 1], [0, 1, 1])}, "option 0"),
        ({"forced": (2,)}, r"forced groups \[2\] are outside 0 to 1"),
    ],
)
def test_bad_input_is_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        simple(table([0, 1, 1], [0, 1, 1]), table([0, 1, 1], [0, 1, 1]), **changes)


def test_what_is_not_available_may_hold_anything() -> None:
    odd = table([0, 1, np.nan], [0, -np.inf, 1])
    available = np.array([[True, True, False], [True, False, True]])
    choices = simple(odd, odd, available=available)
    assert multiple_choice_knapsack(choices, ChoiceLimits(2.0)).options.tolist() == [1, 2]


def test_limits_and_options_must_make_sense() -> None:
    with pytest.raises(BudgetError, match="memory is NaN"):
        ChoiceLimits(memory=math.nan)
    choices = simple(table([0, 1]), table([0, 1]))
    with pytest.raises(BudgetError, match="options has shape"):
        choices.totals([0, 1])
    with pytest.raises(BudgetError, match=r"value has shape \(2,\)"):
        replace(choices, value=np.zeros(2))
