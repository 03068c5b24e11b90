"""What a simulated client needs comes with its message, what it leaves goes back; a lost machine ends the run."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from choosing_costs import flat_choosing, steady
from flwr.app import Error, Message

from fl_elastic.errors import ScenarioError
from fl_elastic.profiling import CostProfile
from fl_elastic_simulations.engine.client import simulated_client_app
from fl_elastic_simulations.engine.in_process_grid import InProcessGrid
from fl_elastic_simulations.engine.progress import LoggedProgress
from fl_elastic_simulations.engine.run_result import RunResult
from fl_elastic_simulations.engine.server import Simulation, run_method
from fl_elastic_simulations.engine.workload import measure_profile
from fl_elastic_simulations.scenario import Scenario

TABLE: dict[str, Any] = {
    "title": "apart", "seeds": [0], "methods": ["elastic", "kept"],
    "data": {"dataset": "digits", "train_limit": 120, "test_limit": 30},
    "model": {"name": "digits_cnn"},
    "training": {"rounds": 3, "batch_size": 8},
    "deadline": {"quantile": 0.0},
    "method": {
        "elastic": {"policy": "elastic", "stragglers": "fit", "codec": "int8"},
        "kept": {"policy": "full", "cut": "fixed:conv4", "keep_features": True},
    },
    "fleet": [{"device": "laptop", "count": 2}, {"device": "pi_4b", "count": 1}],
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> Scenario:
    return Scenario.from_json(json.dumps(TABLE))


@pytest.fixture(scope="module")
def profile(made: Scenario) -> CostProfile:
    return steady(measure_profile(made, None))


def ran(
    folder: Path, made: Scenario, profile: CostProfile, method: str, grid: InProcessGrid
) -> RunResult:
    simulation = Simulation(made, folder)
    section = made.method_named(method)
    choosing = flat_choosing(made)
    return run_method(simulation, grid, LoggedProgress(), section, 0, profile, choosing)


def _planned(cell: RunResult) -> dict[str, Any]:
    """All of a result but where its steps were taken, and how long that really took."""
    found = asdict(cell)
    steps = [{**each, "seconds": 0.0} for each in found["steps"]]
    return found | {"steps": steps, "machines": {}}


class Elsewhere(InProcessGrid):
    """Clients cannot reach the server's folder, and whatever one writes where it runs is gone afterwards."""

    def _answer(self, message: Message, identity: str | None = None) -> Message:
        for config in message.content.config_records.values():
            if "state-dir" in config:
                config["state-dir"] = "/proc/no/folder"
        scratch = Path(tempfile.gettempdir())
        before = set(scratch.iterdir())
        reply = super()._answer(message, identity)
        assert set(scratch.iterdir()) == before
        return reply


@pytest.mark.parametrize("method", ["elastic", "kept"])
@pytest.mark.slow
def test_clients_remember_the_same_on_machines_that_share_no_folder(
    method: str,
    made: Scenario,
    profile: CostProfile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    clients, app = len(made.clients), simulated_client_app()
    here = ran(tmp_path / "here", made, profile, method, InProcessGrid(clients, app))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    apart = ran(tmp_path / "apart", made, profile, method, Elsewhere(clients, app))
    assert here.rejected == 0 and _planned(apart) == _planned(here)
    assert apart.machines == {platform.node(): clients * made.training.rounds}
    assert here.machines == {}
    left = [
        sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        for folder in (tmp_path / "here", tmp_path / "apart")
    ]
    assert left[0] == left[1] and len(left[0]) >= clients


def test_a_machine_that_is_lost_ends_the_run(
    made: Scenario, profile: CostProfile, tmp_path: Path
) -> None:
    class Dying(InProcessGrid):
        def send_and_receive(self, messages: Iterable[Message], **options: Any) -> Any:
            for reply, message in zip(super().send_and_receive(messages), messages, strict=True):
                lost = message.metadata.message_type == "train"
                yield (
                    Message(Error(0, "ActorDiedError\n\nand more"), reply_to=message)
                    if lost
                    else reply
                )

    grid = Dying(len(made.clients), simulated_client_app())
    with pytest.raises(
        ScenarioError, match=r"machine was lost.*ActorDiedError; run again with --resume"
    ):
        ran(tmp_path, made, profile, "elastic", grid)
