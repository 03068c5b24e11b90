"""``fl-elastic fleet up``: run a scenario on a real server and real nodes on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fl_elastic.devices.platform import processors
from fl_elastic.errors import FleetError
from fl_elastic.fleet.flower_cli import RunState
from fl_elastic.fleet.local import SERVER, LocalFleet
from fl_elastic.fleet.submit import wait_for_run
from fl_elastic.laboratory import from_laboratory
from fl_elastic.monitoring.journal import Journal
from fl_elastic.settings import Scalar


def run_local(
    nodes: int,
    scenario: Path | None,
    overrides: Iterable[str],
    *,
    method: str = "",
    seed: int = 0,
    data_root: str | None = None,
    keep: Path | None = None,
    threads: int = 0,
    tell: Callable[[str], None] = lambda text: None,
    on_rounds: Callable[[Path], Callable[[], None]] = lambda path: lambda: None,
) -> tuple[RunState, dict[str, Any]]:
    """Start a fleet, train a scenario on it, stop the fleet; return the run's final state and its results.

    Raises
    ------
    FleetError, ScenarioError
        If the fleet does not start, or the scenario does not fit it.
    """
    text = from_laboratory("scenario_text")(scenario, overrides, nodes, method=method)
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise FleetError(f"{keep} is not empty; give --keep a new folder")
    config: dict[str, Scalar] = {"threads": threads or max(1, processors().threads // nodes)}
    if data_root is not None:
        config["data-root"] = str(Path(data_root).resolve())
    with LocalFleet(nodes, keep, config=config, tell=tell) as fleet:
        run_id = fleet.submit(
            scenario=text, method=method, seed=seed,
            results=str(fleet.folder.results), data_root=config.get("data-root", ""),
        )  # fmt: skip
        look = on_rounds(fleet.folder.rounds)
        state = wait_for_run(fleet.flower, run_id, tell, every=1.0, on_look=look)
        result = result_of(fleet.folder.results, state)
        if not state.completed:
            tell("\n".join(fleet.end_of_log(SERVER, 15)))
    return state, result


def result_of(results: Path, state: RunState) -> dict[str, Any]:
    """Return accuracy, rounds, bytes and seconds of a run, from its folder and Flower's counts."""
    try:
        summary = json.loads((results / "summary.json").read_text())
    except (OSError, ValueError, RecursionError):
        summary = {}
    if not isinstance(summary, dict):
        summary = {}
    entries = Journal(results / "rounds.jsonl").entries()
    rounds = [entry for entry in entries if entry.get("round")]
    seconds = [float(entry["round_seconds"]) for entry in rounds if "round_seconds" in entry]
    found = {
        # Accuracy of the last round, and the final accuracy as a simulation reports it.
        "accuracy": rounds[-1].get("accuracy") if rounds else None,
        "final_accuracy": summary.get("final_accuracy"),
        "rounds": summary.get("rounds") or len(rounds),
        "method": summary.get("method"),
        "seconds_per_round": sum(seconds) / len(seconds) if seconds else None,
        "uplink_bytes": summary.get("uplink_bytes_total"),
        "downlink_bytes": summary.get("downlink_bytes_total"),
        "flower_bytes_to_server": state.to_server_bytes,
        "flower_bytes_to_nodes": state.to_nodes_bytes,
    }
    return {key: value for key, value in found.items() if value is not None}
