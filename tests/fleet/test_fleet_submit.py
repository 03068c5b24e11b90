"""Submitting: only declared settings, and the status that counts is the server's."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fleet_folders import make_fleet

from fl_elastic.errors import FleetError
from fl_elastic.fleet.flower_cli import RunState, ServerUnreachable
from fl_elastic.fleet.layout import FleetFolder
from fl_elastic.fleet.submit import app_settings, submit, wait_for_run


@dataclass
class Runs:
    """A SuperLink whose run goes through these statuses; an exception is raised."""

    statuses: list[str | BaseException] = field(default_factory=list)
    config: dict[str, object] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)

    def run(self, app: Path, config: Path) -> str:
        assert config.suffix == ".toml" and config.stat().st_mode & 0o077 == 0
        self.config = tomllib.loads(config.read_text())
        return "5"

    def run_state(self, run_id: str) -> RunState:
        status = self.statuses.pop(0)
        if isinstance(status, BaseException):
            raise status
        return RunState(run_id, status)

    def stop(self, run_id: str) -> None:
        self.stopped.append(run_id)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FleetFolder]:
    yield make_fleet(tmp_path / "fleet")


def test_the_fleets_own_app_takes_what_a_run_needs(folder: FleetFolder) -> None:
    assert app_settings(folder.app) == {
        "scenario": "", "method": "", "seed": 0, "results": "", "data-root": "", "resume": False,
        "round-timeout": 3600.0, "node-timeout": 120.0,
    }  # fmt: skip
    runs = Runs()
    settings = {"scenario": '{"title": "a \\"b\\""}', "seed": 3, "resume": True}
    assert submit(runs, folder.app, settings) == "5"
    assert runs.config == settings


def test_undeclared_settings_are_refused_before_anything_is_sent(folder: FleetFolder) -> None:
    with pytest.raises(FleetError, match=r"no setting sede; it has: .*seed"):
        submit(Runs(), folder.app, {"sede": 1})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"pyproject\.toml is missing"),
        ("x", "damaged"),
        ("[tool]", r"no \[tool\.flwr\.app\]"),
        ("tool = 1", r"no \[tool\.flwr\.app\]"),
    ],
)
def test_a_folder_without_an_app_is_one_clear_error(
    tmp_path: Path, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(FleetError, match=words):
        app_settings(tmp_path)


def test_it_waits_for_the_end_and_tells_changes_only() -> None:
    told: list[str] = []
    runs = Runs(["pending", "running", "running", "finished:failed"])
    looks: list[int] = []
    state = wait_for_run(runs, "5", told.append, every=0, on_look=lambda: looks.append(1))
    assert state == RunState("5", "finished:failed")
    assert told == ["run 5: pending", "run 5: running", "run 5: finished:failed"]
    assert len(looks) == 4


def test_a_server_that_restarts_is_waited_for() -> None:
    runs = Runs(["running", ServerUnreachable("away"), "finished:failed"])
    told: list[str] = []
    assert wait_for_run(runs, "5", told.append, every=0).finished
    assert "waiting" in told[1]


def test_a_server_that_stays_away_is_given_up() -> None:
    runs = Runs(["running", ServerUnreachable("away"), ServerUnreachable("away")])
    with pytest.raises(FleetError, match="run 5: away"):
        wait_for_run(runs, "5", lambda text: None, every=0.01, patience=0)


def test_an_interruption_stops_the_run() -> None:
    runs = Runs(["running", KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        wait_for_run(runs, "5", lambda text: None, every=0)
    assert runs.stopped == ["5"]
