"""The benchmark of adapters: what its table says of cells, and that its scenario is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fl_elastic_simulations.benchmarks import lora
from fl_elastic_simulations.benchmarks.benchmark import Request, Results, markdown
from fl_elastic_simulations.benchmarks.federation import Federation
from fl_elastic_simulations.benchmarks.federation_methods import REFERENCE
from fl_elastic_simulations.benchmarks.federation_tasks import method_key, task_scenario
from fl_elastic_simulations.benchmarks.lora import BASE, LORA, METHODS, Adapters
from fl_elastic_simulations.engine.methods import check_methods
from fl_elastic_simulations.models.pretraining import Recipe


def cell(
    accuracy: float, accepted: int, rejected: int, *curve: tuple[float, int, float]
) -> dict[str, Any]:
    return {
        "final_accuracy": accuracy, "accepted": accepted, "rejected": rejected,
        "uplink_bytes": 1e6, "downlink_bytes": 2e6,
        "curve": [[0.0, 0, 0, 0.1], *([seconds, n, n, reached] for seconds, n, reached in curve)],
    }  # fmt: skip


def test_a_row_says_what_its_cells_say() -> None:
    rows = {
        f"plays | {REFERENCE} | 0": cell(0.4, 6, 2, (4.0, 40, 0.3), (8.0, 80, 0.4)),
        f"plays | {REFERENCE} | 1": cell(0.4, 6, 2, (4.0, 40, 0.3), (8.0, 80, 0.4)),
        "plays | ffa-lora | 0": cell(0.5, 8, 0, (2.0, 10, 0.45), (8.0, 80, 0.5)),
        "plays | ffa-lora | 1": cell(0.34, 6, 2, (2.0, 10, 0.2), (8.0, 80, 0.34)),
        "plays | dropping | 0": cell(0.2, 4, 12, (8.0, 80, 0.2)),
        "plays | lisa-style | 5": cell(0.2, 4, 12, (8.0, 80, 0.2)),
    }
    lines = markdown(lora.BENCHMARK.tables(rows)["plays"]).splitlines()
    assert lines[2:] == [
        f"| {REFERENCE} | 2 | 40.0 |  |  |  | 1.00 MB | 2.00 MB | 75 % |",
        "| dropping | 1 | 20.0 | -20.0 | never | never | 1.00 MB | 2.00 MB | 25 % |",
        "| ffa-lora | 2 | 42.0 | +2.0 | 4.0x in 1 of 2 | 8.0x | 1.00 MB | 2.00 MB | 88 % |",
    ]


@pytest.mark.parametrize("name", LORA)
def test_every_task_is_a_scenario_with_all_methods(name: str) -> None:
    task = LORA[name]
    scenario = task_scenario(task)
    check_methods(scenario)
    assert {each.name for each in scenario.methods} == {method_key(each) for each in task.methods}
    assert set(METHODS) <= set(task.methods)
    limited = [client for client in scenario.clients if client.memory_bytes is not None]
    assert 3 * len(limited) == len(scenario.clients)
    assert {client.device.slowdown for client in limited} == {16.0}


def test_a_base_that_is_there_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Adapters, "recipe", Recipe(steps=1, batch_size=1, warm_up=1))
    monkeypatch.setattr(Federation, "measure", lambda *_: None)
    threads = torch.get_num_threads()
    results = Results(tmp_path / "lora.json")
    for _ in range(2):
        Adapters().measure(results, Request(tmp_path, tasks=["plays"]), 1, lambda _: None)
    assert list(results.rows) == [BASE["plays"]]
    task = Adapters().task("plays")
    assert Path(task.weights).exists() and task.model == LORA["plays"].model
    assert torch.get_num_threads() == threads
