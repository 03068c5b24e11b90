"""The quickstarts, before they were converted and after, by Flower's own command or in this process."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_copies import blocks, copied
from example_runs import Run, difference, runs
from flwr.app import Context, Message, RecordDict
from in_process_grid import InProcessGrid

EXAMPLE = {"quickstart": "quickstart", "quickstart_transformers": "transformers"}
"""Folders of the examples, and what the names of their packages begin with."""


@pytest.mark.parametrize("example", EXAMPLE)
def test_the_difference_in_the_readme_is_the_real_one(example: str) -> None:
    assert blocks(example, "diff") == [difference(example, EXAMPLE[example], "plain", "elastic")]


@pytest.fixture
def flwr_run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs an app as the README says, and returns what its server printed."""
    with runs(getattr(request, "param", "quickstart"), tmp_path) as run:
        yield run


def accuracies(said: str) -> list[float]:
    return [float(number) for number in re.findall(r"'accuracy': '([\d.e+-]+)'", said)]


@pytest.mark.deploy
@pytest.mark.slow
def test_the_elastic_app_runs(flwr_run: Run, tmp_path: Path) -> None:
    said = flwr_run("elastic", "--run-config", "num-server-rounds=2")
    assert len(accuracies(said)) == 2
    assert said.count("Received 4 results and 0 failures") == 4  # of training and of testing
    assert "Traceback" not in said
    assert len(list((tmp_path / "quickstart" / "state").glob("client-*/profile-*.state"))) == 4


@pytest.mark.deploy
@pytest.mark.slow
def test_both_learn(flwr_run: Run) -> None:
    plain, elastic = flwr_run("plain"), flwr_run("elastic")
    last = re.findall(r"\(10, ([\d.]+)\)", plain)
    assert float(last[0]) > 0.9
    assert accuracies(elastic)[-1] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "elastic"])
def test_a_model_of_transformers_is_trained(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    place = copied("quickstart_transformers", tmp_path) / kind
    caplog.set_level("INFO", "flwr")
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    settings = tomllib.loads((place / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    config = {**settings["config"], "num-server-rounds": 1}

    def loaded(app: str) -> Any:
        module, name = settings["components"][app].split(":")
        return getattr(importlib.import_module(module), name)

    def answer(message: Message, context: Context) -> Message:
        context.run_config = config
        return loaded("clientapp")(message, context)

    grid = InProcessGrid(4, lambda node: answer)  # type: ignore[arg-type,return-value]
    loaded("serverapp")(
        grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    )
    said = caplog.text
    assert said.count("Received 4 results and 0 failures") == 2  # of training and of testing
    assert len(accuracies(said)) == 1


@pytest.mark.deploy
@pytest.mark.slow
@pytest.mark.parametrize("flwr_run", ["quickstart_transformers"], indirect=True)
def test_a_model_of_transformers_is_trained_in_both(flwr_run: Run) -> None:
    pytest.importorskip("transformers")
    for kind in ("plain", "elastic"):
        said = flwr_run(kind, "--run-config", "num-server-rounds=1")
        assert said.count("Received 4 results and 0 failures") == 2 and "Traceback" not in said
        assert len(accuracies(said)) == 1
