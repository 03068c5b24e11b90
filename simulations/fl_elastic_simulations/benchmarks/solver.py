"""Check that the prefix knapsack is exact, and time it and whole plans under several limits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fl_elastic.budget import Budget
from fl_elastic.planning import POLICIES, PlanRequest
from fl_elastic.planning.knapsack import prefix_knapsack
from fl_elastic.profiling.memory import mask_bytes
from fl_elastic.testing import made_up_profile
from fl_elastic_simulations.benchmarks.benchmark import Benchmark, Request, Row, Rows

__all__ = ["BENCHMARK", "Solver", "brute_force_value", "random_instance"]

_INSTANCES = 2_000
_REPEATS, _PLANS = 51, 12


class Solver(Benchmark):
    """Mismatches between the solver and brute force, and the times of a solution and of a plan by tensor groups.

    Cases are 2,000 random instances, solutions of 50, 200 and 500 groups, and plans of 60 and 150 groups.
    """

    name = "solver"

    def cases(self, request: Request, rows: Rows) -> Mapping[str, tuple[Any, ...]]:
        """Return the three kinds of cases."""
        return {
            "exactness": (_exactness,),
            **{f"time at {groups} groups": (_time, groups) for groups in (50, 200, 500)},
            **{f"plans at {groups} groups": (_time_plans, groups) for groups in (60, 150)},
        }

    def run(self, measure: Callable[..., Row], *groups: int) -> Row:
        """Measure one case."""
        return measure(*groups)

    def tables(self, rows: Rows) -> Mapping[str, pd.DataFrame]:
        """Return the table of times; its note gives the number of instances that were not solved exactly."""
        times = {
            name: {
                "median, ms": f"{row['median_cpu_milliseconds']:.1f}",
                "largest, ms": f"{_largest(row):.1f}",
                "first of a model, ms": f"{row['worst_first_cpu_milliseconds']:.1f}"
                if "worst_first_cpu_milliseconds" in row
                else "",
            }
            for name, row in rows.items()
            if "median_cpu_milliseconds" in row
        }
        table = pd.DataFrame.from_dict(times, orient="index")
        if "exactness" in rows:
            found = rows["exactness"]
            table.attrs["notes"] = [
                f"{found['mismatches']} of {found['instances']:,} instances differ from brute force."
            ]
        return {"times": table}


def _largest(row: Mapping[str, Any]) -> float:
    """Return the longest time of a solution, or of plans the median of the slowest model."""
    names = ("worst_median_cpu_milliseconds", "largest_cpu_milliseconds")
    return next(float(row[name]) for name in names if name in row)


def random_instance(generator: np.random.Generator) -> tuple[Any, Any, Any, float]:
    """Return costs, importance and budget of a random instance: up to 14 groups, zeros, extreme budgets."""
    groups = int(generator.integers(1, 15))
    if generator.random() < 0.3:
        updates = generator.integers(0, 6, groups).astype(float)
        paths = generator.integers(0, 4, groups).astype(float)
        worth = generator.integers(-3, 9, groups).astype(float)
    else:
        kept = generator.random((3, groups)) < 0.85
        updates, paths = generator.random((2, groups)) * kept[:2]
        worth = generator.normal(size=groups) * kept[2]
    whole = float(updates.sum() + paths.sum())
    budget = float(generator.choice([0.0, whole, whole * generator.random()], p=[0.1, 0.1, 0.8]))
    return updates, paths, worth, budget


def brute_force_value(updates: Any, paths: Any, worth: Any, budget: float) -> float:
    """Return the best importance over all subsets of groups that fit the budget."""
    groups = len(worth)
    masks = ((np.arange(2**groups)[:, None] >> np.arange(groups)) & 1).astype(bool)
    reach = np.concatenate([[0.0], np.cumsum(paths)])
    depth = np.where(masks.any(axis=1), groups - np.argmax(masks[:, ::-1], axis=1), 0)
    costs = masks @ updates + reach[depth]
    values = masks @ worth
    return float(values[costs <= budget * (1 + 1e-9)].max())


def _exactness() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    mismatches = overruns = 0
    for _ in range(_INSTANCES):
        updates, paths, worth, budget = random_instance(generator)
        found = prefix_knapsack(updates, paths, worth, budget)
        mismatches += abs(found.value - brute_force_value(updates, paths, worth, budget)) > 1e-9
        overruns += found.cost > budget * (1 + 1e-8)
    return {
        "instances": _INSTANCES,
        "mismatches": int(mismatches),
        "budget_overruns": int(overruns),
    }


def _time(groups: int) -> dict[str, Any]:
    generator = np.random.default_rng(groups)
    milliseconds = []
    for _ in range(_REPEATS):
        updates, paths, worth = generator.random((3, groups))
        budget = 0.5 * float(updates.sum() + paths.sum())
        started = time.thread_time()
        prefix_knapsack(updates, paths, worth, budget, forced=(0,), resolution=4096)
        milliseconds.append(1e3 * (time.thread_time() - started))
    return {
        "resolution": 4096,
        "median_cpu_milliseconds": statistics.median(milliseconds),
        "largest_cpu_milliseconds": max(milliseconds),
    }


def _time_plans(groups: int) -> dict[str, Any]:
    """Time plans of made-up models, chains and branched ones, under limits on memory, uplink or both.

    Each plan has its own importance, as in each fit. The first plan of a model is reported separately.
    """
    medians, firsts = [], []
    for branched in (False, True):
        for seed in range(1, 4):
            profile = made_up_profile(groups, branched=branched, seed=seed)
            everything = np.ones(groups, dtype=bool)
            memory = 0.5 * mask_bytes(profile, everything)
            uplink = 0.3 * float(profile.parameter_bytes.sum())
            deadline = 10 * profile.full_step_seconds
            for budget, steps in (
                (Budget(speedup=1.5, memory=memory), 1),
                (Budget(speedup=1.5, uplink=uplink), 1),
                (Budget(deadline=deadline, memory=memory, uplink=uplink), 20),
            ):
                milliseconds = []
                unseen = replace(profile)
                for turn in range(_PLANS):
                    importance = np.random.default_rng(turn).random(groups)
                    request = PlanRequest(unseen, budget, importance, steps=steps)
                    started = time.thread_time()
                    POLICIES.make("elastic").plan(request)
                    milliseconds.append(1e3 * (time.thread_time() - started))
                firsts.append(milliseconds[0])
                medians.append(statistics.median(milliseconds[1:]))
    return {
        "median_cpu_milliseconds": statistics.median(medians),
        "worst_median_cpu_milliseconds": max(medians),
        "worst_first_cpu_milliseconds": max(firsts),
    }


BENCHMARK = Solver()
