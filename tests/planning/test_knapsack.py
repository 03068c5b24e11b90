"""The prefix knapsack against brute force, against an exact integer programme, and at its edges."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]

from fl_elastic.errors import BudgetError
from fl_elastic.planning.knapsack import Selection, prefix_knapsack

Floats = NDArray[np.float64]
SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Instance:
    """One problem, in backward order."""

    updates: Floats
    paths: Floats
    worth: Floats
    budget: float
    forced: tuple[int, ...] = ()

    def cost(self, mask: NDArray[np.bool_]) -> float:
        """The definition of what a mask costs."""
        deepest = max((k for k, on in enumerate(mask) if on), default=-1)
        return float(self.updates[mask].sum() + self.paths[: deepest + 1].sum())

    def solve(self, **settings: Any) -> Selection:
        """Call the solver."""
        return prefix_knapsack(
            self.updates, self.paths, self.worth, self.budget, forced=self.forced, **settings
        )


@cache
def all_masks(groups: int) -> NDArray[np.bool_]:
    return np.array([[i >> k & 1 for k in range(groups)] for i in range(2**groups)], dtype=bool)


def best_by_brute_force(case: Instance) -> float:
    """Look at every subset; minus infinity if none holds the forced groups within the budget."""
    masks = all_masks(len(case.worth))
    masks = masks[masks[:, list(case.forced)].all(axis=1)]
    reach = np.concatenate([[0.0], np.cumsum(case.paths)])
    depths = np.where(masks, np.arange(1, masks.shape[1] + 1), 0).max(axis=1)
    fits = masks @ case.updates + reach[depths] <= case.budget * SLACK
    return float((masks[fits] @ case.worth).max(initial=-np.inf))


def draw_instance(seed: int) -> Instance:
    """Integers, reals and zeros; negative importance; budgets from nothing to everything."""
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(1, 15)) if seed % 10 == 0 else int(rng.integers(1, 11))

    def costs() -> Floats:
        kind = rng.integers(4)
        if kind == 0:
            return rng.integers(0, 6, groups).astype(float)
        if kind == 1:
            return rng.uniform(0, 1, groups)
        if kind == 2:
            return rng.lognormal(0, 2, groups)
        return np.where(rng.random(groups) < 0.5, 0.0, rng.uniform(0, 3, groups))

    updates, paths = costs(), costs()
    worth = [
        rng.uniform(-1, 3, groups),
        rng.integers(-2, 7, groups).astype(float),
        np.where(rng.random(groups) < 0.4, 0.0, rng.lognormal(0, 1, groups)),
        updates + 0.1,
    ][rng.integers(4)]
    some = rng.random(groups) < 0.5
    whole = float(updates.sum() + paths.sum())
    budget = [
        0.0,
        whole,
        whole * rng.random(),
        whole * rng.random() / 4,
        Instance(updates, paths, worth, 0.0).cost(some),
        2 * whole + 1,
    ][rng.integers(6)]
    count = int(rng.integers(0, 3)) if rng.random() < 0.5 else 0
    forced = tuple(int(k) for k in rng.choice(groups, min(count, groups), replace=False))
    return Instance(updates, paths, worth, float(budget), forced)


@pytest.mark.parametrize("block", range(8))
def test_brute_force_finds_nothing_better(block: int) -> None:
    mismatches = []
    infeasible = 0
    for seed in range(block * 250, (block + 1) * 250):
        case = draw_instance(seed)
        found, best = case.solve(), best_by_brute_force(case)
        if not found.feasible:
            infeasible += 1
            only_forced = np.flatnonzero(found.mask).tolist() == sorted(case.forced)
            if best > -np.inf or not only_forced or found.cost <= case.budget * SLACK:
                mismatches.append((seed, "called infeasible"))
            continue
        exact = math.isclose(found.value, best, rel_tol=1e-9, abs_tol=1e-9)
        sums = math.isclose(found.cost, case.cost(found.mask), rel_tol=1e-9, abs_tol=1e-12)
        sums &= math.isclose(found.value, float(case.worth[found.mask].sum()), abs_tol=1e-9)
        held = found.cost <= case.budget * SLACK and found.mask[list(case.forced)].all()
        if not (exact and sums and held):
            mismatches.append((seed, f"{found.value} against {best}, cost {found.cost}"))
    assert mismatches == []
    assert 0 < infeasible < 125


def test_instances_of_the_comparison_are_of_every_kind() -> None:
    cases = [draw_instance(seed) for seed in range(2000)]
    assert max(len(case.worth) for case in cases) == 14
    assert min(len(case.worth) for case in cases) == 1
    assert sum(case.budget == 0 for case in cases) > 100
    assert sum((case.worth < 0).any() for case in cases) > 100
    assert sum((case.updates == 0).any() and (case.paths == 0).any() for case in cases) > 100
    assert sum(bool(case.forced) for case in cases) > 300
    plain = [case for case in cases if not case.forced and case.budget > 0]
    partly = [case for case in plain if 0 < case.solve().mask.sum() < (case.worth > 0).sum()]
    assert len(partly) > 300


@pytest.mark.parametrize(
    ("updates", "paths", "worth", "budget", "expected"),
    [
        ([1, 0, 0], [0, 1, 0], [8, 5, 4], 1, [False, True, True]),
        ([1, 1, 1], [1, 1, 1], [1, 1, 5], 6, [True, True, True]),
        ([1, 1, 1], [1, 1, 1], [1, 1, 5], 4, [False, False, True]),
        ([1, 1, 1], [0, 1, 1], [1, 1, 5], 3, [False, False, True]),
    ],
    ids=[
        "a state whose path is paid must survive",
        "the input-most group must be reachable",
        "the input-most group alone",
        "nothing is charged for the deepest group's own error gradient",
    ],
)
def test_instances_on_which_the_published_programme_fails(
    updates: list[float],
    paths: list[float],
    worth: list[float],
    budget: float,
    expected: list[bool],
) -> None:
    assert prefix_knapsack(updates, paths, worth, budget).mask.tolist() == expected


def large_instance(groups: int, share: float, seed: int, *, alike: bool = False) -> Instance:
    """Costs of many magnitudes; ``alike`` makes worth follow cost, which is the hardest kind."""
    rng = np.random.default_rng(seed)
    updates = rng.lognormal(0, 1, groups)
    paths = rng.lognormal(-1, 1, groups) * (rng.random(groups) < 0.9)
    worth = updates + 0.05 if alike else rng.lognormal(0, 1.5, groups) - 0.3
    return Instance(updates, paths, worth, share * float(updates.sum() + paths.sum()), forced=(0,))


def best_by_integer_programme(case: Instance) -> float:
    """Choose x (trained) and y (reached) in {0, 1} with y[j] >= x[k] for all j <= k."""
    groups = len(case.worth)
    eye, zero = np.eye(groups), np.zeros((groups - 1, groups))
    rows = [
        LinearConstraint(np.concatenate([case.updates, case.paths])[None], -np.inf, case.budget),
        LinearConstraint(np.hstack([-eye, eye]), 0, np.inf),
        LinearConstraint(np.hstack([zero, eye[:-1] - eye[1:]]), 0, np.inf),
    ]
    lowest = np.zeros(2 * groups)
    lowest[list(case.forced)] = 1
    found = milp(
        np.concatenate([-case.worth, np.zeros(groups)]),
        integrality=np.ones(2 * groups),
        bounds=Bounds(lowest, 1),
        constraints=rows,
        options={"mip_rel_gap": 1e-5, "time_limit": 20},
    )
    assert found.success
    return -float(found.fun)


@pytest.mark.parametrize("alike", [False, True], ids=["mixed", "worth follows cost"])
@pytest.mark.parametrize("share", [0.15, 0.4, 0.8])
@pytest.mark.parametrize("groups", [60, 200])
def test_the_quantised_path_is_close_to_an_integer_programme(
    groups: int, share: float, alike: bool
) -> None:
    case = large_instance(groups, share, seed=groups, alike=alike)
    found, best = case.solve(), best_by_integer_programme(case)
    assert case.cost(found.mask) <= case.budget * SLACK
    assert 0.99 * best <= found.value <= best * (1 + 1e-4)
    assert 0 < found.mask.sum() < groups


@pytest.mark.parametrize("resolution", [1, 2, 7, 50, 500, 4096, 10_000])
def test_the_quantised_path_never_exceeds_the_budget(resolution: int) -> None:
    nonempty = 0
    for seed in range(30):
        case = large_instance(25 + 5 * seed, 0.02 + 0.03 * seed, seed, alike=bool(seed % 2))
        found = case.solve(resolution=resolution)
        assert math.isclose(found.cost, case.cost(found.mask), rel_tol=1e-9)
        if found.feasible:
            assert case.cost(found.mask) <= case.budget * SLACK
            nonempty += found.mask.sum() > 1
        assert found.mask[0]
    assert nonempty > 20


def test_many_undominated_states_fall_back_to_the_table() -> None:
    # A subset-sum problem: hardly a state dominates another, so 24 candidates give millions.
    rng = np.random.default_rng(0)
    updates = rng.uniform(1, 2, 24)
    case = Instance(updates, np.zeros(24), updates.copy(), 0.5 * float(updates.sum()))
    found = case.solve()
    assert found.value <= case.budget * SLACK
    assert found.value >= 0.99 * case.budget


@pytest.mark.parametrize("groups", [5, 40], ids=["exact", "quantised"])
def test_free_groups_are_taken_even_without_a_budget(groups: int) -> None:
    paths = np.zeros(groups)
    paths[groups - 2] = 1.0
    found = prefix_knapsack(np.zeros(groups), paths, np.ones(groups), budget=0.0)
    assert np.flatnonzero(found.mask).tolist() == list(range(groups - 2))
    assert found.cost == 0.0


@pytest.mark.parametrize("groups", [5, 40], ids=["exact", "quantised"])
def test_free_groups_are_taken_beyond_the_forced_when_nothing_is_left(groups: int) -> None:
    updates, paths = np.zeros(groups), np.zeros(groups)
    updates[0] = 2.0
    paths[-1] = 1.0
    found = prefix_knapsack(updates, paths, np.ones(groups), budget=2.0, forced=[0])
    assert found.mask.sum() == groups - 1 and not found.mask[-1]
    assert found.cost == 2.0


def test_an_infinite_cost_is_never_paid() -> None:
    found = prefix_knapsack([1, 1, 1], [0, 0, math.inf], [1, 1, 99], 10.0)
    assert found.mask.tolist() == [True, True, False]
    found = prefix_knapsack([1, math.inf, 1], [0, 0, 0], [1, 99, 1], 10.0)
    assert found.mask.tolist() == [True, False, True]


def test_no_groups_give_an_empty_selection() -> None:
    found = prefix_knapsack([], [], [], 1.0)
    assert found.mask.shape == (0,) and found.value == found.cost == 0.0 and found.feasible


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"update_cost": [1, math.nan]}, "NaN"),
        ({"path_cost": [math.nan, 1]}, "NaN"),
        ({"importance": [math.nan, 1]}, "NaN"),
        ({"budget": math.nan}, "NaN"),
        ({"update_cost": [1, -1e-9]}, "negative"),
        ({"path_cost": [-1, 1]}, "negative"),
        ({"update_cost": [1]}, "one length, got 1, 2, 2"),
        ({"path_cost": [1, 1, 1]}, "one length, got 2, 3, 2"),
        ({"importance": []}, "one length, got 2, 2, 0"),
        ({"resolution": 0}, "resolution 0"),
        ({"forced": [2]}, "forced"),
        ({"forced": [-1]}, "forced"),
    ],
)
def test_bad_input_is_explained(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "update_cost": [1, 1],
        "path_cost": [1, 1],
        "importance": [1, 1],
        "budget": 2.0,
    }
    with pytest.raises(BudgetError, match=message):
        prefix_knapsack(**(arguments | changes))
