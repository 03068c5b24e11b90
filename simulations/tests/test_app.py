"""The app that ``flwr run simulations`` starts, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.app import client_app, server_app
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid


def run(clients: int, **config: str) -> None:
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    server_app(InProcessGrid(clients, client_app), context)


@pytest.mark.slow
def test_settings_of_the_run_reach_the_scenario(tmp_path: Path) -> None:
    changes = "training.rounds=1; seeds=0; methods=head; target.method=head; training.local_steps=1"
    run(10, scenario="demo", set=changes, output=str(tmp_path / "out"))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(summary["methods"]) == ["head"] and summary["methods"]["head"]["rounds"] == 1
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"scenario": "no_such_scenario"}, "no_such_scenario"),
        ({"scenario": "demo", "set": "training.rounds"}, "training.rounds"),
        ({"scenario": "demo", "set": "methods=heed; target.method=heed"}, "did you mean 'head'"),
    ],
)
def test_what_is_wrong_ends_the_run(config: dict[str, str], why: str) -> None:
    with pytest.raises(ScenarioError, match=why):
        run(10, **config)
