"""Each ablation is compared with its own seeds' runs of what it changes."""

from __future__ import annotations

from typing import Any

from fl_elastic.bench.federation_ablations import ablation_markdown
from fl_elastic.bench.federation_methods import ABLATED, ABLATIONS

TASK = "har-correlated"


def summary(accuracy: float, ratio: float | None) -> dict[str, Any]:
    return {"accuracy": accuracy, "time_ratio": ratio, "uplink_ratio": ratio}


def test_differences_are_taken_within_each_seed() -> None:
    changed, missing = [name for name in ABLATIONS if name != ABLATED][:2]
    rows: dict[str, dict[str, Any]] = {
        f"{TASK} | {ABLATED} | 0": {"final_accuracy": 0.5},
        f"{TASK} | {ABLATED} | 1": {"final_accuracy": 0.7},
        f"{TASK} | {changed} | 0": {"final_accuracy": 0.4},
        f"{TASK} | {changed} | 1": {"final_accuracy": 0.6},
        # Without a seed in common there is nothing to compare.
        f"{TASK} | {missing} | 2": {"final_accuracy": 0.9},
        f"summary {TASK} | {ABLATED}": summary(0.6, 2.0),
        f"summary {TASK} | {changed}": summary(0.5, None),
        f"summary {TASK} | {missing}": summary(0.9, 1.0),
    }
    assert ablation_markdown(rows, TASK)[2:] == [
        "| none | 60.0 |  | 2.0x | 2.0x |",
        f"| {changed} | 50.0 | -10.0 ± 0.0 | never | never |",
    ]
