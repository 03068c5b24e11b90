"""Whether first fits hold memory budgets: peaks of fresh processes on eight models of unlike kinds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fl_elastic.errors import TrainingError
from fl_elastic_simulations.benchmarks.results import Results
from fl_elastic_simulations.benchmarks.unlike_models import UNLIKE_MODELS

__all__ = ["bench_fit_peaks", "fit_peaks_markdown"]

_SHARES = (4, 8)


def bench_fit_peaks(results: Results, tell: Callable[[str], None]) -> None:
    """Fit each model under shares of what a full step keeps, each fit in a process of its own with one thread.

    A peak is that of the resident set from before the fit until the update is handed over, above the one that the
    same process reached by one inference of the same batch.
    """
    for name in UNLIKE_MODELS:
        if name not in results.rows:
            tell(name)
            full = _measured(name)
            shares = {
                f"1/{share}": _measured(name, full["kept_bytes"] / share) for share in _SHARES
            }
            results.add(name, {"full": full, **shares})


def fit_peaks_markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of all models: peaks over budgets, and over what a full step keeps for plain full steps."""
    heads = " | ".join(f"1/{share}: budget, MB | peak over it | groups" for share in _SHARES)
    columns = 3 + 3 * len(_SHARES)
    lines = [
        f"| | full step keeps, MB | plain full steps' peak over that | {heads} |",
        f"|{' --- |' * columns}",
    ]
    for name, row in rows.items():
        full = row["full"]
        cells = [
            f"{full['kept_bytes'] / 1e6:.0f}",
            f"{full['peak_bytes'] / full['kept_bytes']:.2f}",
        ]
        for share in _SHARES:
            fit = row[f"1/{share}"]
            cells.append(f"{fit['budget_bytes'] / 1e6:.0f}")
            if "refused" in fit:
                cells += ["refused", "none"]
            else:
                cells += [
                    f"{fit['peak_over_budget']:.2f}",
                    f"{fit['groups']} of {fit['of_groups']}",
                ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _measured(name: str, memory: float | None = None) -> dict[str, Any]:
    asked = [name] if memory is None else [name, str(memory)]
    ended = subprocess.run(
        [sys.executable, "-m", "fl_elastic_simulations.benchmarks.one_fit", *asked],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise TrainingError(f"the process that fits {name} ended with {last!r}")
    row: dict[str, Any] = json.loads(ended.stdout)
    return row
