"""The dashboard asks for metrics that a fleet really has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from fl_elastic.monitoring.exporter import journal_metrics

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
# As a server writes them: a round with one node on a board that tells everything.
ENTRY = {
    "round": 3, "time": 1.0, "round_seconds": 2.0, "accuracy": 0.5, "loss": 1.0, "accepted": 2,
    "rejected": 0, "accepted_total": 6, "rejected_total": 1, "uplink_bytes": 5,
    "uplink_bytes_total": 9, "downlink_bytes": 5, "downlink_bytes_total": 9,
    "nodes": {
        "pi0": {
            "step_seconds": 0.1, "steps": 2, "requested_steps": 4, "coverage": 0.5,
            "temperature_celsius": 60.0, "disk_free_bytes": 1.0,
            "peak_memory_bytes": 1.0, "uplink_bytes": 3, "train_loss": 0.3,
        }
    },
}  # fmt: skip


def expressions() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("expression", expressions())
def test_every_panel_asks_for_a_metric_that_is_there(expression: str) -> None:
    known = {metric.name for metric in journal_metrics(ENTRY, 2.0)}
    asked = set(re.findall(r"fl_elastic_[a-z_]+(?=\{)", expression))
    assert asked and asked <= known


def test_panels_do_not_overlap_and_ask_the_job_that_is_scraped() -> None:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    cells = [
        (panel["gridPos"]["x"] + column, panel["gridPos"]["y"] + row)
        for panel in dashboard["panels"]
        for column in range(panel["gridPos"]["w"])
        for row in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    jobs = {
        each["job_name"]
        for each in yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    }
    assert {job for text in expressions() for job in re.findall(r'job="(\w+)"', text)} <= jobs
