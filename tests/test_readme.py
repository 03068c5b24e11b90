"""What the README shows runs as it stands there."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import nn

from fl_elastic.flower import Deadline, PartialUpdates
from fl_elastic_simulations.engine.merging_cost import MERGED

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 6), torch.tensor([0, 1, 1, 0])) for _ in range(3)]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def test_flower_example_builds_both_apps_and_a_working_client(monkeypatch, tmp_path: Path) -> None:
    project = types.ModuleType("my_project")
    project.Net, project.load_data = _net, lambda partition: (_batches(), _batches())
    monkeypatch.setitem(sys.modules, "my_project", project)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(BLOCKS[0], names)
    assert isinstance(names["client_app"], ClientApp)
    assert isinstance(names["server_app"], ServerApp)
    context = types.SimpleNamespace(node_config={"partition-id": 0})
    client = names["client_fn"](context)
    weights, examples, metrics = client.fit(client.get_parameters({}), {})
    assert examples == 12
    assert len(weights) == len(client.manifest)
    assert metrics["steps"] == 3


def test_example_of_unequal_devices_is_a_strategy() -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[1], names)
    strategy = names["strategy"]
    assert isinstance(strategy, PartialUpdates)
    assert strategy.rule == "contributors" and strategy.merges_late
    assert strategy.terms.quota == 8 and strategy.terms.deadline == Deadline(seconds=60)


def test_trainer_example_trains_and_gives_an_update() -> None:
    names: dict[str, Any] = {
        "model": _net(),
        "loss_fn": nn.functional.cross_entropy,
        "optimizer_fn": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "loader": _batches(),
    }
    exec(BLOCKS[2], names)
    assert names["report"].steps >= 1
    assert names["update"].deltas


def test_engine_example_trains_within_its_memory() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    batches = [(torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 1, 0])) for _ in range(3)]
    names: dict[str, Any] = {
        "model": model,
        "loss_fn": nn.functional.cross_entropy,
        "optimizer_fn": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "loader": batches,
    }
    exec(BLOCKS[3], names)
    report = names["report"]
    assert report.plan.lean and report.plan.predicted_step_bytes <= 100e6
    assert report.forward is not None


def test_a_loop_of_ones_own_trains_by_a_plan() -> None:
    names: dict[str, Any] = {
        "model": _net(),
        "loss_fn": nn.functional.cross_entropy,
        "optimizer_fn": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "batches": _batches(),
    }
    exec(BLOCKS[4], names)
    assert set(names["update"].deltas) == set(names["plan"].trained_parameters)
    assert names["update"].num_examples == 12


def test_an_app_of_ones_own_gets_the_care_of_a_node() -> None:
    names: dict[str, Any] = {"client_fn": lambda context: None}
    exec(BLOCKS[5], names)
    assert isinstance(names["client_app"], ClientApp)


def test_flower_example_is_about_twenty_lines() -> None:
    code = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(code) <= 24


@pytest.mark.parametrize("link", re.findall(r"\]\(((?!http|#)[^)]+)\)", README))
def test_linked_files_exist(link: str) -> None:
    assert (ROOT / link).exists()


RESULTS = ROOT / "simulations" / "results"


def _rows(name: str) -> dict[str, Any]:
    rows: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return rows


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def test_the_figures_in_short_are_the_committed_ones() -> None:
    lines = {
        line[4:].split(".**")[0]: line for line in README.splitlines() if line.startswith("- **")
    }
    solver, budget = _rows("solver"), _rows("budget")
    twice = [row["achieved_speedup"] for name, row in budget.items() if name.endswith(" at 2.0")]
    exact = f"{solver['exactness']['mismatches']} of {solver['exactness']['instances']:,} random"
    assert exact in lines["Exact plans"]
    assert (
        f"{solver['time at 500 groups']['median_cpu_milliseconds']:.1f} ms" in lines["Exact plans"]
    )
    assert f"{min(twice):.2f} to {max(twice):.2f} times" in lines["Exact plans"]

    transfer, ours = _rows("transfer"), "head first, elastic, cached prefix, at 3, 3 epochs"
    reached, full = transfer[f"summary {ours}"], transfer["summary full"]
    beside = transfer[f"paired {ours}"]["time"]
    shown = f"{_percent(reached['accuracy'])} % in {reached['time']:.2f} of the time ({beside:.2f} timed"
    assert shown in lines["Fine-tuning"]
    assert f"gets {_percent(full['accuracy'])} %" in lines["Fine-tuning"]

    for model, words in (("mobilenet_v2", "times fewer bytes"), ("resnet18", "times fewer,")):
        row = _rows("memory")[f"{model} | joint, exact gradients | 1/8"]
        assert f"{row['times_less_than_same_groups']:.1f} {words}" in lines["Memory"]
        for when in ("lean", "full"):
            assert f" {row[f'peak_bytes_{when}'] / 1e6:.0f} MB" in lines["Memory"].replace("(", " ")

    merging = _rows("aggregation")
    for kind in MERGED[:2]:
        row = merging[f"{kind} | 100"]
        assert f"{1000 * row['seconds_per_reply']:.1f} ms" in lines["Server"]

    theirs, whole = (merging[f"{kind} | 100"]["peak_models"] for kind in MERGED[:2])
    assert f"in {whole:.0f} models of memory ({theirs:.0f})" in lines["Server"]

    streams = _rows("stream")
    latent, replay = (
        streams[f"summary fashion-classes | {method}"]
        for method in ("elastic, latent replay", "full, replay")
    )
    accuracies = f"{_percent(latent['score'])} and {_percent(replay['score'])} %"
    assert accuracies in lines["Streams"]
    assert f"{latent['adapting_seconds_ratio']:.2f} of its time" in lines["Streams"]
    assert latent["store_bytes_ratio"] < 0.1 and "a tenth of its store" in lines["Streams"]
    assert len(_rows("faults")) == 12 and "in twelve ways" in lines["Real fleets"]
