"""Condense the cells of a simulation into the summary for the report and ``summary.json``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fl_elastic.environment import environment
from fl_elastic.groups import TensorGroup
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.scenario.scenario import Scenario

_FINAL_TESTS = 5
# Parts of a summary that grow with rounds, clients or groups.
_LONG = (
    "history",
    "coverage",
    "clients",
    "rejections",
    "labels",
    "scenario",
    "command",
)
_FINAL_SHARE, _FINAL_TENTH = 4, 10


def final_accuracy(tested: Sequence[float], *, at_equal_times: bool = False) -> float:
    """Return the mean accuracy at the end of a run.

    For tests at equal intervals of time, this is the mean over the last tenth of the time. For tests after rounds,
    it is that of the last five tests, but at most of the last quarter of the tests. A short run thus ends with its
    last test, not with a mean over rounds in which the model was still learning.

    Parameters
    ----------
    tested : sequence of float
        Accuracy of every test, at least one, without the test of the untrained model.
    at_equal_times : bool
        Whether the tests come at equal intervals of simulated time.

    Examples
    --------
    >>> final_accuracy([0.2, 0.6, 0.9])
    0.9
    >>> final_accuracy([0.1] * 36 + [0.8] * 4, at_equal_times=True)
    0.8
    """
    counted = min(_FINAL_TESTS, max(len(tested) // _FINAL_SHARE, 1))
    if at_equal_times:
        counted = max(len(tested) // _FINAL_TENTH, 1)
    return statistics.fmean(tested[-counted:])


def summarise(
    scenario: Scenario,
    cells: Sequence[RunResult],
    groups: Sequence[TensorGroup],
    running: RunResult | None = None,
) -> dict[str, Any]:
    """Return the summary of all cells, as plain JSON values; that of the running cell counts as far as it is.

    Final accuracy is `final_accuracy`, averaged over seeds. The costs of choosing and of cost profiles are shares
    of the simulated time of all clients together. Time to target is when the mean curve over seeds first reaches
    the target method's final accuracy minus the scenario's margin, after at least one round. Speed-ups compare
    measured steps. The numerator is the median of all steps, in any cell of this simulation, that trained
    everything. The denominator is the device's median step (step speed-up), or its mean time per step of a full
    round, in which omitted steps take no time (achieved speed-up).
    """
    if running is not None:
        cells = [*cells, running]
    by_method = {m.name: [c for c in cells if c.method == m.name] for m in scenario.methods}
    target = _target(scenario, by_method)
    full_step = _full_step(cells)
    devices = _devices(scenario)
    methods = {
        method.name: _method(scenario, by_method[method.name], method.budgeted, target, full_step)
        for method in scenario.methods
        if by_method[method.name]
    }
    return {
        "title": scenario.title,
        "dataset": scenario.data.dataset,
        "model": scenario.model.name,
        "clients": len(scenario.clients),
        "rounds": scenario.training.rounds,
        "seeds": list(scenario.seeds),
        "simulated": True,
        "running": None
        if running is None
        else {
            "method": running.method,
            "seed": running.seed,
            "round": running.history[-1]["round"],
        },
        "final_accuracy_rule": "mean over the last tenth of the time"
        if scenario.training.tests
        else f"mean of the last {_FINAL_TESTS} tests, at most of the last quarter",
        "target_accuracy": target,
        "largest_class": _largest_class(cells),
        "target_rule": None
        if scenario.target is None
        else f"final accuracy of {scenario.target.method} minus {100 * scenario.target.minus:g} points",
        "environment": environment(),
        "devices": devices,
        "groups": [group.name for group in groups],
        "labels": next((cell.labels for cell in cells if cell.labels), []),
        "scenario": json.loads(scenario.to_json()),
        "methods": methods,
    }


def without_curves(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary, without parts that grow with rounds, clients or groups, to keep in a repository."""
    methods = {
        name: {key: value for key, value in method.items() if key not in _LONG}
        for name, method in summary["methods"].items()
    }
    short = {key: value for key, value in summary.items() if key not in _LONG}
    return {**short, "methods": methods}


def _final_accuracy(scenario: Scenario, cell: RunResult) -> float:
    tested = cell.history[1:] if scenario.training.tests else _after_rounds(cell)
    return final_accuracy(
        [row["accuracy"] for row in tested or cell.history],
        at_equal_times=scenario.training.tests is not None,
    )


def _after_rounds(cell: RunResult) -> list[dict[str, float]]:
    """Return the tests after a round, without that of the untrained model, which is not a result."""
    return [row for row in cell.history if row["round"] > 0]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _target(scenario: Scenario, by_method: dict[str, list[RunResult]]) -> float | None:
    if scenario.target is None or not by_method.get(scenario.target.method):
        return None
    reached = [_final_accuracy(scenario, cell) for cell in by_method[scenario.target.method]]
    return statistics.fmean(reached) - scenario.target.minus


def _largest_class(cells: Sequence[RunResult]) -> float | None:
    """Return the share of the most frequent class among test examples: the accuracy of always predicting it."""
    tested = next(([count for _, count in cell.classes] for cell in cells if cell.classes), [])
    return max(tested) / sum(tested) if sum(tested) else None


def _full_step(cells: Sequence[RunResult]) -> float | None:
    full = [step.seconds for cell in cells for step in cell.steps if step.everything]
    return statistics.median(full) if full else None


def _devices(scenario: Scenario) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for client in scenario.clients:
        entry = found.setdefault(
            client.device.name,
            {
                "device": client.device.name,
                "label": client.device.label,
                "count": 0,
                "slowdown": client.device.slowdown,
                "requested_speedup": client.speedup,
                "memory_bytes": client.memory_bytes,
            },
        )
        entry["count"] += 1
    return list(found.values())


def _method(
    scenario: Scenario,
    cells: list[RunResult],
    budgeted: bool,
    target: float | None,
    full_step: float | None,
) -> dict[str, Any]:
    finals = [_final_accuracy(scenario, cell) for cell in cells]
    last = [cell.history[-1] for cell in cells]
    return {
        "final_accuracy": statistics.fmean(finals),
        "final_accuracy_std": statistics.stdev(finals) if len(finals) > 1 else 0.0,
        "rounds": scenario.training.rounds,
        "simulated_seconds": statistics.fmean(row["simulated_seconds"] for row in last),
        "seconds_to_target": None if target is None else _seconds_to(cells, target),
        "uplink_bytes": statistics.fmean(row["uplink_bytes"] for row in last),
        "downlink_bytes": statistics.fmean(row["downlink_bytes"] for row in last),
        "choosing_share": _share(
            sum(cell.choosing_seconds for cell in cells), sum(cell.client_seconds for cell in cells)
        ),
        "profile_share": _share(
            sum(cell.profile_seconds for cell in cells), sum(cell.client_seconds for cell in cells)
        ),
        "rejected_updates": sum(cell.rejected for cell in cells),
        "rejections": [
            {"seed": cell.seed, "round": int(number), "reason": reason, "updates": updates}
            for cell in cells
            for reason, rounds in cell.rejections.items()
            for number, updates in rounds.items()
        ],
        "cuts": [
            {"seed": cell.seed, "simulated_seconds": since, "group": group}
            for cell in cells
            for since, group in cell.cuts
        ],
        "features_found": sum(cell.features_found for cell in cells),
        "features_computed": sum(cell.features_computed for cell in cells),
        "devices": {
            entry["device"]: {
                "requested_speedup": entry["requested_speedup"] if budgeted else 1.0,
                **_speedups(cells, entry["device"], full_step),
                "peak_bytes": max((c.peaks.get(entry["device"], 0.0) for c in cells), default=0.0)
                or None,
            }
            for entry in _devices(scenario)
        },
        "coverage": _mean_coverage(cells),
        "history": [row for cell in cells for row in cell.rows()],
        **_clients(scenario, cells),
    }


def _clients(scenario: Scenario, cells: list[RunResult]) -> dict[str, Any]:
    """Return each client's costs and the accuracy of the last model for it, averaged over seeds.

    That accuracy is the model's on test examples of each class, weighted by the client's own classes. The worst
    and the best client and the tenth percentile are computed among the clients of each seed, then averaged.
    """
    if not all(cell.labels and cell.classes for cell in cells):
        return {"clients": []}
    own = [[_own_accuracy(labels, cell.classes) for labels in cell.labels] for cell in cells]
    rows = []
    for index, client in enumerate(scenario.clients):
        spent = [cell.clients.get(str(index), {}) for cell in cells]
        rows.append(
            {
                "client": index,
                "device": client.device.name,
                "examples": statistics.fmean(sum(cell.labels[index]) for cell in cells),
                "accuracy": _mean([each[index] for each in own]),
                **{
                    name: statistics.fmean(each.get(name, 0.0) for each in spent)
                    for name in ("rounds", "seconds", "uplink_bytes", "downlink_bytes")
                },
            }
        )
    known = [[each for each in seed if each is not None] for seed in own]
    return {
        "clients": rows,
        "worst_client": _mean([min(each, default=None) for each in known]),
        "best_client": _mean([max(each, default=None) for each in known]),
        "tenth_percentile": _mean([_tenth(each) for each in known]),
    }


def _own_accuracy(labels: Sequence[int], classes: Sequence[tuple[int, int]]) -> float | None:
    """Return the accuracy on test examples in the proportions of a client's classes; None if none was tested."""
    pairs = [(n, right / all_) for n, (right, all_) in zip(labels, classes, strict=True) if all_]
    weight = sum(count for count, _ in pairs)
    return sum(count * share for count, share in pairs) / weight if weight else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _tenth(values: Sequence[float]) -> float | None:
    """Return the value that nine clients in ten reach or exceed."""
    return sorted(values)[len(values) // 10] if values else None


def _seconds_to(cells: list[RunResult], target: float) -> float | None:
    """Return the time at which the mean over seeds first reaches the target, after at least a round of each."""
    for rows in _together(cells):
        trained = all(row["round"] > 0 for row in rows)
        if trained and statistics.fmean(row["accuracy"] for row in rows) >= target:
            return statistics.fmean(row["simulated_seconds"] for row in rows)
    return None


def _together(cells: list[RunResult]) -> list[tuple[dict[str, float], ...]]:
    """Return the tests of all seeds that belong together: by time if they come at equal intervals, else by round.

    After the last round that all have, tests follow each other: limited time ends seeds after different rounds.
    """
    timed = all("since" in row for cell in cells for row in cell.history)
    key = "simulated_seconds" if timed else "round"
    by_key = [{row[key]: row for row in cell.history} for cell in cells]
    shared = sorted(set.intersection(*({*rows} for rows in by_key)))
    rest = [
        [row for each, row in rows.items() if not shared or each > shared[-1]] for rows in by_key
    ]
    found = [tuple(rows[each] for rows in by_key) for each in shared]
    return [*found, *zip(*rest, strict=False)]


def _speedups(
    cells: list[RunResult], device: str, full_step: float | None
) -> dict[str, float | None]:
    steps = [step for cell in cells for step in cell.steps if step.device == device]
    if not steps or full_step is None:
        return {"achieved_speedup": None, "step_speedup": None, "step_share": None}
    per_requested_step = statistics.fmean(step.seconds * step.share for step in steps)
    return {
        "achieved_speedup": full_step / per_requested_step,
        "step_speedup": full_step / statistics.median(step.seconds for step in steps),
        "step_share": statistics.fmean(step.share for step in steps),
    }


def _mean_coverage(cells: list[RunResult]) -> dict[str, list[list[float]]]:
    return {
        device: [
            [statistics.fmean(shares) for shares in zip(*rows, strict=True)]
            for rows in zip(*(cell.coverage[device] for cell in cells), strict=False)
        ]
        for device in (cells[0].coverage if cells else {})
    }
