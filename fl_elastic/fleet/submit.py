"""Submit a run and wait for its end; Flower's own command returns after submitting."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fl_elastic.errors import FleetError
from fl_elastic.fleet.flower_cli import FlowerCommands, RunState, ServerUnreachable
from fl_elastic.fleet.private_files import PRIVATE_FILE, read_toml, toml_bytes, write_file
from fl_elastic.settings import Scalar

_PATIENCE = 300.0
"""Seconds without an answer after which waiting ends; a restart of the server takes less time."""


def app_settings(app: Path) -> dict[str, Any]:
    """Return the settings that an app declares, with their defaults.

    Raises
    ------
    FleetError
        If the folder is not a Flower app.
    """
    path = app / "pyproject.toml"
    if not path.is_file():
        raise FleetError(f"no Flower app in {app}: {path.name} is missing")
    table: Any = read_toml(path, "mend it")
    for key in ("tool", "flwr", "app"):
        table = table.get(key) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        raise FleetError(f"no Flower app in {app}: {path.name} has no [tool.flwr.app]")
    config = table.get("config", {})
    return config if isinstance(config, dict) else {}


def submit(runs: FlowerCommands, app: Path, settings: Mapping[str, Scalar]) -> str:
    """Submit an app and return the run's id.

    Raises
    ------
    FleetError
        If a setting is not declared by the app, or the server does not accept the run.
    """
    declared = app_settings(app)
    unknown = sorted(set(settings) - set(declared))
    if unknown:
        raise FleetError(
            f"{app} has no setting {', '.join(unknown)}; it has: {', '.join(sorted(declared)) or 'none'}"
        )
    with tempfile.TemporaryDirectory(prefix="fl-elastic-") as place:
        config = Path(place) / "run.toml"
        write_file(config, toml_bytes("Settings of one run.", settings), PRIVATE_FILE)
        return runs.run(app.resolve(), config)


def wait_for_run(
    runs: FlowerCommands,
    run_id: str,
    tell: Callable[[str], None],
    *,
    every: float = 3.0,
    patience: float = _PATIENCE,
    on_look: Callable[[], None] = lambda: None,
) -> RunState:
    """Wait until a run has ended; return its final state.

    An interruption (Ctrl-C) stops the run; nodes that are training finish their round, but the result is discarded.

    Parameters
    ----------
    runs : FlowerCommands
        The SuperLink that runs it.
    run_id : str
        Id of the run.
    tell : callable
        Called with a message for every change of its status.
    every : float
        Seconds between two queries.
    patience : float
        Seconds without an answer after which waiting ends with an error.
    on_look : callable
        Called after each query, for example to print rounds.

    Raises
    ------
    FleetError
        If the server does not answer for too long.
    """
    before, answered = "", time.monotonic()
    try:
        while True:
            try:
                state = runs.run_state(run_id)
                answered = time.monotonic()
            except ServerUnreachable as error:
                if time.monotonic() - answered > patience:
                    raise FleetError(f"run {run_id}: {error}") from error
                tell("the server does not answer; waiting for it")
            else:
                on_look()
                if state.status != before:
                    tell(f"run {run_id}: {state.status}")
                    before = state.status
                if state.finished:
                    return state
            time.sleep(every)
    except KeyboardInterrupt:
        tell(f"stopping run {run_id}")
        runs.stop(run_id)
        raise
