"""A new project: what is written, and that it runs at once."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from real_processes import (
    binary,
    end,
    environment,
    free_port,
    status_of,
    superlink_of,
    with_all_below,
)

from fl_elastic.errors import ScenarioError
from fl_elastic_simulations.cli.init import write_project
from fl_elastic_simulations.scenario import Scenario

COMMAND = "from fl_elastic.cli import main; main()"


def test_what_is_written_is_an_app_of_flower_and_a_scenario(tmp_path: Path) -> None:
    folder = tmp_path / "My-project2"
    written = write_project(folder)
    found = {str(path.relative_to(folder)) for path in written}
    assert found == {
        "pyproject.toml", "README.md", "scenario.toml", "my_project2/__init__.py",
        "my_project2/task.py", "my_project2/client_app.py", "my_project2/server_app.py",
    }  # fmt: skip
    assert not any(re.search(r"\$[a-z{]", path.read_text()) for path in written)
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "My-project2"
    for component in project["tool"]["flwr"]["app"]["components"].values():
        module, _, attribute = component.partition(":")
        tree = ast.parse((folder / f"{module.replace('.', '/')}.py").read_text())
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        assert attribute in [ast.unparse(target) for node in assigned for target in node.targets]
    scenario = Scenario.load(folder / "scenario.toml")
    assert scenario.data.dataset == "my_project2.task:dataset"
    assert scenario.model.name == "my_project2.task:Net"


def test_two_projects_share_neither_server_nor_state(tmp_path: Path) -> None:
    ports, states = set(), set()
    for name in ("one", "two"):
        folder = tmp_path / 'a "b' / name
        write_project(folder)
        readme = (folder / "README.md").read_text()
        ports.add(*re.findall(r"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=(\d+)\n", readme))
        assert (
            "FLWR_HOME=$PWD/.flwr" in readme and 'pgrep -f "flower-superlink.*$FLWR_HOME"' in readme
        )
        config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
            "config"
        ]
        assert config["state-dir"] == str(folder.resolve() / "state")
        states.add(config["state-dir"])
        assert 'run_config["state-dir"]' in (folder / name / "client_app.py").read_text()
    assert len(ports) == len(states) == 2 and all(39100 <= int(port) < 39900 for port in ports)


@pytest.mark.parametrize("name", ["2nd", "my_project", "a" * 33, "has space"])
def test_names_that_flower_does_not_take_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="letters, digits and hyphens"):
        write_project(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    with pytest.raises(ScenarioError, match="not empty"):
        write_project(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_it_is_formatted_and_has_no_slip(tmp_path: Path) -> None:
    write_project(tmp_path / "fresh")
    for words in (["check", "--select", "E,F,W,I,UP,B"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--isolated", "--line-length", "100", "fresh"],
            cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_scenario_of_a_new_project_runs(tmp_path: Path) -> None:
    folder = tmp_path / "fresh"
    write_project(folder)
    words = ["simulate", "scenario.toml", "--engine", "local"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words], cwd=folder, capture_output=True, text=True,
        timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "out" / "summary.json").read_text())
    full, elastic = (summary["methods"][name] for name in ("full", "elastic"))
    # It shows a case where it pays: about as good in the end, and at the target.
    assert (
        full["final_accuracy"] > 0.97
        and elastic["final_accuracy"] > summary["target_accuracy"] - 0.005
    )
    assert elastic["seconds_to_target"] is not None
    assert elastic["uplink_bytes"] < full["uplink_bytes"]
    # Honest devices: nothing that they do is unusual.
    assert "were many times larger" not in done.stderr.partition("elastic, seed")[0]


@pytest.mark.deploy
@pytest.mark.slow
def test_the_app_of_a_new_project_runs_in_flowers_simulation(tmp_path: Path) -> None:
    folder, port = tmp_path / "fresh", free_port()
    write_project(folder)
    readme = (folder / "README.md").read_text()
    command = re.findall(r"flwr run \. --stream --federation-config '([^']+)'", readme)
    env = environment(tmp_path / "home", FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(port))
    try:
        done = subprocess.run(
            [binary("flwr"), "run", str(folder), "--stream", "--federation-config", command[0]],
            env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        run_id = re.findall(r"run (\d{5,})", said)[0]
        assert status_of(run_id, (), env, tmp_path) == "finished:completed", said
        assert said.count("Received 4 results and 0 failures") == 6
        # Beside the app, wherever Flower's processes work.
        assert len(list((folder / "state").glob("client-*"))) == 4
        assert not (tmp_path / "state").exists()
    finally:
        end(with_all_below(*superlink_of(port)))
