"""What the pages say of prepared backbones and of the learned selector is what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_elastic_simulations.benchmarks import prepare, selector
from fl_elastic_simulations.models.pooled_features import find_features

ROOT = Path(__file__).parents[3]


def rows_of(name: str) -> dict[str, dict[str, Any]]:
    path = ROOT / "simulations" / "results" / f"{name}.json"
    rows: dict[str, dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_the_page_of_prepare_shows_its_table() -> None:
    rows = rows_of("prepare")
    assert set(rows) == {f"{start} | {seed}" for start in prepare.STARTS for seed in prepare.SEEDS}
    assert prepare.prepare_markdown(rows) in (ROOT / "docs/how-to/prepare.md").read_text()


def test_the_page_of_choosing_shows_the_selectors_table_and_times() -> None:
    rows, page = rows_of("selector"), (ROOT / "docs/how-to/choosing.md").read_text()
    tasks = range(selector.TASKS)
    assert set(rows) == {f"{data} | {number}" for data in selector.DATASETS for number in tasks}
    assert selector.selector_markdown(rows) in page
    for count in selector.TIMED:
        seconds = [
            np.mean([row[f"{score}_seconds_{count}"] for row in rows.values()])
            for score in ("fisher", "learned")
        ]
        fisher, learned = (f"{each:.2f} s" for each in seconds)
        assert (
            f"From {count} examples Fisher potentials take {fisher} and the selector {learned}"
            in page
        )
    assert all(
        row[f"{policy} macs"] <= 0.15 for row in rows.values() for policy in selector.COMPARED
    )


def test_the_student_is_a_quarter_throughout() -> None:
    model = prepare.quarter_mobilenet()
    place = find_features(model, torch.zeros(2, 3, 48, 48))
    assert place.width == 320 and place.relu is not None
    assert sum(each.numel() for each in model.parameters()) == 162_602
