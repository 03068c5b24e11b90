"""Scenarios: what a file says, defaults for the rest, and an exact round trip through JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.scenario import Scenario
from fl_elastic_simulations.scenario.sections import (
    DataSection,
    MethodSection,
    TargetSection,
    TrainingSection,
)
from fl_elastic_simulations.unequal.devices import device

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"

SMALLEST = """
[data]
dataset = "digits"
[model]
name = "digits_cnn"
[training]
rounds = 3
[[fleet]]
device = "pi_5"
"""

EVERYTHING = """
title = "Everything said"
seeds = [3, 1]

[data]
dataset = "har"
partition = "natural"
alpha = 2
min_examples = 7
train_limit = 1000
test_limit = 100

[model]
name = "har_cnn"

[training]
rounds = 4
local_epochs = 2
batch_size = 8
optimizer = "adamw"
learning_rate = 1e-3
momentum = 0.5
weight_decay = 0.01
client_fraction = 0.5

[[fleet]]
device = "pi_4b"
count = 2
speedup = 2

[[fleet]]
device = "laptop"
slowdown = 0.25
memory_bytes = 1000000
uplink_bytes_per_second = 1e5
downlink_bytes_per_second = 2e5

[target]
method = "full"
minus = 0.02

[method.full]

[method.shallow]
policy = "head"
importance = "fisher"
rule = "all"
codec = "int8"
budgeted = false
"""


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    """Return the path of a scenario file that is still to be written."""
    return tmp_path / "mine.toml"


def _load(path: Path, text: str, *overrides: str) -> Scenario:
    path.write_text(text)
    return Scenario.load(path, overrides)


def test_what_is_left_out_has_defaults(scenario_file: Path) -> None:
    scenario = _load(scenario_file, SMALLEST)
    assert scenario.title == "mine.toml"
    assert scenario.seeds == (0,)
    assert [method.name for method in scenario.methods] == ["full", "elastic"]
    assert scenario.data == DataSection("digits", "iid", 0.5, 10, None, None)
    assert scenario.training == TrainingSection(3, 1, 32, "sgd", 0.05, 0.0, 0.0, 1.0)
    assert scenario.target == TargetSection("full", 0.01)


def test_everything_can_be_said(scenario_file: Path) -> None:
    scenario = _load(scenario_file, EVERYTHING)
    assert scenario.title == "Everything said"
    assert scenario.seeds == (3, 1)
    assert scenario.data == DataSection("har", "natural", 2.0, 7, 1000, 100)
    assert scenario.training == TrainingSection(4, 2, 8, "adamw", 1e-3, 0.5, 0.01, 0.5)
    assert scenario.target == TargetSection("full", 0.02)
    assert scenario.methods == (
        MethodSection("full", "full", "elastic", "contributors", "fp32", False),
        MethodSection("shallow", "head", "fisher", "all", "int8", False),
    )


def test_clients_are_numbered_in_the_order_of_the_fleet(scenario_file: Path) -> None:
    clients = _load(scenario_file, EVERYTHING).clients
    assert [client.index for client in clients] == [0, 1, 2]
    assert [client.device.name for client in clients] == ["pi_4b", "pi_4b", "laptop"]
    assert [client.speedup for client in clients] == [2.0, 2.0, 1.0]
    assert clients[0].device == device("pi_4b")
    changed = clients[2].device
    assert changed.slowdown == 0.25
    assert [client.memory_bytes for client in clients] == [None, None, 1_000_000]
    assert (changed.uplink_bytes_per_second, changed.downlink_bytes_per_second) == (1e5, 2e5)


def test_budgets_apply_to_every_policy_but_full(scenario_file: Path) -> None:
    text = SMALLEST + '[method.a]\npolicy = "full"\n[method.b]\npolicy = "head"\n'
    scenario = _load(scenario_file, text)
    assert [(method.name, method.budgeted) for method in scenario.methods] == [
        ("a", False),
        ("b", True),
    ]
    forced = _load(scenario_file, text, "method.a.budgeted=true", "method.b.budgeted=false")
    assert [method.budgeted for method in forced.methods] == [True, False]


def test_a_list_of_methods_chooses_among_the_tables(scenario_file: Path) -> None:
    scenario = _load(scenario_file, EVERYTHING, "methods=shallow,full,elastic")
    assert [method.name for method in scenario.methods] == ["shallow", "full", "elastic"]
    assert [method.policy for method in scenario.methods] == ["head", "full", "elastic"]


def test_without_a_full_method_there_is_no_target_unless_one_is_named(scenario_file: Path) -> None:
    assert _load(scenario_file, SMALLEST, "methods=elastic").target is None
    named = _load(scenario_file, SMALLEST, "methods=elastic", "target.method=elastic")
    assert named.target == TargetSection("elastic", 0.01)


@pytest.mark.parametrize(
    "overrides", [(), ("methods=elastic,full",), ("seeds=5", "target.minus=0")]
)
@pytest.mark.parametrize("text", [SMALLEST, EVERYTHING])
def test_json_brings_back_the_same_scenario(
    scenario_file: Path, text: str, overrides: tuple[str, ...]
) -> None:
    scenario = _load(scenario_file, text, *overrides)
    again = Scenario.from_json(scenario.to_json())
    assert again == scenario
    assert again.clients == scenario.clients
    assert again.to_json() == scenario.to_json()


def test_json_of_a_scenario_without_a_target_brings_it_back(scenario_file: Path) -> None:
    scenario = _load(scenario_file, SMALLEST, "methods=elastic")
    assert Scenario.from_json(scenario.to_json()) == scenario


def test_json_is_checked_like_a_file(scenario_file: Path) -> None:
    table = json.loads(_load(scenario_file, SMALLEST).to_json())
    table["training"]["rounds"] = 0
    with pytest.raises(ScenarioError, match=r"training\.rounds: 0 is below 1"):
        Scenario.from_json(json.dumps(table))
    with pytest.raises(ScenarioError, match="not valid JSON"):
        Scenario.from_json("{")
    with pytest.raises(ScenarioError, match="not a JSON object but list"):
        Scenario.from_json("[]")


@pytest.mark.parametrize("name", ["demo", "fashion_mnist", "cifar10"])
def test_the_shipped_scenarios_are_valid_and_come_back_from_json(name: str) -> None:
    scenario = Scenario.load(SCENARIOS / f"{name}.toml")
    assert Scenario.from_json(scenario.to_json()) == scenario
    assert {"full", "elastic"} <= {method.name for method in scenario.methods}
    assert any(client.speedup > 1 for client in scenario.clients)
    assert scenario.target == TargetSection("full", 0.01)


def test_the_demo_has_the_ten_devices_that_its_text_promises() -> None:
    scenario = Scenario.load(SCENARIOS / "demo.toml")
    names = [client.device.name for client in scenario.clients]
    pairs = ["pi_zero_2_w", "pi_3b_plus", "pi_4b", "pi_5"]
    assert names == [name for name in pairs for _ in range(2)] + ["jetson_nano", "laptop"]
    assert (scenario.data.dataset, scenario.data.partition, scenario.data.alpha) == (
        "digits",
        "dirichlet",
        0.3,
    )
    assert [method.name for method in scenario.methods] == ["full", "elastic"]


def test_the_packages_do_not_import_flower() -> None:
    code = (
        "import sys, fl_elastic_simulations.scenario, fl_elastic.devices;"
        "print(sorted(name for name in ('flwr', 'torchvision', 'sklearn') if name in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def _print(folder: Path, text: str, trace: str = "") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "trace.csv").write_text(f"client,from,to\n0,0,{trace or 10}\n")
    (folder / "scenario.toml").write_text(text)
    found = Scenario.load(folder / "scenario.toml")
    return found.fingerprint(found.methods[0])


def test_what_decides_a_result_is_in_its_fingerprint(tmp_path: Path) -> None:
    traced = SMALLEST + 'availability = { trace = "trace.csv" }\n'
    one = tmp_path / "one"
    texts = [
        SMALLEST, traced, SMALLEST + "slowdown = 3\n", SMALLEST + "count = 2\n",
        SMALLEST + "[deadline]\nseconds = 3\n", SMALLEST + "[deadline]\nseconds = 4\n",
        SMALLEST + "[deadline]\nquantile = 0.5\n",
    ]  # fmt: skip
    prints = [*(_print(one, text) for text in texts), _print(one, traced, trace="20")]
    assert len({*prints}) == len(prints)


def test_what_decides_nothing_is_not_in_it(tmp_path: Path) -> None:
    traced = SMALLEST + 'availability = { trace = "trace.csv" }\n'
    assert _print(tmp_path / "one", traced) == _print(tmp_path / "moved", traced)
    assert _print(tmp_path, SMALLEST) == _print(tmp_path, f"seeds = [1, 2]\n{SMALLEST}")
